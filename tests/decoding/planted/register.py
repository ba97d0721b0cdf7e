"""The register of planted bugs, each with the check that finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Check = Callable[[], object]
BUGS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Check]] = {}


def caught_by(
    check: Check,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Add a bug to `BUGS` as one that `check` finds.

    The decorated generator plants the bug, yields, and removes it.
    """

    def register(plant: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        manager = contextmanager(plant)
        BUGS[plant.__name__] = (manager, check)
        return manager

    return register
