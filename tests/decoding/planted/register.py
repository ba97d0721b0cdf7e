"""The register of planted bugs, each with the check that finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

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


def planted(
    check: Check, owner: object, name: str
) -> Callable[[Callable[..., Any]], Callable[[], AbstractContextManager[None]]]:
    """Add a bug to `BUGS` that replaces `owner.name`, as one that `check` finds.

    The decorated function takes what it replaces, then the arguments of a call.
    """

    def register(bug: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
        def plant() -> Iterator[None]:
            real = getattr(owner, name)

            def replacement(*args: Any, **kwargs: Any) -> Any:
                return bug(real, *args, **kwargs)

            with patch.object(owner, name, replacement):
                yield

        plant.__name__ = bug.__name__
        return caught_by(check)(plant)

    return register
