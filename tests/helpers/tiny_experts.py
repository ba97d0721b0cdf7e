"""Tiny mixtures of experts whose drafts are often right, but not always."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@torch.no_grad()
def tiny_experts(family: str) -> Any:
    """A random fp64 model with 6 experts, whose residual branches are small."""
    config = AutoConfig.for_model(
        family,
        vocab_size=48,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=6,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        swiglu_limit=1.0,
        sliding_window=None if family == "mixtral" else 128,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    config._experts_implementation = "eager"  # the grouped kernels know no fp64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            scale = 1.0 if "embed" in name or "lm_head" in name else 0.7
            if name.endswith(("gate.weight", "router.weight", "q_proj.weight", "k_proj.weight")):
                scale = 3.0
            fan_in = 1 if "embed" in name or "lm_head" in name else 32
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(noise * scale * fan_in**-0.5)
        elif "bias" in name or "sinks" in name:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(0.1 * noise)
    return model.eval().requires_grad_(False)
