"""Report out of memory as that. The libraries that load a model have many words for it, and some
of them blame the file.
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
# With fewer free bytes, an error that does not mention memory is taken for a memory error too.
SCARCE_BYTES = 64_000_000


@contextmanager
def memory_errors_reported(device: torch.device, sentence: Callable[[int], str]) -> Iterator[None]:
    """Replace any error that follows from a failed allocation by a ModelError.

    sentence: takes the free bytes. Our own errors pass through unless a foreign error caused them.
    """
    try:
        yield
    except Exception as error:
        foreign = [cause for cause in _chain(error) if not isinstance(cause, SkipSearchError)]
        if not foreign:
            raise
        for cause in _chain(error):
            traceback.clear_frames(cause.__traceback__)  # the frames hold what was loaded so far
        free = free_memory(device)
        if free >= SCARCE_BYTES and not any(map(is_memory_error, foreign)):
            raise
        raise ModelError(sentence(free)) from None


def is_memory_error(error: BaseException) -> bool:
    """Whether an error is about memory, by its class or by its words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (isinstance(error, OSError) and error.errno == errno.ENOMEM) or any(
        sign in str(error).lower() for sign in SIGNS
    )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; of a CPU, those that this process may still take."""
    return (
        int(torch.cuda.mem_get_info(device)[0])
        if device.type == "cuda"
        else placement.available_host_memory()
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and all errors that led to it, shown in the traceback or not."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
