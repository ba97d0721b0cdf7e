"""A tiny random model of every causal language model class that the installed transformers can
build so, and how each is decoded.

Run as a program, it walks over all of them, writes the golden file and prints the table of
docs/models.md: `PYTHONPATH=.. python -m models.every_class` in tests/."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from skipsearch.core.mask import SkipMask
from skipsearch.engine.forward import forward
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import FAMILIES
from skipsearch.models.kv_cache import Planner

from .tiny import SHAPE, TINY, VOCAB, randomised

GOLDEN = Path(__file__).parent / "golden" / "families.json"
LARGEST = 3_000_000  # values of a model that counts as tiny
EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
}
SPANS = {"sliding_window": 8, "attention_chunk_size": 8, "rotary_dim": 4, "head_dim": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
LAYERED: dict[
    str, dict[str, Any]
] = {  # classes whose layers differ, some of each kind, and others with settings of their own
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": 4,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "chunk_size": 16, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {
        **EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "head_dim": 8,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {**DELTA, "head_dim": 8},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**EXPERTS, **DELTA},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 96,
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "gpt_neo": {
        "attention_types": [[["global", "local", "global"], 1]],
        "num_layers": 3,
        "window_size": 8,
    },
    "zaya": {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "use_mem_rope": True,
        "adapter_rank": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
    },
}
ALL = {**EXPERTS, **LATENT, **SPANS}

PROMPT, ANSWER = 11, 14  # tokens, together more than a window
REASONS = (  # why a class is refused, one of these
    "both attends and keeps a recurrent state",
    "an encoder feeds its decoder",
    "its tokens look ahead",
    "no rule here says what layers of the kind",
    "otherwise than its own forward with siblings",
    "is no module of its own",
    "writes nothing to transformers' own cache",
    "no list of modules in it",
    "fails on tokens alone",
    "does not take our cache",
    "cannot be driven after a rollback",
    "transformers has no model of them",
)

IN_WORDS = {  # of those that are cut out of a longer sentence
    "no rule here says what layers of the kind": "has a kind of layer that no rule here describes",
    "otherwise than its own forward with siblings": "computes something else when siblings are in "
    "a pass",
    "its tokens look ahead": "its tokens see later ones, so it is no decoder",
    "no list of modules in it": "its layers are not in one list of modules",
    "is no module of its own": "its attention is no module of its own",
    "fails on tokens alone": "its forward needs more than tokens",
    "does not take our cache": "its forward does not take a cache of ours",
    "structure": "read from the model itself",
    "structure, recurrent": "read from the model itself, with recurrent layers",
}

REFUSED_RECURRENT = (
    "deepseek_v4",
    "qwen4_exp_text",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
)  # for reasons that others have too
NO_DECODER = (
    "an encoder feeds its decoder",
    "its tokens look ahead",
    "fails on tokens alone",
    "transformers has no model of them",
)


@dataclass(frozen=True)
class Walked:
    """outcome: exact, refused, unbuilt or wrong; how: by a row, by structure, or what speaks
    against it.

    accepted, rejected: drafted tokens of the walk, for an exact one.
    """

    family: str
    outcome: str
    how: str
    accepted: int = 0
    rejected: int = 0


def families() -> list[str]:
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def build(family: str) -> nn.Module:
    """In float64. Raises: whatever a class that cannot be built so raises."""
    if family in TINY and TINY[family].family == family:
        options = [{**SHAPE, **TINY[family].config}]
    else:
        kind = CONFIG_MAPPING[family]
        fields = {field.name for field in dataclasses.fields(kind)} | set(
            getattr(kind, "attribute_map", {})
        )
        own = {key: value for key, value in ALL.items() if key in fields} | LAYERED.get(family, {})
        all_heads = {"num_key_value_heads": 4} if "qk_rope_head_dim" in fields else {}
        options = [
            {**SHAPE, **own, **all_heads},
            {**SHAPE, **own, "pad_token_id": 0, "bos_token_id": 0},
            {key: value for key, value in {**SHAPE, **own}.items() if key != "head_dim"},
            SHAPE,
        ]
    failure: Exception | None = None
    for option in options:
        try:
            return _built(family, option)
        except Exception as error:  # each class checks its config in its own way
            failure = failure or error
    assert failure is not None
    raise failure


def _built(family: str, options: dict[str, Any]) -> nn.Module:
    config = CONFIG_MAPPING[family](**options)
    with torch.device("meta"):
        size = sum(
            weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > LARGEST:
        raise ValueError(f"{size:,} weights are not tiny")
    config = CONFIG_MAPPING[family](**options)
    config.get_text_config()._experts_implementation = "eager"  # the grouped kernels know no fp64
    torch.manual_seed(0)
    return (
        randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
        .eval()
        .requires_grad_(False)
    )


def walk(family: str) -> Walked:
    try:
        model = build(family)
    except Exception as error:
        return Walked(
            family, "unbuilt", f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        )
    try:
        adapter = adapt(model)
    except ModelError as error:
        return Walked(
            family,
            "refused",
            next((reason for reason in REASONS if reason in str(error)), str(error)),
        )
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    theirs = own_text(model, prompt)
    how = (
        "a row of the table"
        if family in FAMILIES
        else "structure, recurrent"
        if adapter.spec.is_recurrent
        else "structure"
    )
    generator, accepted, rejected = torch.Generator().manual_seed(6), 0, 0
    for _ in range(2):
        bits = torch.rand(2 * adapter.spec.n_layers, generator=generator) < 0.4
        mask = SkipMask.from_sublayers(adapter.spec.n_layers, [int(i) for i in bits.nonzero()])
        mine, right, wrong = greedy(adapter, prompt, mask)
        if mine != theirs:
            return Walked(family, "wrong", how)
        accepted, rejected = accepted + right, rejected + wrong
    return Walked(family, "exact", how, accepted, rejected)


@torch.no_grad()
def own_text(model: Any, prompt: torch.Tensor) -> list[int]:
    """As the model's own `generate` goes on; where that fails on its own cache, as its forward over
    the whole text does.
    """
    try:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    except ValueError:
        out = prompt
        for _ in range(ANSWER):
            out = torch.cat(
                [out, model(input_ids=out, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1
            )
    return out[0, PROMPT:].tolist()


@torch.no_grad()
def greedy(
    model: ModelAdapter, prompt: torch.Tensor, mask: SkipMask, drafted: int = 3
) -> tuple[list[int], int, int]:
    """Draft, verify, roll back, over our cache: the rounds of a decoder, as short as they can be
    written. (tokens, accepted, rejected).
    """
    capacity = PROMPT + ANSWER + drafted + 1
    cache, planner = model.new_cache(1, capacity), Planner(capacity, model.spec.device)
    out = [int(forward(model, prompt, cache, planner.plan_chain(0, PROMPT))[0, -1].argmax())]
    at, accepted, rejected = PROMPT, 0, 0
    while len(out) < ANSWER:
        tokens = [out[-1]]
        for i in range(drafted):
            logits = forward(
                model, torch.tensor([tokens[-1:]]), cache, planner.plan_chain(at + i, 1), mask
            )
            tokens.append(int(logits[0, -1].argmax()))
        right = (
            forward(model, torch.tensor([tokens]), cache, planner.plan_chain(at, len(tokens)))[0]
            .argmax(dim=-1)
            .tolist()
        )
        kept = next((i for i in range(drafted) if tokens[i + 1] != right[i]), drafted)
        out += right[: kept + 1]
        at += kept + 1
        accepted, rejected = accepted + kept, rejected + (kept < drafted)
    return out[:ANSWER], accepted, rejected


def table(walked: list[Walked]) -> str:
    """By outcome and reason, as Markdown."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in walked:
        if one.outcome != "unbuilt":
            rows.setdefault((one.outcome, one.how), []).append(one.family)
    lines = [
        f"| {outcome} | {IN_WORDS.get(how, how)} | {', '.join(names)} ({len(names)}) |"
        for (outcome, how), names in sorted(rows.items())
    ]
    return "\n".join(["| decoded | how, or why not | families |", "|---|---|---|", *lines])


def recurrent_ones(walked: list[Walked]) -> list[Walked]:
    """Those that keep recurrent states, and were built."""
    hows = ("structure, recurrent", "both attends and keeps a recurrent state")
    return [
        one
        for one in walked
        if one.outcome != "unbuilt" and (one.how in hows or one.family in REFUSED_RECURRENT)
    ]


def plain_ones(walked: list[Walked]) -> list[Walked]:
    """Those that continue text, keep K/V alone, and were built."""
    recurrent = {one.family for one in recurrent_ones(walked)}
    return [
        one
        for one in walked
        if one.outcome != "unbuilt" and one.family not in recurrent and one.how not in NO_DECODER
    ]


def golden() -> list[Walked]:
    """What the walk found with the transformers of constraints.txt."""
    return [Walked(**entry) for entry in json.loads(GOLDEN.read_text("utf-8"))["walked"]]


if __name__ == "__main__":
    found = []
    for family in families():
        found.append(walk(family))
        print(found[-1], flush=True)
    entries = ",\n".join("  " + json.dumps(asdict(one)) for one in found)
    GOLDEN.write_text(
        f'{{"transformers": "{transformers.__version__}", "walked": [\n{entries}\n]}}\n', "utf-8"
    )
    print(table(found))
