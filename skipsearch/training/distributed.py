"""Processes that train one module together, as `accelerate launch` starts them.

Each process learns from different texts, and gradients are averaged. All processes have the same
weights at every step, because they start with the same weights and take the same steps. Only the
main process writes files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ProcessGroup:
    """The processes of one training. If there is only one, every method does nothing."""

    rank: int  # of this process; 0 is the main one
    n_processes: int

    def __init__(self, state: Any = None):
        """Wrap an `accelerate.PartialState`. state: None if there is only one process."""
        self._state = state
        self.rank, self.n_processes = (
            (0, 1) if state is None else (state.process_index, state.num_processes)
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in one exchange."""
        if self.n_processes == 1:
            return
        tensors_here = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors_here])
        torch.distributed.all_reduce(flat)
        flat /= self.n_processes
        for tensor, mean in zip(
            tensors_here, flat.split([tensor.numel() for tensor in tensors_here]), strict=True
        ):
            tensor.copy_(mean.view_as(tensor))

    def broadcast_from_main(self, value: float) -> float:
        """Return the main process's value in each process, for decisions that depend on a clock."""
        if self.n_processes == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self._state.device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)

    def all_equal(self, fact: str) -> bool:
        """Return whether all processes have the same `fact`."""
        if self.n_processes == 1:
            return True
        facts: list[Any] = [None] * self.n_processes
        torch.distributed.all_gather_object(facts, fact)
        return len(set(facts)) == 1

    def wait_for_all(self) -> None:
        """Wait until all processes have called this."""
        if self.n_processes > 1:
            self._state.wait_for_everyone()


SINGLE_PROCESS = ProcessGroup()


def join_process_group(device: str) -> ProcessGroup:
    """Return the group of the processes that `accelerate launch` started, this one included.

    device: the value of `--device`. With `cpu`, no process uses a GPU; else each process uses one
    GPU as `cuda`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SINGLE_PROCESS
    from accelerate import PartialState

    return ProcessGroup(PartialState(cpu=device == "cpu" or not torch.cuda.is_available()))
