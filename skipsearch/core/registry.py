"""Look a class up by its name in a table of "module:attribute" entries.

The module is imported at that time. An error for an unknown name suggests the nearest one. The
tables are elsewhere: DRAFTERS and EXITS in `core/recipe.py`, SEARCHERS in `searchers/__init__.py`.
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
    """Return one sentence about an unknown name: the nearest known name, if there is one, and all
    of them.
    """
    names = sorted(known_names)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no {kind} called {name!r}; {hint}available: {', '.join(names)}"


def did_you_mean_file(path: str | PathLike[str]) -> str:
    """Return `did you mean X? ` for a missing path, if a file in its folder has a similar name;
    else "".
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
    """Return the object that `table` has under this name.

    Raises: `error` with a suggestion if the name is unknown.
    """
    if name not in table:
        raise error(unknown_name(kind, name, table))
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
