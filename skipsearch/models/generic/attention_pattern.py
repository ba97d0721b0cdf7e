"""The attention pattern of each layer, read from the model's own masks and applied to any plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipsearch.errors import ModelError
from skipsearch.models import attention_masks
from skipsearch.models.kv_cache import PassPlan


@dataclass(frozen=True)
class AttentionPattern:
    """The attention pattern of a layer: causal, with a window, or by chunks.

    A token attends to all tokens up to its own, to the last `window`, or to those of its chunk.
    """

    # Form of the mask in the model's own forward: "additive" (a bias), "shown" (bool, True is
    # visible), "hidden" (bool, True is hidden), or "none".
    mask_kind: str
    window: int | None = None  # tokens, the token itself included
    chunk: int | None = None  # tokens of a chunk

    def visible_keys(self, plan: PassPlan) -> Tensor:
        """Return which keys each token attends to, [B or 1, 1, T, keys] bool."""
        visible = attention_masks.with_window(plan, self.window)
        visible = attention_masks.full_mask(plan) if visible is None else visible
        if self.chunk is None or plan.n_keys <= self.chunk:
            return visible
        return visible & (
            attention_masks.get_key_positions(plan)[:, None, None] // self.chunk
            == plan.positions[:, None, :, None] // self.chunk
        )

    def make_mask(self, plan: PassPlan, dtype: torch.dtype) -> Tensor:
        """Return the mask in the form that the layer needs, [B, 1, T, keys]."""
        visible = self.visible_keys(plan).expand(len(plan.positions), -1, -1, -1)
        if self.mask_kind == "additive":
            return attention_masks.make_additive(visible, dtype)
        return visible if self.mask_kind == "shown" else ~visible

    def is_plain_causal(self, plan: PassPlan) -> bool:
        """Return whether the kernel's own causal mask is right for a plan.

        The plan must have no mask, and no window or chunk may end within it.
        """
        return plan.mask is None and plan.n_keys <= min(
            self.window or plan.n_keys, self.chunk or plan.n_keys
        )


def infer_pattern(own_mask: Tensor | None, start: int, chunk: int | None) -> AttentionPattern:
    """Return the pattern of a layer's own mask.

    own_mask: [1, 1, 2, start + 2], for two tokens after `start` others; None: the layer gets no
    mask. chunk: tokens, from the config. Raises: ModelError for a pattern that is neither causal,
    nor a window, nor chunks."""
    if own_mask is None:
        return AttentionPattern("none")
    own_mask = own_mask[:, :, :2, : start + 2]
    mask_kind = (
        "additive"
        if own_mask.is_floating_point()
        else "shown"
        if bool(own_mask[0, 0, 1, -1])
        else "hidden"
    )
    visible = (
        own_mask == 0
        if mask_kind == "additive"
        else own_mask
        if mask_kind == "shown"
        else ~own_mask
    )[0, 0]
    first_visible = [int(row.long().argmax()) for row in visible]
    n_visible = [start + 1 - first_visible[0], start + 2 - first_visible[1]]
    if [int(row.sum()) for row in visible] != n_visible or bool(visible[0, -1]):
        raise ModelError("a layer's own mask hides tokens between others that it shows")
    if first_visible == [0, 0]:
        return AttentionPattern(mask_kind)
    if n_visible[0] == n_visible[1]:
        return AttentionPattern(mask_kind, window=n_visible[0])
    if chunk and first_visible == [(start + i) // chunk * chunk for i in range(2)]:
        return AttentionPattern(mask_kind, chunk=chunk)
    raise ModelError(
        "a layer's own mask is neither causal, nor a sliding window, nor one of chunks"
    )


def reindex_bias(bias: Tensor, plan: PassPlan) -> Tensor:
    """Return a bias by key, [..., K ≥ keys], indexed by position instead of slot.

    The bias must be linear in the slot. Softmax ignores a constant that all keys of a row share, so
    the last `keys` entries can be used for any length of a model's table.
    """
    slot_bias = bias[..., bias.shape[-1] - plan.n_keys :]
    key_positions = attention_masks.get_key_positions(plan)
    if len(key_positions) == 1:
        return slot_bias.index_select(-1, key_positions[0])
    batch_bias = slot_bias.expand(
        len(key_positions) * (slot_bias.shape[0] // len(key_positions) or 1), *slot_bias.shape[1:]
    ).unflatten(0, (len(key_positions), -1))
    return batch_bias.gather(
        -1,
        key_positions.view(len(key_positions), *[1] * (batch_bias.dim() - 2), -1).expand(
            batch_bias.shape
        ),
    ).flatten(0, 1)


def widest_window(config: Any) -> int:
    """Return the widest window or chunk that a config names; 0 for none."""
    spans = [
        value
        for key, value in vars(config).items()
        if ("window" in key or "chunk" in key)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ]
    return max(spans, default=0)
