"""What a row of the table says of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skipsearch.models.loading.gguf_file import GGUFFile

Settings = dict[str, Any]


Order = Callable[[Any, int], Tensor]  # (config, length n) -> [n], where each one is in the file
Part = Callable[[Any], tuple[int, int]]  # config -> (first row, number of rows of the tensor)


@dataclass(frozen=True)
class Source:
    """Tensors of a file that make a parameter of transformers.

    join: makes it from several tensors; None: their rows, one tensor after the other. rows,
    columns: the order in the file; None: the same. A layer's tensors are named without `blk.N.`.
    part: the rows of the only tensor that it takes. key: of a list in the metadata that has the
    number of each layer, instead of tensors.
    """

    tensors: tuple[str, ...]
    rows: Order | None = None
    columns: Order | None = None
    join: Callable[[Sequence[Tensor]], Tensor] | None = None
    part: Part | None = None
    key: str | None = None


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    model_type: of transformers. add_settings: what the config needs besides the settings that all
    architectures have. sources: for parameters, named from their layer on, the first whose tensors
    are in the file; for all others the names of `gguf` are those of the file.
    """

    model_type: str
    add_settings: Callable[[GGUFFile, Settings], None]
    sources: Mapping[str, Sequence[Source]] = field(default_factory=dict)
    norms_plus_one: bool = False  # norms multiply by 1 + weight; files hold the sum
    has_layer_norms: bool = False  # and not RMS norms
    partly_rotated: bool = False  # a part of each row of queries and keys may be rotated
    layers_differ: bool = False  # in numbers that `add_settings` reads again
    attends: bool = True  # in some layer
    values_differ: bool = False  # in width from keys
    has_latents: bool = False  # of which keys and values are made; all of `head_dim` is rotated
    windows_turn: bool = False  # by angles of their own, which `add_settings` reads
