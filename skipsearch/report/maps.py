"""Figures that are tables of cells: which sub-layers are skipped, and what each draft policy is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.mask import SkipMask
from skipsearch.profile import Profile
from skipsearch.report.drawn import Drawn, NothingToDraw, label, times
from skipsearch.report.recorded import SurfacePoint
from skipsearch.report.searches import NO_STUDY, check_comparable, groups
from skipsearch.report.study import Study
from skipsearch.report.theme import GAIN, INK, LOSS, MUTED, SERIES, style

BEST = 5   # of a searcher's masks, what its map is made from


@dataclass(frozen=True)
class MapRow:
    """name: whose masks, about: what they are; share: of `count` masks that skip a sub-layer, in the flat order of `SkipMask`."""

    name: str
    about: str
    share: tuple[float, ...]
    count: int

    @classmethod
    def of(cls, name: str, about: str, *masks: SkipMask) -> MapRow:
        return cls(name, about, tuple(sum(bits) / len(masks) for bits in zip(*(m.bits for m in masks), strict=True)), len(masks))


def layer_map(studies: Sequence[Study], profile: Profile | None = None) -> Drawn:
    """Which sub-layers each searcher's best masks skip, which the race's winner and the profile do, where these have a mask.

    Raises: NothingToDraw without a study and a profile that skips something.
    """
    rows = map_rows(studies, profile)
    if not rows:
        raise NothingToDraw("It needs a search (--study) or a profile (--profile)." if profile is None else
                            f"This profile skips no sub-layers: it drafts with {profile.candidate.shape}."
                            if profile.candidate.drafters else "This profile skips no sub-layers: it drafts nothing.")
    n_layers, sides, pitch = len(rows[0].share) // 2, ("attention", "MLP"), 3.3
    places = [(r, side, layer) for r in range(len(rows)) for side in (0, 1) for layer in range(n_layers)]
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 0.5 + 0.7 * len(rows)), layout="constrained")
        axes = figure.subplots()
        _cells(axes, [((layer, pitch * r + side), rows[r].share[2 * layer + side]) for r, side, layer in places], SERIES[0], "cells")
        for r, row in enumerate(rows):
            axes.text(-0.5, pitch * r - 0.75, f"{label(row.name)}: {row.about}", va="bottom")
        axes.set(xlim=(-0.5, n_layers - 0.5), ylim=(pitch * len(rows) - pitch + 1.6, -1.9), xlabel="layer")
        axes.set_xticks(range(0, n_layers, 1 if n_layers <= 24 else 5))
        axes.set_yticks([pitch * r + side for r in range(len(rows)) for side in (0, 1)], sides * len(rows))
        axes.tick_params(axis="both", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    tips = [f"{rows[r].name}, {sides[side]} {layer}: {_skips(rows[r], 2 * layer + side)}" for r, side, layer in places]
    numbers = [[row.name, row.about, sides[side], _in_words(row.share[side::2])] for row in rows for side in (0, 1)]
    return Drawn("layers", figure, ("masks", "speedup", "sub-layers", "layers skipped (by how many of them)"), numbers, {"cells": tips})


def map_rows(studies: Sequence[Study], profile: Profile | None = None) -> list[MapRow]:
    check_comparable(studies, profile)
    rows = []
    for name, judged in groups(studies):
        best = sorted(judged, key=lambda j: -j.speedup)[:BEST]
        about = f"best {len(best)} of {len(judged)}, {times(best[-1].speedup)} to {times(best[0].speedup)} predicted"
        rows.append(MapRow.of(name, about, *(j.trial.mask for j in best)))
    for study in studies:
        if (winner := study.confirmed) is not None and (mask := study.mask_of(winner)) is not None:
            name = "winner" if len(studies) == 1 else f"winner of {study.label}"
            rows.append(MapRow.of(name, f"{times(winner.speedup.mean)} measured on hold-out prompts", mask))
    if profile is not None and profile.mask.n_skipped:
        about = f"{times(profile.measured.speedup.mean)} measured on hold-out prompts" if profile.measured else "not measured"
        rows.append(MapRow.of("profile", about, profile.mask))
    return rows


def policy_surface(study: Study | None, name: str = "surface") -> Drawn:
    """Predicted speedup of the winner's mask under each draft policy: draft length across, threshold down, a fixed length as a row.

    name: of the figure, where a page has several. Raises: NothingToDraw if the study holds no surface.
    """
    if study is None:
        raise NothingToDraw(NO_STUDY)
    if not study.surface:
        raise NothingToDraw("This study holds no policy surface: it ended before its winner was known, or was made by a version that did "
                            "not keep it.")
    best: dict[tuple[str, int], SurfacePoint] = {}   # of the adaptive policies with one threshold and several targets
    for point in study.surface:
        key = (_policy_row(point), point.draft_length)
        best[key] = max(best.get(key, point), point, key=lambda p: p.speedup)
    order = sorted({(point.kind != "fixed", point.kind == "adaptive", point.kind, point.threshold or 0.0, _policy_row(point))
                    for point in study.surface})
    names, lengths = [row[-1] for row in order], sorted({length for _, length in best})
    top = max(best.values(), key=lambda p: p.speedup)
    reach = max(abs(p.speedup - 1) for p in best.values()) or 1.0
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 0.8 + 0.26 * len(names)), layout="constrained")
        axes = figure.subplots()
        drawn = [((lengths.index(length), names.index(row)), point) for (row, length), point in best.items()]
        for gid, colour, gains in (("gain", GAIN, True), ("loss", LOSS, False)):
            _cells(axes, [(at, 0.1 + 0.45 * abs(p.speedup - 1) / reach) for at, p in drawn if (p.speedup >= 1) == gains], colour, gid)
        for at, point in drawn:
            axes.text(*at, f"{point.speedup:.2f}", ha="center", va="center", fontsize=8.5, color=INK,
                      fontweight="bold" if point is top else "normal")
        axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(names) - 0.5, -0.5), xlabel="draft length")
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axes.set_yticks(range(len(names)), [label(n) for n in names])
        axes.tick_params(axis="both", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    rows = [[row, str(length), times(best[row, length].speedup, 3)] for row in names for length in lengths if (row, length) in best]
    tips = {gid: [f"{_policy_row(p)}, up to {p.draft_length}: {times(p.speedup, 3)}" for _, p in drawn if (p.speedup >= 1) == gains]
            for gid, gains in (("gain", True), ("loss", False))}
    return Drawn(name, figure, ("policy", "draft length", "predicted speedup"), rows, {gid: t for gid, t in tips.items() if t})


def _policy_row(point: SurfacePoint) -> str:
    if point.kind == "fixed" or point.threshold is None:
        return "no exit (fixed)" if point.kind == "fixed" else point.kind
    return f"{point.kind} from {point.threshold:g}" if point.kind == "adaptive" else f"{point.kind} {point.threshold:g}"


def _cells(axes: Any, cells: Sequence[tuple[tuple[float, float], float]], colour: str, gid: str) -> None:
    """Unit squares at (x, y), as opaque as their value; an empty one keeps its outline."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    if not cells:
        return
    squares = [Rectangle((x - 0.46, y - 0.46), 0.92, 0.92) for (x, y), _ in cells]
    axes.add_collection(PatchCollection(squares, facecolors=[to_rgba(colour, value) for _, value in cells],
                                        edgecolors=[to_rgba(MUTED, 0.45)], linewidths=0.6, gid=gid))


def _skips(row: MapRow, sublayer: int) -> str:
    if row.count == 1:
        return "skipped" if row.share[sublayer] else "kept"
    return f"skipped by {round(row.share[sublayer] * row.count)} of its {row.count} best masks"


def _in_words(shares: Sequence[float]) -> str:
    """`3, 4 (60%), 7`: the layers skipped, with the share of masks where it is not all."""
    return ", ".join(f"{layer}" if share == 1 else f"{layer} ({share:.0%})" for layer, share in enumerate(shares) if share) or "none"
