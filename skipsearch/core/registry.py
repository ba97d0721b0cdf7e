"""Tables of units: name -> "module:attribute", looked up lazily and with a helpful answer to a
wrong name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from os import PathLike
from typing import Any

from skipsearch.errors import SkipSearchError


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> str:
    """One sentence for a name that no table has: the nearest one if there is one, and what
    exists.
    """
    names = sorted(known_names)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no {kind} called {name!r}; {hint}available: {', '.join(names)}"


def did_you_mean_file(path: str | PathLike[str]) -> str:
    """`did you mean X? ` for a path that is not there, where something in its folder has nearly
    this name; else nothing.
    """
    folder, name = os.path.split(os.fspath(path))
    try:
        near = get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.75)
    except (OSError, ValueError):
        return ""
    return f"did you mean {os.path.join(folder, near[0])}? " if near else ""


def resolve_name(
    kind: str, name: str, table: Mapping[str, str], error: type[SkipSearchError]
) -> Any:
    """The object that `table` names. Raises `error` with a suggestion if the name is unknown."""
    if name not in table:
        raise error(unknown_name(kind, name, table))
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
