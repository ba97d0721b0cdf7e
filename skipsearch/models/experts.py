"""Mixtures of experts: what a model has, which experts each row reads, and a copy that reads fewer.

An MLP of such a model is a router and N experts. The router scores all experts for each row, and
the k experts with the highest scores run. They are found by structure: a module with the child
`experts`, whose weights have one entry for each expert, and another child with the attributes
`top_k` and `num_experts`, the router. Other families than those of `FAMILIES` may have such modules
with another meaning.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Families whose routers return (…, indices of the chosen experts [rows, top_k]).
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


@contextmanager
def record_experts(model: Any) -> Iterator[list[Tensor]]:
    """Record which experts the rows of this thread's passes read. The passes do not change.

    Yields a list to which each router adds a tensor [rows, k] of expert indices, in the order in
    which routers run: layer by layer, pass by pass.
    """
    recorded, thread = list[Tensor](), threading.get_ident()

    def note(router: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            recorded.append(output[-1].detach())

    handles = [router.register_forward_hook(note) for router, _ in _list_blocks(model)]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


class _FusedRecording(threading.local):
    chosen: list[Tensor] | None = None


_fused_recording = _FusedRecording()


@contextmanager
def record_fused_experts() -> Iterator[list[Tensor]]:
    """Record which experts the rows of this thread's passes of fused models read.

    Yields a list as `record_experts` does.
    """
    before, recorded = _fused_recording.chosen, list[Tensor]()
    _fused_recording.chosen = recorded
    try:
        yield recorded
    finally:
        _fused_recording.chosen = before


def is_recording_fused() -> bool:
    """Return whether `note_fused_experts` is to be called."""
    return _fused_recording.chosen is not None


def note_fused_experts(chosen: Tensor) -> None:
    """Note the experts [rows, k] that the rows of one layer read."""
    if _fused_recording.chosen is not None:
        _fused_recording.chosen.append(chosen.detach())


def pack_experts(recorded: Sequence[Tensor], n_experts: int) -> np.ndarray:
    """Return the experts that each row reads as bit sets, uint8 [rows, layers, bytes].

    recorded: the tensors [rows, k] of one pass, one for each layer.
    """
    sets = [
        torch.zeros(len(chosen), n_experts, dtype=torch.bool, device=chosen.device)
        .scatter_(1, chosen, value=True)
        .cpu()
        .numpy()
        for chosen in recorded
    ]
    return np.packbits(np.stack(sets, axis=1), axis=-1)


def count_distinct_experts(sets: np.ndarray, max_rows: int) -> np.ndarray:
    """Return how many experts a pass over the rows a … a + n reads, int32 [rows, max_rows].

    sets: bit sets from `pack_experts`. Column n is for n + 1 rows; all layers are added up. Rows
    after the last one read nothing.
    """
    union, counts = sets.copy(), np.zeros((len(sets), max_rows), dtype=np.int32)
    for n in range(max_rows):
        if n:
            union[: max(0, len(sets) - n)] |= sets[n:]
        counts[:, n] = np.bitwise_count(union).sum(axis=(1, 2))
    return counts


def experts_first_order(experts: Any) -> Tensor:
    """Return, for the rows of the gates of all experts and then of their ups, their places.

    experts: a module of transformers, whose matrices of gates and ups are [E, 2 · I, H] or
    transposed. A place is a row of them as [E · 2 · I, H]. Returns [2 · E · I].
    """
    weight = experts.gate_up_proj  # on the device "meta" if a file has it
    n, width = weight.shape[0], weight.shape[2 if experts.is_transposed else 1]
    device = None if weight.is_meta else weight.device
    places = torch.arange(n * width, device=device).view(n, width)
    if experts.is_concatenated:  # else rows of gate and up alternate
        return places.view(n, 2, -1).transpose(0, 1).flatten()
    return places.view(n, -1, 2).permute(2, 0, 1).flatten()


def with_fewer_experts(module: Any, per_token: int) -> Any:
    """Return a copy of a module whose routers choose `per_token` experts. Weights are shared.

    Only the modules that contain a router are copied. The router weighs the chosen experts by its
    own rule: mixtral and gpt_oss give them a sum of 1, qwen2_moe, qwen3_moe and olmoe do so if the
    config has `norm_topk_prob`.
    """
    routers = {id(router) for router, _ in _list_blocks(module)}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) in routers:
            router: Any = copy.copy(part)
            router.top_k = per_token
            return router
        children = {
            name: child and copied(child)
            for name, child in part._modules.items()  # None: a child that the config leaves out
        }
        if all(child is part._modules[name] for name, child in children.items()):
            return part
        clone = copy.copy(part)
        clone.__dict__["_modules"] = children  # `copy.copy` shares it
        return clone

    return copied(module)


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
