"""Two profiles of one model side by side: which sub-layers, which settings, and whether the measurements are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skipsearch.errors import ProfileError
from skipsearch.fields import Interval
from skipsearch.mask import SkipMask
from skipsearch.profile.dump import as_dict, flow
from skipsearch.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Comparison:
    """jaccard: sub-layers that both skip / that either skips, 1 for equal masks. only_a, only_b: what just one of them skips.

    changed: key path -> the two values, of everything but the masks and what was measured.
    intervals: of ms_per_token and speedup, a's, b's and whether they are apart; empty where one was not measured.
    """

    jaccard: float
    only_a: SkipMask
    only_b: SkipMask
    changed: dict[str, tuple[Any, Any]]
    intervals: dict[str, tuple[Interval, Interval, bool]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "jaccard": self.jaccard,
            "only_a": {"attn": list(self.only_a.attn), "mlp": list(self.only_a.mlp)},
            "only_b": {"attn": list(self.only_b.attn), "mlp": list(self.only_b.mlp)},
            "changed": {key: list(values) for key, values in self.changed.items()},
            "intervals": {key: {"a": a.model_dump(mode="json"), "b": b.model_dump(mode="json"), "apart": apart}
                          for key, (a, b, apart) in self.intervals.items()}}


    def lines(self) -> list[str]:
        """The comparison in words, most important first."""
        told = [f"masks        {self.jaccard:.0%} of what either skips is skipped by both (Jaccard)"]
        for name, mask in (("A", self.only_a), ("B", self.only_b)):
            if mask.n_skipped:
                told.append(f"only {name}       attention {_layers(mask.attn)}, MLP {_layers(mask.mlp)}")
        for key, (x, y, apart) in self.intervals.items():
            verdict = "apart" if apart else "not apart: the difference may be chance"
            told.append(f"{key:<12} {x.in_words()} and {y.in_words()}, {verdict}")
        return told + [f"{key}: {flow(old)} → {flow(new)}" for key, (old, new) in self.changed.items()]


def compare(a: Profile, b: Profile) -> Comparison:
    """Raises: ProfileError if the two are for models of another depth: their masks then have nothing in common."""
    if a.model.n_layers != b.model.n_layers:
        raise ProfileError(f"{a.model.id} has {a.model.n_layers} layers and {b.model.id} has {b.model.n_layers}: their masks "
                           "cannot be compared; choose two profiles of one model")
    ours, theirs = a.mask.sublayers, b.mask.sublayers
    either = ours | theirs
    flat_a, flat_b = dict(_flat(as_dict(a))), dict(_flat(as_dict(b)))
    return Comparison(
        jaccard=len(ours & theirs) / len(either) if either else 1.0,
        only_a=SkipMask.from_sublayers(a.model.n_layers, ours - theirs),
        only_b=SkipMask.from_sublayers(b.model.n_layers, theirs - ours),
        changed={key: (flat_a.get(key), flat_b.get(key)) for key in flat_a | flat_b if flat_a.get(key) != flat_b.get(key)},
        intervals=_intervals(a, b))


def _intervals(a: Profile, b: Profile) -> dict[str, tuple[Interval, Interval, bool]]:
    x, y = a.measured, b.measured
    if x is None or y is None:
        return {}
    pairs = {"ms_per_token": (x.ms_per_token, y.ms_per_token), "speedup": (x.speedup, y.speedup)}
    return {key: (p, q, p.ci95[1] < q.ci95[0] or q.ci95[1] < p.ci95[0]) for key, (p, q) in pairs.items()}


def _layers(layers: tuple[int, ...]) -> str:
    return " ".join(map(str, layers)) or "none"


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every leaf but the masks' and the measurements'."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        if path == "measured" or path.endswith((".attn", ".mlp")):
            continue
        if key in ("drafters", "lost") and isinstance(value, list):
            value = {str(i): drafter for i, drafter in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value
