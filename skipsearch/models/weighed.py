"""How many bytes the weights of an unmodified Hugging Face model take, and how many of them a pass reads."""

from __future__ import annotations

from typing import Any

from torch import nn


class Weighed:
    """What an adapter over an unmodified model says of its weights."""

    model: nn.Module

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())  # shared ones come once

    @property
    def read_bytes(self) -> int:
        model: Any = self.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return self.weight_bytes - (0 if table is head else int(table.nbytes))
