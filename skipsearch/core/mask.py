"""`SkipMask`: which sub-layers a draft skips, one bit for each of the 2L sub-layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.errors import MaskError


def format_sublayer_count(count: int) -> str:
    """Return `1 sub-layer`, `3 sub-layers`."""
    return f"{count} sub-layer{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class SkipMask:
    """The sub-layers that a draft skips; the verify pass always runs all of them.

    attn, mlp: indices of skipped attention and MLP sub-layers, kept sorted and unique, 0 <= i <
        n_layers.
    A flat bit vector of a mask orders sub-layers as the model runs them: attention 0, MLP 0,
    attention 1, …; 1 is skipped.

    Raises: MaskError if an index is not a whole number, is repeated, or lies outside the model.
    """

    n_layers: int
    attn: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _is_integer(self.n_layers) or self.n_layers < 1:
            raise MaskError(
                f"n_layers is {self.n_layers!r}; a model has at least one layer, as a whole number"
            )
        for kind in ("attn", "mlp"):
            object.__setattr__(self, kind, _check_indices(getattr(self, kind), kind, self.n_layers))

    @classmethod
    def from_bits(cls, bits: Sequence[int | bool | float]) -> SkipMask:
        """Make a mask from 2L bits (attention 0, MLP 0, attention 1, …); 1 is skipped."""
        if len(bits) % 2 or any(b not in (0, 1) for b in bits):
            raise MaskError(f"a mask of L layers is 2·L bits of 0 or 1, not {list(bits)!r}")
        return cls(
            len(bits) // 2,
            tuple(i for i, b in enumerate(bits[0::2]) if b),
            tuple(i for i, b in enumerate(bits[1::2]) if b),
        )

    @classmethod
    def from_sublayers(cls, n_layers: int, sublayers: Iterable[int]) -> SkipMask:
        """Make a mask from flat indices: 2·i is attention i, 2·i + 1 is MLP i."""
        flat = sorted(sublayers)
        return cls(
            n_layers,
            tuple(s // 2 for s in flat if s % 2 == 0),
            tuple(s // 2 for s in flat if s % 2),
        )

    @classmethod
    def from_layers(cls, n_layers: int, layers: Iterable[int]) -> SkipMask:
        """Make a mask that skips both sub-layers of these layers."""
        skipped = tuple(layers)
        return cls(n_layers, skipped, skipped)

    @property
    def bits(self) -> tuple[int, ...]:
        """2L bits (attention 0, MLP 0, attention 1, …); 1 is skipped."""
        skipped = self.sublayers
        return tuple(int(s in skipped) for s in range(2 * self.n_layers))

    @property
    def sublayers(self) -> frozenset[int]:
        """Flat indices of the skipped sub-layers."""
        return frozenset(2 * i for i in self.attn) | frozenset(2 * i + 1 for i in self.mlp)

    @property
    def n_skipped(self) -> int:
        """Number of skipped sub-layers."""
        return len(self.attn) + len(self.mlp)

    def flip(self, *sublayers: int) -> SkipMask:
        """Return the mask with these flat indices changed from kept to skipped or back."""
        return SkipMask.from_sublayers(self.n_layers, self.sublayers ^ frozenset(sublayers))

    def __str__(self) -> str:
        """Return two lines of one character a layer, `#` kept and `.` skipped, attention first."""
        return "\n".join(
            "".join("#."[i in skipped] for i in range(self.n_layers))
            for skipped in (set(self.attn), set(self.mlp))
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_indices(indices: Iterable[int], kind: str, n_layers: int) -> tuple[int, ...]:
    """Return sorted indices. Raises: MaskError."""
    values = tuple(indices)
    for value in values:
        if not _is_integer(value):
            raise MaskError(f"{kind} index {value!r} is not a whole number")
        if not 0 <= value < n_layers:
            raise MaskError(
                f"{kind} layer {value} is outside 0..{n_layers - 1}; was this mask made for "
                "another model?"
            )
    if len(set(values)) < len(values):
        repeated = next(v for v in values if values.count(v) > 1)
        raise MaskError(f"{kind} layer {repeated} is listed more than once")
    return tuple(sorted(values))
