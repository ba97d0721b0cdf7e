"""The figure of the sub-layers that masks skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.profile import Profile
from skipsearch.report.figure import MissingData, ReportFigure, as_speedup, shorten_label
from skipsearch.report.search_figures import check_comparable, group_trials
from skipsearch.report.study_reader import StudyRecord
from skipsearch.report.theme import MUTED, SERIES_COLOURS, themed_figure

N_BEST_MASKS = 5  # masks of each searcher in the map


@dataclass(frozen=True)
class MapRow:
    """A set of masks that is drawn as one pair of rows."""

    name: str  # of the searcher, or winner, or profile
    description: str  # of the masks
    skipped_share: tuple[float, ...]  # [2L] share of masks that skip each flat sub-layer, 0..1
    count: int  # number of masks

    @classmethod
    def from_masks(cls, name: str, about: str, *masks: SkipMask) -> MapRow:
        return cls(
            name,
            about,
            tuple(sum(bits) / len(masks) for bits in zip(*(m.bits for m in masks), strict=True)),
            len(masks),
        )


def draw_layer_map(studies: Sequence[StudyRecord], profile: Profile | None = None) -> ReportFigure:
    """Draw the sub-layers skipped by each searcher's best masks, the race's winner and the profile.

    Raises: MissingData without a study and a profile that skips something.
    """
    rows = build_map_rows(studies, profile)
    if not rows:
        raise MissingData(
            "It needs a search (--study) or a profile (--profile)."
            if profile is None
            else "This profile skips no sub-layers: it drafts with "
            f"{profile.measured_recipe.shape}."
            if profile.measured_recipe.drafters
            else "This profile skips no sub-layers: it drafts nothing."
        )
    n_layers, sides, pitch = len(rows[0].skipped_share) // 2, ("attention", "MLP"), 3.3
    cells = [
        (r, side, layer) for r in range(len(rows)) for side in (0, 1) for layer in range(n_layers)
    ]
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 0.5 + 0.7 * len(rows)), layout="constrained")
        axes = figure.subplots()
        _draw_cells(
            axes,
            [
                ((layer, pitch * r + side), rows[r].skipped_share[2 * layer + side])
                for r, side, layer in cells
            ],
            SERIES_COLOURS[0],
            "cells",
        )
        for r, row in enumerate(rows):
            axes.text(
                -0.5, pitch * r - 0.75, f"{shorten_label(row.name)}: {row.description}", va="bottom"
            )
        axes.set(
            xlim=(-0.5, n_layers - 0.5),
            ylim=(pitch * len(rows) - pitch + 1.6, -1.9),
            xlabel="layer",
        )
        axes.set_xticks(range(0, n_layers, 1 if n_layers <= 24 else 5))
        axes.set_yticks(
            [pitch * r + side for r in range(len(rows)) for side in (0, 1)], sides * len(rows)
        )
        axes.tick_params(axis="both", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    tips = [
        f"{rows[r].name}, {sides[side]} {layer}: {_describe_cell(rows[r], 2 * layer + side)}"
        for r, side, layer in cells
    ]
    numbers = [
        [row.name, row.description, sides[side], _format_layers(row.skipped_share[side::2])]
        for row in rows
        for side in (0, 1)
    ]
    return ReportFigure(
        "layers",
        figure,
        ("masks", "speedup", "sub-layers", "layers skipped (by how many of them)"),
        numbers,
        {"cells": tips},
    )


def build_map_rows(studies: Sequence[StudyRecord], profile: Profile | None = None) -> list[MapRow]:
    check_comparable(studies, profile)
    rows = []
    for name, judged in group_trials(studies):
        best = sorted(judged, key=lambda j: -j.speedup)[:N_BEST_MASKS]
        about = (
            f"best {len(best)} of {len(judged)}, {as_speedup(best[-1].speedup)} to "
            f"{as_speedup(best[0].speedup)} predicted"
        )
        rows.append(MapRow.from_masks(name, about, *(j.trial.mask for j in best)))
    for study in studies:
        if (winner := study.confirmed) is not None and (mask := study.mask_of(winner)) is not None:
            name = "winner" if len(studies) == 1 else f"winner of {study.label}"
            rows.append(
                MapRow.from_masks(
                    name, f"{as_speedup(winner.speedup.mean)} measured on hold-out prompts", mask
                )
            )
    if profile is not None and profile.mask.n_skipped:
        about = (
            f"{as_speedup(profile.measured.speedup.mean)} measured on hold-out prompts"
            if profile.measured
            else "not measured"
        )
        rows.append(MapRow.from_masks("profile", about, profile.mask))
    return rows


def _draw_cells(
    axes: Any, cells: Sequence[tuple[tuple[float, float], float]], colour: str, gid: str
) -> None:
    """Draw unit squares at (x, y) whose opacity is their value; all have an outline."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    if not cells:
        return
    squares = [Rectangle((x - 0.46, y - 0.46), 0.92, 0.92) for (x, y), _ in cells]
    axes.add_collection(
        PatchCollection(
            squares,
            facecolors=[to_rgba(colour, value) for _, value in cells],
            edgecolors=[to_rgba(MUTED, 0.45)],
            linewidths=0.6,
            gid=gid,
        )
    )


def _describe_cell(row: MapRow, sublayer: int) -> str:
    if row.count == 1:
        return "skipped" if row.skipped_share[sublayer] else "kept"
    return (
        f"skipped by {round(row.skipped_share[sublayer] * row.count)} of its {row.count} best masks"
    )


def _format_layers(shares: Sequence[float]) -> str:
    """Return the skipped layers, with the share of masks if it is not 100 %: `3, 4 (60%), 7`."""
    return (
        ", ".join(
            f"{layer}" if share == 1 else f"{layer} ({share:.0%})"
            for layer, share in enumerate(shares)
            if share
        )
        or "none"
    )
