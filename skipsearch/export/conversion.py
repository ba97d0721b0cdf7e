"""What a format makes of a checkpoint, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """config: the new config.json. rename: a stored tensor's new name, None if the draft has no use for it. files: to lie beside.

    known_to_transformers: whether it has a model class for it. caveats: sentences for the README's llama.cpp section.
    """

    config: dict[str, Any]
    rename: Callable[[str], str | None]
    files: tuple[Path, ...] = ()
    known_to_transformers: bool = True
    caveats: tuple[str, ...] = ()
