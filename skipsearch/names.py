"""Tables of units: name -> "module:attribute", looked up lazily and with a helpful answer to a wrong name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from skipsearch.errors import SkipSearchError


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a name that no table has: the nearest one if there is one, and what exists."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no {kind} called {name!r}; {hint}available: {', '.join(names)}"


def resolve(kind: str, name: str, table: Mapping[str, str], error: type[SkipSearchError]) -> Any:
    """The object that `table` names. Raises `error` with a suggestion if the name is unknown."""
    if name not in table:
        raise error(unknown(kind, name, table))
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
