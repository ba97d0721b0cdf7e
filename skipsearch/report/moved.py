"""The figure of masks that move while a text is written: sub-layers by rounds, with what was drafted and accepted below."""

from __future__ import annotations

from itertools import pairwise

from skipsearch.report.drawn import Drawn, NothingToDraw
from skipsearch.report.searches import NO_STUDY
from skipsearch.report.study import Study
from skipsearch.report.theme import MUTED, SERIES, style

WORDS = "A row is a sub-layer, the lowest one first; it is full in the rounds in which the draft skipped it. A thin line stands where " \
        "the mask changed. Below: tokens drafted in each round (pale), and accepted of these (full). The second colour is another drafter."


def masks_over_rounds(study: Study | None, name: str = "moved") -> Drawn:
    """How the winner's masks moved over one generation on a calibration prompt. name: of the figure, where a page has several.

    Raises: NothingToDraw if the study holds none, which is so of drafters whose masks stay.
    """
    if study is None:
        raise NothingToDraw(NO_STUDY)
    if study.moved is None:
        raise NothingToDraw("This study holds no masks that move: its winner drafts under one mask or none, or a version made it that did "
                            "not keep them.")
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    found, n_rows = study.moved, 2 * study.n_layers
    count = len(found.rounds)
    starts = [at for at, _ in found.masks]
    spans = [(begin, end, mask) for (begin, end), (_, mask) in zip(pairwise([*starts, count]), found.masks, strict=True)]
    skipped = [(begin, end, s) for begin, end, mask in spans for s in range(n_rows) if mask[s]]
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 2.4 + 0.09 * n_rows), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(max(2.0, 0.09 * n_rows), 1.4))
        upper.add_collection(PatchCollection([Rectangle((begin - 0.5, s - 0.42), end - begin, 0.84) for begin, end, s in skipped],
                                             facecolors=SERIES[0], alpha=0.75, linewidths=0, gid="skipped"))
        for begin in starts[1:]:
            upper.axvline(begin - 0.5, color=MUTED, lw=0.5)
        upper.set(xlim=(-0.5, count - 0.5), ylim=(-0.6, n_rows - 0.4), ylabel="layer: attention, MLP")
        step = 1 if study.n_layers <= 12 else 4
        upper.set_yticks(range(0, n_rows, 2 * step), [str(layer) for layer in range(0, study.n_layers, step)])
        mine = [by == found.drafter for by, _, _ in found.rounds]
        for gid, opacity, what in (("drafted", 0.3, 1), ("accepted", 1.0, 2)):
            amounts = [of_round[what] for of_round in found.rounds]
            for whose, colour, own in (("own", SERIES[0], True), ("others", SERIES[1], False)):
                bars = [Rectangle((k - 0.4, 0), 0.8, n) for k, n in enumerate(amounts) if n and mine[k] == own]
                if bars:
                    lower.add_collection(PatchCollection(bars, facecolors=colour, alpha=opacity, linewidths=0, gid=f"{gid}-{whose}"))
        lower.set(ylim=(0, 1.08 * max(1, *(d for _, d, _ in found.rounds))), xlabel="round", ylabel="tokens")
        lower.locator_params(axis="both", integer=True)
    tips = {"skipped": [f"{'MLP' if s % 2 else 'attention'} {s // 2}: skipped in rounds {begin} to {end - 1}" for begin, end, s in skipped]}
    for gid in ("drafted", "accepted"):
        for whose, own in (("own", True), ("others", False)):
            said = [f"round {k}: {a} of {d} accepted" for k, (_, d, a) in enumerate(found.rounds)
                    if (d if gid == "drafted" else a) and mine[k] == own]
            if said:
                tips[f"{gid}-{whose}"] = said
    rows = []
    for begin, end, mask in spans:
        within = [found.rounds[k] for k in range(begin, end) if mine[k]]
        drafted, accepted = sum(d for _, d, _ in within), sum(a for _, _, a in within)
        rows.append([f"{begin}–{end - 1}", _layers(mask[::2]), _layers(mask[1::2]), str(drafted), str(accepted),
                     f"{accepted / drafted:.0%}" if drafted else ""])
    return Drawn(name, figure, ("rounds", "attention skipped in layers", "MLP skipped in layers", "drafted", "accepted", "share"), rows,
                 {gid: said for gid, said in tips.items() if said})


def _layers(bits: tuple[int, ...]) -> str:
    return ", ".join(str(layer) for layer, bit in enumerate(bits) if bit) or "none"
