"""How a planted mistake is entered, and the check that finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Check = Callable[[], object]
BUGS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Check]] = {}


def caught_by(
    check: Check,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Enter a mistake in `BUGS` as one that `check` finds. The decorated generator plants it,
    yields, and takes it back.
    """

    def register(plant: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        manager = contextmanager(plant)
        BUGS[plant.__name__] = (manager, check)
        return manager

    return register
