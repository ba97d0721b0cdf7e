"""Checks of lossless decoding of models with recurrent layers.

Their states have no slots that a mask could hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from helpers.tiny import LAYERS, VOCAB, FullModel
from models.tiny import randomised
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.models import ModelAdapter, adapt

from .checks import DRAFTINGS, Drafting, assert_partly_accepted, check_greedy
from .prefix_checks import TURNS, check_prefixes

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1100,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **DELTA,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
            "full_attention",
        ],
    },
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "head_dim": 8,
        "mamba_chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}
CHAINS = tuple(
    drafting
    for drafting in DRAFTINGS
    if drafting.siblings is None and drafting.draft_length != 1 and drafting.reading.is_everything
)


@cache
def recurrent_world(family: str) -> tuple[ModelAdapter, FullModel]:
    """Return a model in float64; some families have states in float32 nonetheless."""
    config = CONFIG_MAPPING[family](**SHAPE, **KINDS[family])
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    hf = (
        randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
        .eval()
        .requires_grad_(False)
    )
    return adapt(hf), FullModel(hf)


def check_recurrent(
    family: str = "lfm2", draftings: Sequence[Drafting] = (CHAINS[0], CHAINS[-1])
) -> DecodeStats:
    """Check requests one after the other with drafts of every kind, and chats that continue."""
    world = recurrent_world(family)
    total = check_greedy(draftings, world=world)
    assert_partly_accepted(total)
    chats = check_prefixes(TURNS[:6], drafting=CHAINS[0], world=world)
    assert chats.cached_tokens > 0
    return total + chats


def check_growing_recurrent() -> None:
    """Check that a session keeps states and tokens when its cache grows.

    The tokens to add to the next pass are right there too.
    """
    model, full = recurrent_world("lfm2")
    for first in range(4):
        prompt = tuple((first + i * 7) % VOCAB for i in range(244))
        session = Decoder(model, CHAINS[0].recipe).new_session()
        session.generate(prompt, 12)
        longer = (*session.cached_ids[:-1], 5)
        again = session.generate(longer, 8)
        assert again.stats.cached_tokens > len(prompt)
        assert again.tokens == full.greedy(longer, 8)
