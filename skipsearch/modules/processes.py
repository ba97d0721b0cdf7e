"""Processes that train one module together, as `accelerate launch` starts them. Each learns from texts of its own; gradients are averaged.

All of them have the same weights at every step: they begin with the same ones and take the same steps. The main process alone writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Processes:
    """rank: of this process, 0 being the main one; count: of all. Alone, every method gives back what it was given."""

    rank: int
    count: int

    def __init__(self, state: Any = None):
        """state: an `accelerate.PartialState`; None: this process is alone."""
        self._state = state
        self.rank, self.count = (0, 1) if state is None else (state.process_index, state.num_processes)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Each becomes the mean of those of all processes, in one exchange."""
        if self.count == 1:
            return
        all_of_them = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in all_of_them])
        torch.distributed.all_reduce(flat)
        flat /= self.count
        for tensor, mean in zip(all_of_them, flat.split([tensor.numel() for tensor in all_of_them]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def main_says(self, value: float) -> float:
        """What the main process has here, which others take over: clocks differ."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self._state.device)
        torch.distributed.broadcast(told, 0)
        return float(told)

    def agree(self, fact: str) -> bool:
        """Whether it is the same in all of them."""
        if self.count == 1:
            return True
        facts: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(facts, fact)
        return len(set(facts)) == 1

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            self._state.wait_for_everyone()


ALONE = Processes()


def processes(device: str) -> Processes:
    """Those that were launched with this one. device: as `--device` names it; `cpu` keeps them off GPUs.

    On GPUs each takes one of its own as `cuda`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState

    return Processes(PartialState(cpu=device == "cpu" or not torch.cuda.is_available()))
