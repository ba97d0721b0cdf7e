"""Tiny draft models of other families and formats, which draft well but not perfectly for the tiny
model that most tests share: they have its embedding and its head, and layers of their own.
"""

from __future__ import annotations

import tempfile
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers.gguf_files import round_model, write_model
from helpers.tiny import LAYERS, FullModel, current_device, tiny_llama
from skipsearch.core.recipe import Siblings
from skipsearch.core.schema_types import SkippedLayers
from skipsearch.drafters.draft_model.loaded_models import refer_to_draft_model
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.exits.exit_base import Exit
from skipsearch.engine import load_model
from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.engines import wrap_engine
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model

SCALES = {"o_proj": 0.35, "out_proj": 0.35, "down_proj": 0.2, "q_proj": 3.0, "k_proj": 3.0}
RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def make_relative(
    target: Any, family: str = "qwen2", layers: int = 3, seed: int = 3, **more: Any
) -> Any:
    """A random model with the embedding and the head of another one, in float64. more: of its
    config. With `vocab_size`, it has more tokens at the end.
    """
    shape = target.config
    config = CONFIG_MAPPING[family](
        **{
            "vocab_size": shape.vocab_size,
            "num_hidden_layers": layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1100,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **more,
        }
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model = model.eval().requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            scale = SCALES.get(name.split(".")[-2], 1.0)
            fan_in = 1 if "embed" in name or "lm_head" in name else weight.shape[1]
            noise = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
            weight.copy_(noise * scale * fan_in**-0.5)
    for own, full in (
        (model.get_input_embeddings(), target.get_input_embeddings()),
        (model.lm_head, target.lm_head),
    ):
        own.weight[: len(full.weight)] = full.weight
    return model


def prune_layers(target: Any, layers: int) -> Any:
    """A copy with the first layers alone."""
    pruned = tiny_llama(layers=layers, vocab=target.config.vocab_size)
    weights = target.state_dict()
    pruned.load_state_dict({name: weights[name] for name in pruned.state_dict()})
    return pruned


def drive(hf: Any, engine: str) -> ModelAdapter:
    """A model under an engine."""
    model = adapt(hf)
    if engine == "hf":
        return model
    lean = fuse_model(hf, replace(model.spec, engine="lean"), family_of(hf.config))
    return GraphAdapter(lean) if engine == "graph" else wrap_engine(lean, engine)


def draft_model_of(kind: str) -> tuple[ModelAdapter, FullModel]:
    """A draft model for `tiny_model_and_reference()`, on its device, and its own view of a text."""
    return _make_draft_model(kind, current_device())


@cache
def _make_draft_model(kind: str, device: str) -> tuple[ModelAdapter, FullModel]:
    target = tiny_llama()
    if kind == "gguf":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tiny.gguf"
            write_model(target, path, "Q4_0", metadata={"tokenizer.ggml.model": "none"})
            return load_model(str(path), engine="native"), FullModel(
                round_model(tiny_llama().float(), "Q4_0")
            )
    make = {
        "qwen2": lambda: make_relative(target),
        "pruned": lambda: prune_layers(target, LAYERS - 2),
        "captured": lambda: prune_layers(target, LAYERS - 2),
        "recurrent": lambda: make_relative(target, "qwen3_5_text", **RECURRENT),
    }[kind]
    engine = {"pruned": "native" if device == "cpu" else "lean", "captured": "graph"}
    return drive(make().to(device), engine.get(kind, "hf")), FullModel(make())


def draft_spec(
    model: ModelAdapter,
    draft_length: int = 4,
    exit_policy: Exit | None = None,
    siblings: Siblings | None = None,
    attn: SkippedLayers = (),
    mlp: SkippedLayers = (),
    **reading: Any,
) -> DraftModel:
    """The settings of a draft model in memory."""
    return DraftModel(
        model=refer_to_draft_model(model),
        draft_length=draft_length,
        exit=exit_policy or make_exit("fixed"),
        siblings=siblings,
        attn=attn,
        mlp=mlp,
        **reading,
    )


def with_spec(model: ModelAdapter, **changes: Any) -> ModelAdapter:
    """The same weights with other facts."""
    other = copy(model)
    other.spec = replace(other.spec, **changes)
    return other
