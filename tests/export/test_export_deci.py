"""Sub-layers out: a reference that knows the DeciLM format alone computes from the exported folder what a draft pass computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import LAYERS, new_hf_model, some_tokens

from skipsearch.errors import ExportError
from skipsearch.export import export
from skipsearch.mask import SkipMask
from skipsearch.models import adapt, load_adapter

from .drafts import drafted_logits, profile_for, saved
from .reference_decilm import DeciLM

TOKENS = some_tokens(20)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}   # transformers computes norms and angles in fp32 even here
WIDE: dict[str, Any] = {"intermediate_size": 256}
PLAIN: dict[str, Any] = {**WIDE, "attention_bias": False, "mlp_bias": False}
STRETCHED = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 3.0, "original_max_position_embeddings": 16}}
SHAPES = {"untied": ("llama", PLAIN), "tied": ("llama-tied", WIDE), "mistral": ("mistral", WIDE),
          "512 wide": ("llama-tied", {"intermediate_size": 512}), "llama 3 positions": ("llama", PLAIN | STRETCHED),
          "one K/V head": ("llama", PLAIN | {"num_key_value_heads": 1})}


def exported(model: Any, mask: SkipMask, folder: Path) -> Path:
    source = saved(model, folder / "model")
    export(profile_for(str(source), model.config.model_type, mask), str(source), "deci", folder / "draft")
    return folder / "draft"


@pytest.mark.parametrize("mask", [SkipMask(LAYERS, (1,), (2,)), SkipMask(LAYERS, (1, 2), (0, 1)), SkipMask(LAYERS, (), (0, 1, 2))], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_checkpoint_computes_what_the_draft_does(shape: str, mask: SkipMask, tmp_path: Path) -> None:
    name, changes = SHAPES[shape]
    model = new_hf_model(name, **changes)
    found = DeciLM(exported(model, mask, tmp_path)).logits(TOKENS[0])
    expected = drafted_logits(adapt(model), TOKENS, mask)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found - drafted_logits(adapt(model), TOKENS, SkipMask(LAYERS))).abs().max() > 0.1, "the mask makes a difference"


def test_the_embedded_model_exports_and_computes_what_its_draft_does(tmp_path: Path) -> None:
    mask = SkipMask(20, (3, 7, 11), (3, 8, 19))
    export(profile_for("demo", "llama", mask), "demo", "deci", tmp_path / "draft")
    model = load_adapter("demo", device="cpu", dtype="float64")
    tokens = torch.tensor([model.tokenizer("def main(argv=None):")["input_ids"]])
    found = DeciLM(tmp_path / "draft").logits(tokens[0])
    torch.testing.assert_close(found, drafted_logits(model, tokens, mask), **CLOSE)


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("qwen3", {}, "qwen3 is not Llama-shaped"),
    ("gpt2", {}, "gpt2 is not Llama-shaped"),
    ("mistral-window", WIDE, "sees 8 tokens only"),
    ("llama", WIDE, "projections have biases"),
    ("llama-tied", {}, "MLP is 48 wide, which is no multiple of 256"),
    ("llama-tied", WIDE | {"head_dim": 16}, "heads are 16 wide"),
    ("llama-tied", WIDE | {"hidden_act": "gelu"}, "MLP uses gelu"),
])
def test_a_model_that_the_format_has_no_words_for_is_refused(
        name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"has no DeciLM form: .*{reason}"):
        exported(new_hf_model(name, **changes), SkipMask(LAYERS, (1,)), tmp_path)


def test_the_first_layer_keeps_its_attention(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="skips the attention of layer 0"):
        exported(new_hf_model("llama-tied", **WIDE), SkipMask(LAYERS, (0,), (1,)), tmp_path)


@pytest.mark.thorough
def test_transformers_reads_the_config_with_the_class_beside_it_and_writes_it_again(tmp_path: Path) -> None:
    """In the way that engines do, which read `block_configs` by attribute."""
    draft = exported(new_hf_model("llama-tied", **WIDE), SkipMask(LAYERS, (1,), (2,)), tmp_path)
    code = (f"from transformers import AutoConfig\nfor folder in ({str(draft)!r}, {str(tmp_path / 'again')!r}):\n"
            "    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)\n"
            f"    config.save_pretrained({str(tmp_path / 'again')!r})\n"
            "    print([(b.attention.no_op, b.attention.n_heads_in_group, b.ffn.no_op, b.ffn.ffn_mult) for b in config.block_configs])")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300,
                         env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"})
    assert ran.stdout.splitlines() == ["[(False, 2, False, 12.0), (True, None, False, 12.0), (False, 2, True, None)]"] * 2, ran.stderr


def test_its_readme_says_that_no_engine_has_tried_it_and_which_layers_llama_cpp_gets_wrong(tmp_path: Path) -> None:
    text = (exported(new_hf_model("llama-tied", **WIDE), SkipMask(LAYERS, (1,), (1, 2)), tmp_path) / "README.md").read_text()
    assert "No engine has loaded such a folder yet" in text
    assert "cannot be an\n`assistant_model`" in text
    assert "of a layer that has no MLP, here 2." in text
    assert "--trust-remote-code" in text
