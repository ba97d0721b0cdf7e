"""The base class of adapters over unmodified Hugging Face models."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn


class UnmodifiedModel:
    """An adapter over an unmodified model, which its owner may go on using."""

    model: nn.Module
    _latest_pass: threading.local  # what the layers of this thread's pass share

    def hold_weakly(self) -> None:
        """Stop keeping the model alive. The adapter is of no use after the model is gone."""
        self.model = weakref.proxy(self.model)  # type: ignore[assignment]

    def drop_last_pass(self) -> None:
        """Release the pass that this thread ran last, and its cache."""
        vars(self._latest_pass).clear()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())  # yields shared ones once

    @property
    def read_bytes(self) -> int:
        model: Any = self.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return self.weight_bytes - (0 if table is head else int(table.nbytes))
