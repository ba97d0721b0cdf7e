"""Draw tokens from distributions."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token of each row, in proportion to the weights: [..., V] -> [..., 1].

    A CPU inverts the distribution function with one uniform number a row. torch.multinomial draws
    one for each token there, which takes ten times as long.
    Raises: RuntimeError if the weights of a row have no positive, finite sum.
    """
    if weights.device.type != "cpu":
        return torch.multinomial(weights, 1, generator=generator)
    sums = weights.double().cumsum(dim=-1)
    total = sums[..., -1:]
    if not bool(((total > 0) & total.isfinite()).all()):
        raise RuntimeError("the weights of a distribution have no positive, finite sum")
    uniform = torch.rand(total.shape, generator=generator, dtype=torch.float64)
    # Below the total, so that a token of weight 0 at the end is never drawn.
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True)


def draw_distinct_tokens(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw tokens of each row without replacement, [..., V] -> [..., count], the first one first.

    If fewer tokens than `count` have a weight, tokens of weight 0 follow them.
    count: at most V. Raises: RuntimeError as `draw_tokens`.
    """
    if count == 1:
        return draw_tokens(weights, generator)
    if weights.device.type != "cpu":
        # If e is exponential noise, tokens sorted by q(x) / e(x) are draws without replacement
        # (Kool et al. 2019).
        keys = weights / torch.empty_like(weights).exponential_(generator=generator)
        return keys.topk(count).indices
    drawn = [draw_tokens(weights, generator)]
    left, unused = weights.clone(), torch.ones_like(weights)
    while len(drawn) < count:
        left.scatter_(-1, drawn[-1], 0)
        unused.scatter_(-1, drawn[-1], 0)
        has_weight = left.sum(dim=-1, keepdim=True) > 0
        drawn.append(draw_tokens(torch.where(has_weight, left, unused), generator))
    return torch.cat(drawn, dim=-1)
