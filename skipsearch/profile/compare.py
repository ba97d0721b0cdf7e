"""Two profiles of one model side by side: which sub-layers, which drafters and settings, and whether the measurements are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skipsearch.errors import ProfileError
from skipsearch.fields import Interval
from skipsearch.mask import SkipMask
from skipsearch.profile.dump import as_dict, flow
from skipsearch.profile.schema import Profile
from skipsearch.recipe import DrafterSpec


@dataclass(frozen=True, slots=True)
class Masks:
    """jaccard: sub-layers that both skip / that either skips, 1 for equal masks. only_a, only_b: what just one of them skips."""

    jaccard: float
    only_a: SkipMask
    only_b: SkipMask


@dataclass(frozen=True, slots=True)
class Comparison:
    """masks: None unless both recipes have one.

    changed: key path -> the two values, of everything but the masks and what was measured. Drafters are told apart by their kind:
    `drafters` is their order, `drafters.skip.draft_length` a setting, `drafters.lookup` a drafter that only one of them has, in words.
    intervals: of ms_per_token and speedup, a's, b's and whether they are apart; empty where one was not measured.
    """

    masks: Masks | None
    changed: dict[str, tuple[Any, Any]]
    intervals: dict[str, tuple[Interval, Interval, bool]]

    def as_dict(self) -> dict[str, Any]:
        """jaccard, only_a and only_b are null where there are no two masks."""
        masks = self.masks
        return {
            "jaccard": masks.jaccard if masks else None,
            "only_a": {"attn": list(masks.only_a.attn), "mlp": list(masks.only_a.mlp)} if masks else None,
            "only_b": {"attn": list(masks.only_b.attn), "mlp": list(masks.only_b.mlp)} if masks else None,
            "changed": {key: list(values) for key, values in self.changed.items()},
            "intervals": {key: {"a": a.model_dump(mode="json"), "b": b.model_dump(mode="json"), "apart": apart}
                          for key, (a, b, apart) in self.intervals.items()}}

    def lines(self) -> list[str]:
        """The comparison in words, most important first."""
        told = []
        if self.masks:
            told.append(f"masks        {self.masks.jaccard:.0%} of what either skips is skipped by both (Jaccard)")
            for name, mask in (("A", self.masks.only_a), ("B", self.masks.only_b)):
                if mask.n_skipped:
                    told.append(f"only {name}       attention {_layers(mask.attn)}, MLP {_layers(mask.mlp)}")
        for key, (x, y, apart) in self.intervals.items():
            verdict = "apart" if apart else "not apart: the difference may be chance"
            told.append(f"{key:<12} {x.in_words()} and {y.in_words()}, {verdict}")
        told += [f"{key}: {flow(old)} → {flow(new)}" for key, (old, new) in self.changed.items()]
        return told or ["they say the same, and neither skips anything"]


def compare(a: Profile, b: Profile) -> Comparison:
    """Recipes are compared as they were measured: a plain verdict's by what lost.

    Raises: ProfileError if the two are for models of another depth: their masks then have nothing in common.
    """
    if a.model.n_layers != b.model.n_layers:
        raise ProfileError(f"{a.model.id} has {a.model.n_layers} layers and {b.model.id} has {b.model.n_layers}: their masks "
                           "cannot be compared; choose two profiles of one model")
    flat_a, flat_b = (dict(_flat(as_dict(p) | {"measured": None, "drafters": None, "lost": None})) for p in (a, b))
    changed = {key: (flat_a.get(key), flat_b.get(key)) for key in flat_a | flat_b if flat_a.get(key) != flat_b.get(key)}
    return Comparison(_masks(a, b), changed | _recipes(a, b), _intervals(a, b))


def _masks(a: Profile, b: Profile) -> Masks | None:
    if not a.mask.n_skipped or not b.mask.n_skipped:
        return None
    ours, theirs, n_layers = a.mask.sublayers, b.mask.sublayers, a.model.n_layers
    return Masks(len(ours & theirs) / len(ours | theirs), SkipMask.from_sublayers(n_layers, ours - theirs),
                 SkipMask.from_sublayers(n_layers, theirs - ours))


def _recipes(a: Profile, b: Profile) -> dict[str, tuple[Any, Any]]:
    changed: dict[str, tuple[Any, Any]] = {}
    if a.candidate.shape != b.candidate.shape:
        changed["drafters"] = (a.candidate.shape, b.candidate.shape)
    ours, theirs = _by_kind(a), _by_kind(b)
    for name in ours | theirs:
        if name in ours and name in theirs:
            x, y = (dict(_flat(drafter.model_dump(mode="json", exclude={"attn", "mlp"}))) for drafter in (ours[name], theirs[name]))
            changed |= {f"drafters.{name}.{key}": (x.get(key), y.get(key)) for key in x | y if x.get(key) != y.get(key)}
        else:
            changed[f"drafters.{name}"] = tuple(str(side[name]) if name in side else None for side in (ours, theirs))  # type: ignore[assignment]
    return changed


def _by_kind(profile: Profile) -> dict[str, DrafterSpec]:
    """The drafters by their kind; a second one of a kind is `skip-2`."""
    found: dict[str, DrafterSpec] = {}
    for i, drafter in enumerate(drafters := profile.candidate.drafters):
        count = sum(other.kind == drafter.kind for other in drafters[:i + 1])
        found[drafter.kind if count == 1 else f"{drafter.kind}-{count}"] = drafter
    return found


def _intervals(a: Profile, b: Profile) -> dict[str, tuple[Interval, Interval, bool]]:
    x, y = a.measured, b.measured
    if x is None or y is None:
        return {}
    pairs = {"ms_per_token": (x.ms_per_token, y.ms_per_token), "speedup": (x.speedup, y.speedup)}
    return {key: (p, q, p.ci95[1] < q.ci95[0] or q.ci95[1] < p.ci95[0]) for key, (p, q) in pairs.items()}


def _layers(layers: tuple[int, ...]) -> str:
    return " ".join(map(str, layers)) or "none"


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every leaf."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
