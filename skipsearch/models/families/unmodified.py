"""The base class of adapters over unmodified Hugging Face models."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

from skipsearch.models.experts import Experts, find_experts


class UnmodifiedModel:
    """An adapter over an unmodified model, which its owner may still use."""

    model: nn.Module
    _latest_pass: threading.local  # inputs that the layers of this thread's pass share

    def hold_weakly(self) -> None:
        """Keep only a weak reference to the model, without which the adapter cannot run."""
        self.model = weakref.proxy(self.model)  # type: ignore[assignment]

    def drop_last_pass(self) -> None:
        """Release the inputs of this thread's latest pass, and its cache."""
        vars(self._latest_pass).clear()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())  # yields shared ones once

    @property
    def read_bytes(self) -> int:
        model: Any = self.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        experts = find_experts(model)
        unread = 0 if experts is None else experts.unread_bytes
        return self.weight_bytes - unread - (0 if table is head else int(table.nbytes))


def experts_of(model: object) -> Experts | None:
    """Return the experts of a model adapter; None if it has none that are known."""
    if isinstance(model, UnmodifiedModel):
        return find_experts(model.model)
    fused: Any = getattr(model, "fused_model", model)
    experts: Experts | None = getattr(fused, "experts", None)
    return experts
