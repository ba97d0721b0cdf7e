"""Tests of decoding run on one thread; code that they compile lies where it is thrown away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.threads import one_thread

__all__ = ["compiled_here", "one_thread"]


@pytest.fixture(scope="session")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
