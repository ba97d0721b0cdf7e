"""What adapters over unmodified Hugging Face models have in common."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn


class Weighed:
    """An adapter over an unmodified model, which somebody else may hold too."""

    model: nn.Module
    _latest: threading.local   # what the layers of a pass share

    def loosen(self) -> None:
        """From now on this adapter does not keep the model alive. It is of no use without it."""
        self.model = weakref.proxy(self.model)  # type: ignore[assignment]

    def forget(self) -> None:
        """Let go of the pass that this thread ran last, and with it of that pass's cache."""
        vars(self._latest).clear()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())  # shared ones come once

    @property
    def read_bytes(self) -> int:
        model: Any = self.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return self.weight_bytes - (0 if table is head else int(table.nbytes))
