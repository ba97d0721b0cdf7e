"""ASD's rule. The searcher `asd` applies it to calibration text, the drafter `asd` to each prompt.

Source: Metel et al. 2024, algorithm 1, which counts layers from 1."""

from __future__ import annotations

from collections.abc import Sequence


def is_skipped(
    layer: int, n_layers: int, cosine: float | None, threshold: float, every: int, keep_last: int
) -> bool:
    """Return whether a sub-layer of this layer (from 0) is left out.

    It is if its cosine reaches the threshold, or the layer is an every-th one; never in the last
    `keep_last` layers. cosine: None if only the second rule applies. every: 0 means no such rule.
    """
    number = layer + 1
    by_number = every > 0 and number % every == 0
    return number <= n_layers - keep_last and (
        by_number or (cosine is not None and cosine >= threshold)
    )


def select_sublayers(
    cosines: Sequence[float], threshold: float, every: int, keep_last: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (layers whose attention is left out, layers whose MLP is).

    cosines: [L], between the input and the output of each attention.
    """
    n = len(cosines)
    attn = tuple(
        i for i, c in enumerate(cosines) if is_skipped(i, n, c, threshold, every, keep_last)
    )
    return attn, tuple(i for i in range(n) if is_skipped(i, n, None, threshold, every, keep_last))
