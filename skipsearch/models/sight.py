"""What each layer of a model may see, read from the masks that the model's own forward makes, and given back for any pass plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import PassPlan
from skipsearch.errors import ModelError
from skipsearch.models import masks


@dataclass(frozen=True)
class Sight:
    """A layer sees every token before a query and itself, or those fewer than `window` back, or those of the query's own `chunk`.

    form: what its own forward hands it: an additive mask, a bool mask where True is visible ("shown") or hidden ("hidden"), or nothing.
    """

    form: str
    window: int | None = None
    chunk: int | None = None

    def visible(self, plan: PassPlan) -> Tensor:
        """[B or 1, 1, T, keys] bool."""
        seen = masks.windowed(plan, self.window)
        seen = masks.visible(plan) if seen is None else seen
        if self.chunk is None or plan.keys <= self.chunk:
            return seen
        return seen & (masks.key_positions(plan)[:, None, None] // self.chunk == plan.positions[:, None, :, None] // self.chunk)

    def mask(self, plan: PassPlan, dtype: torch.dtype) -> Tensor:
        """As the layer takes it, [B, 1, T, keys]."""
        seen = self.visible(plan).expand(len(plan.positions), -1, -1, -1)
        if self.form == "additive":
            return masks.additive(seen, dtype)
        return seen if self.form == "shown" else ~seen

    def all_of(self, plan: PassPlan) -> bool:
        """Whether the plan is plain and no window or chunk ends inside it, so that the kernel's own causal pattern says it all."""
        return plan.visible is None and plan.keys <= min(self.window or plan.keys, self.chunk or plan.keys)


def read_sight(own: Tensor | None, start: int, chunk: int | None) -> Sight:
    """From a layer's own mask [1, 1, 2, start + 2] for two tokens behind `start` others. chunk: as the config says it.

    Raises: ModelError for a pattern that is none of the three.
    """
    if own is None:
        return Sight("none")
    own = own[:, :, :2, :start + 2]
    form = "additive" if own.is_floating_point() else "shown" if bool(own[0, 0, 1, -1]) else "hidden"
    seen = (own == 0 if form == "additive" else own if form == "shown" else ~own)[0, 0]
    first = [int(row.long().argmax()) for row in seen]
    widths = [start + 1 - first[0], start + 2 - first[1]]
    if [int(row.sum()) for row in seen] != widths or bool(seen[0, -1]):
        raise ModelError("a layer's own mask hides tokens between others that it shows")
    if first == [0, 0]:
        return Sight(form)
    if widths[0] == widths[1]:
        return Sight(form, window=widths[0])
    if chunk and first == [(start + i) // chunk * chunk for i in range(2)]:
        return Sight(form, chunk=chunk)
    raise ModelError("a layer's own mask is neither causal, nor a sliding window, nor one of chunks")


def by_position(bias: Tensor, plan: PassPlan) -> Tensor:
    """A bias over keys [..., K ≥ keys] that grows with the key's slot, for the positions of the tokens in the slots.

    Softmax ignores what a whole row has in common, so the last `keys` entries serve wherever a model's table ends.
    """
    own = bias[..., bias.shape[-1] - plan.keys:]
    places = masks.key_positions(plan)
    if len(places) == 1:
        return own.index_select(-1, places[0])
    rows = own.expand(len(places) * (own.shape[0] // len(places) or 1), *own.shape[1:]).unflatten(0, (len(places), -1))
    return rows.gather(-1, places.view(len(places), *[1] * (rows.dim() - 2), -1).expand(rows.shape)).flatten(0, 1)


def largest_span(config: Any) -> int:
    """The widest window or chunk that a config speaks of; 0 for none."""
    spans = [value for key, value in vars(config).items()
             if ("window" in key or "chunk" in key) and isinstance(value, int) and not isinstance(value, bool)]
    return max(spans, default=0)
