"""The rule of ASD, which says what to skip for given cosines.

The searcher `asd` applies it to calibration text, and the drafter `asd` to prompts.

Source: Metel et al. 2024, algorithm 1, which counts layers from 1.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_skipped(
    layer: int, n_layers: int, cosine: float | None, threshold: float, every: int, keep_last: int
) -> bool:
    """Return whether ASD skips a sub-layer.

    Rule 1 skips it if its cosine is at least `threshold`. Rule 2 skips it in every `every`-th
    layer. Neither rule applies to the last `keep_last` layers.
    layer: from 0. cosine: None if only rule 2 applies. every: 0 switches rule 2 off.
    """
    number = layer + 1
    by_number = every > 0 and number % every == 0
    return number <= n_layers - keep_last and (
        by_number or (cosine is not None and cosine >= threshold)
    )


def select_sublayers(
    cosines: Sequence[float], threshold: float, every: int, keep_last: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (layers whose attention is skipped, layers whose MLP is skipped).

    cosines: for each attention, the cosine of its input and its output, [L].
    """
    n = len(cosines)
    attn = tuple(
        i for i, c in enumerate(cosines) if is_skipped(i, n, c, threshold, every, keep_last)
    )
    return attn, tuple(i for i in range(n) if is_skipped(i, n, None, threshold, every, keep_last))
