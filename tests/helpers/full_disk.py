"""A disk that runs full in the middle of a write."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(max_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: what goes past them is cut short, and the
    next write fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
