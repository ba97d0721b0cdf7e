"""Report a lack of memory as such, whichever error it causes.

The libraries that load a model report it in many ways, and some of them blame the file.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from skipsearch.errors import ModelError, SkipSearchError
from skipsearch.models.loading import placement

SIGNS = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "failed to map segment",
    "bad_alloc",
    "no room to allocate",
)
# With fewer free bytes, any error counts as a memory error, also if it does not mention memory.
SCARCE_BYTES = 64_000_000


@contextmanager
def memory_errors_reported(device: torch.device, sentence: Callable[[int], str]) -> Iterator[None]:
    """Run a block, and raise a ModelError instead of any error that a failed allocation caused.

    sentence: makes the message from the free bytes. Our own errors pass through, unless an error of
    a library caused them.
    """
    try:
        yield
    except Exception as error:
        foreign = [cause for cause in _chain(error) if not isinstance(cause, SkipSearchError)]
        if not foreign:
            raise
        for cause in _chain(error):
            traceback.clear_frames(cause.__traceback__)  # frames reference loaded tensors
        free = free_memory(device)
        if free >= SCARCE_BYTES and not any(map(is_memory_error, foreign)):
            raise
        raise ModelError(sentence(free)) from None


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error is about memory, by its class or by its message."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (isinstance(error, OSError) and error.errno == errno.ENOMEM) or any(
        sign in str(error).lower() for sign in SIGNS
    )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; for a CPU, those that this process may still allocate."""
    return (
        int(torch.cuda.mem_get_info(device)[0])
        if device.type == "cuda"
        else placement.available_host_memory()
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and all its causes and contexts, also suppressed ones."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
