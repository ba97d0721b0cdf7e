"""Mixtures of experts: what a model has, and how much of it a row reads.

An MLP of such a model is a router and N experts. The router scores all experts for each row, and
the k experts with the highest scores run. They are found by structure: a module with the child
`experts`, whose weights have one entry for each expert, and another child with the attributes
`top_k` and `num_experts`, the router. Other families than those of `FAMILIES` may have such modules
with another meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Families whose modules of this structure are experts and their router.
FAMILIES = {
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
}


@dataclass(frozen=True)
class Experts:
    """The experts of a model."""

    n_experts: int  # of a layer
    per_token: int  # k: experts of a layer that one row reads
    n_layers: int  # layers with experts
    expert_bytes: int  # bytes of one expert of one layer

    @property
    def unread_bytes(self) -> int:
        """Bytes of the experts that a pass over one row does not read."""
        return (self.n_experts - self.per_token) * self.n_layers * self.expert_bytes

    def __str__(self) -> str:
        """Return `reads 8 of 64 experts a token`."""
        return f"reads {self.per_token} of {self.n_experts} experts a token"


def find_experts(model: Any) -> Experts | None:
    """Return the experts of a model of transformers.

    None if it has none, if its layers differ in them, or if its family is not one of `FAMILIES`.
    """
    if model.config.get_text_config(decoder=True).model_type not in FAMILIES:
        return None
    blocks = list(_list_blocks(model))
    kinds = {
        Experts(
            router.num_experts,
            router.top_k,
            len(blocks),
            sum(weight.nbytes for weight in experts.parameters()) // router.num_experts,
        )
        for router, experts in blocks
    }
    return kinds.pop() if len(kinds) == 1 else None


def name_input_weight(experts: Any) -> str:
    """Return the name of the weight that reads the inputs of experts: of gates and ups, or of ups.

    experts: a module of transformers.
    """
    return "gate_up_proj" if experts.has_gate else "up_proj"


def experts_first_order(experts: Any) -> Tensor:
    """Return, for the rows of the gates of all experts and then of their ups, their places.

    experts: a module of transformers, whose matrices of gates and ups are [E, 2 · I, H] or
    transposed. A place is a row of them as [E · 2 · I, H]. Returns [2 · E · I]; without gates,
    [E · I].
    """
    weight = getattr(experts, name_input_weight(experts))  # on "meta" if a file has it
    n, width = weight.shape[0], weight.shape[2 if experts.is_transposed else 1]
    device = None if weight.is_meta else weight.device
    places = torch.arange(n * width, device=device).view(n, width)
    if not experts.has_gate:
        return places.flatten()
    if experts.is_concatenated:  # else rows of gate and up alternate
        return places.view(n, 2, -1).transpose(0, 1).flatten()
    return places.view(n, -1, 2).permute(2, 0, 1).flatten()


def _list_blocks(model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Yield (router, experts) of each MLP with experts, in the order of the layers."""
    for module in model.modules():
        experts = module._modules.get("experts")
        routers = [
            child
            for child in module._modules.values()
            if isinstance(getattr(child, "top_k", None), int)
            and isinstance(getattr(child, "num_experts", None), int)
        ]
        if len(routers) == 1 and _has_experts(experts, routers[0].num_experts):
            yield routers[0], experts


def _has_experts(module: nn.Module | None, n_experts: int) -> bool:
    """Return whether each weight of a module has one entry for each expert."""
    weights = [] if module is None else list(module.parameters())
    return bool(weights) and all(len(weight) == n_experts for weight in weights)
