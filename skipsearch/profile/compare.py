"""Compare two profiles of one model: masks, drafters, settings and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec
from skipsearch.core.schema_types import Interval
from skipsearch.errors import ProfileError
from skipsearch.profile.canonical import to_flow_yaml, to_plain_data
from skipsearch.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class MaskDiff:
    """How two masks differ."""

    jaccard: float  # sub-layers that both skip / that either skips; 1: equal masks
    only_a: SkipMask  # sub-layers that only the first mask skips
    only_b: SkipMask  # sub-layers that only the second mask skips


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two profiles differ."""

    mask_diff: MaskDiff | None  # None unless both recipes have a mask
    # Key path -> both values, without masks and measurements. The key `drafters` is their order,
    # `drafters.skip.draft_length` a setting, and `drafters.lookup` a drafter that only one profile
    # has, in words.
    changes: dict[str, tuple[Any, Any]]
    # `ms_per_token` and `speedup` -> (value of a, value of b, whether the intervals are disjoint);
    # empty if one was not measured.
    intervals: dict[str, tuple[Interval, Interval, bool]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; jaccard, only_a and only_b are None unless both have a mask."""
        masks = self.mask_diff
        return {
            "jaccard": masks.jaccard if masks else None,
            "only_a": {"attn": list(masks.only_a.attn), "mlp": list(masks.only_a.mlp)}
            if masks
            else None,
            "only_b": {"attn": list(masks.only_b.attn), "mlp": list(masks.only_b.mlp)}
            if masks
            else None,
            "changed": {key: list(values) for key, values in self.changes.items()},
            "intervals": {
                key: {
                    "a": a.model_dump(mode="json"),
                    "b": b.model_dump(mode="json"),
                    "apart": apart,
                }
                for key, (a, b, apart) in self.intervals.items()
            },
        }

    def format_lines(self) -> list[str]:
        """Return the comparison in words, most important first."""
        lines = []
        if self.mask_diff:
            lines.append(
                f"masks        {self.mask_diff.jaccard:.0%} of what either skips is skipped by "
                "both (Jaccard)"
            )
            for name, mask in (("A", self.mask_diff.only_a), ("B", self.mask_diff.only_b)):
                if mask.n_skipped:
                    lines.append(
                        f"only {name}       attention {_format_layers(mask.attn)}, MLP "
                        f"{_format_layers(mask.mlp)}"
                    )
        for key, (x, y, apart) in self.intervals.items():
            verdict = "apart" if apart else "not apart: the difference may be chance"
            lines.append(f"{key:<12} {x.format_with_unit()} and {y.format_with_unit()}, {verdict}")
        lines += [
            f"{key}: {to_flow_yaml(old)} → {to_flow_yaml(new)}"
            for key, (old, new) in self.changes.items()
        ]
        return lines or ["they say the same, and neither skips anything"]


def compare_profiles(a: Profile, b: Profile) -> Comparison:
    """Compare two profiles by their measured recipes (for a plain verdict, the one that lost).

    Raises: ProfileError if their models have different numbers of layers.
    """
    if a.model.n_layers != b.model.n_layers:
        raise ProfileError(
            f"{a.model.id} has {a.model.n_layers} layers and {b.model.id} has {b.model.n_layers}: "
            "their masks "
            "cannot be compared; choose two profiles of one model"
        )
    flat_a, flat_b = (
        dict(_flatten(to_plain_data(p) | {"measured": None, "drafters": None, "lost": None}))
        for p in (a, b)
    )
    changed = {
        key: (flat_a.get(key), flat_b.get(key))
        for key in flat_a | flat_b
        if flat_a.get(key) != flat_b.get(key)
    }
    return Comparison(_diff_masks(a, b), changed | _diff_recipes(a, b), _compare_intervals(a, b))


def _diff_masks(a: Profile, b: Profile) -> MaskDiff | None:
    if not a.mask.n_skipped or not b.mask.n_skipped:
        return None
    a_skips, b_skips, n_layers = a.mask.sublayers, b.mask.sublayers, a.model.n_layers
    return MaskDiff(
        len(a_skips & b_skips) / len(a_skips | b_skips),
        SkipMask.from_sublayers(n_layers, a_skips - b_skips),
        SkipMask.from_sublayers(n_layers, b_skips - a_skips),
    )


def _describe(drafter: DrafterSpec) -> dict[str, Any]:
    """Return the settings of a drafter besides its mask. A vocabulary is its number of tokens."""
    data = drafter.model_dump(mode="json", exclude={"attn", "mlp"})
    vocabulary = drafter.reading.vocabulary
    return data if vocabulary is None else data | {"vocabulary": str(vocabulary)}


def _diff_recipes(a: Profile, b: Profile) -> dict[str, tuple[Any, Any]]:
    changed: dict[str, tuple[Any, Any]] = {}
    if a.measured_recipe.shape != b.measured_recipe.shape:
        changed["drafters"] = (a.measured_recipe.shape, b.measured_recipe.shape)
    a_drafters, b_drafters = _drafters_by_kind(a), _drafters_by_kind(b)
    for name in a_drafters | b_drafters:
        if name in a_drafters and name in b_drafters:
            x, y = (
                dict(_flatten(_describe(drafter)))
                for drafter in (a_drafters[name], b_drafters[name])
            )
            changed |= {
                f"drafters.{name}.{key}": (x.get(key), y.get(key))
                for key in x | y
                if x.get(key) != y.get(key)
            }
        else:
            changed[f"drafters.{name}"] = tuple(
                str(side[name]) if name in side else None for side in (a_drafters, b_drafters)
            )  # type: ignore[assignment]
    return changed


def _drafters_by_kind(profile: Profile) -> dict[str, DrafterSpec]:
    """Return the drafters by kind; the key of a second skip drafter is `skip-2`."""
    by_kind: dict[str, DrafterSpec] = {}
    for i, drafter in enumerate(drafters := profile.measured_recipe.drafters):
        count = sum(other.kind == drafter.kind for other in drafters[: i + 1])
        by_kind[drafter.kind if count == 1 else f"{drafter.kind}-{count}"] = drafter
    return by_kind


def _compare_intervals(a: Profile, b: Profile) -> dict[str, tuple[Interval, Interval, bool]]:
    x, y = a.measured, b.measured
    if x is None or y is None:
        return {}
    pairs = {"ms_per_token": (x.ms_per_token, y.ms_per_token), "speedup": (x.speedup, y.speedup)}
    return {
        key: (p, q, p.ci95[1] < q.ci95[0] or q.ci95[1] < p.ci95[0]) for key, (p, q) in pairs.items()
    }


def _format_layers(layers: tuple[int, ...]) -> str:
    return " ".join(map(str, layers)) or "none"


def _flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of every leaf."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
