"""ASD's rule, for whatever applies it: the searcher `asd` to calibration text, the drafter `asd` to each prompt."""

from __future__ import annotations

from collections.abc import Sequence


def leaves_out(layer: int, n_layers: int, cosine: float | None, threshold: float, every: int, keep_last: int) -> bool:
    """Whether a sub-layer of this layer (from 0) is left out: its cosine reaches the threshold, or the layer is an every-th one; never in
    the last `keep_last` layers. cosine: None for a sub-layer that only the second rule may leave out. every: 0 is no such rule.

    Source: Metel et al. 2024, algorithm 1, which counts layers from 1.
    """
    number = layer + 1
    by_rule = every > 0 and number % every == 0
    return number <= n_layers - keep_last and (by_rule or (cosine is not None and cosine >= threshold))


def admg(cosines: Sequence[float], threshold: float, every: int, keep_last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers whose attention is left out, layers whose MLP is). cosines [L]: of each attention, between what goes in and what comes out.

    Source: Metel et al. 2024, algorithm 1.
    """
    n = len(cosines)
    attn = tuple(i for i, c in enumerate(cosines) if leaves_out(i, n, c, threshold, every, keep_last))
    return attn, tuple(i for i in range(n) if leaves_out(i, n, None, threshold, every, keep_last))
