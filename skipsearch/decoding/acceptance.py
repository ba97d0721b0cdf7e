"""Which drafted tokens stand, and which token follows them. This is the whole of losslessness."""

from __future__ import annotations

import torch
from torch import Tensor

from skipsearch.errors import no_numbers

BROKEN = -1   # stands where a token would, in a row of logits that names none


def greedy_choice(logits: Tensor) -> Tensor:
    """[..., V] -> [...]: the likeliest token; BROKEN where the logits are no numbers, since `argmax` finds a NaN if there is one."""
    best = logits.argmax(dim=-1)
    return torch.where(logits.gather(-1, best[..., None])[..., 0].isfinite(), best, BROKEN)


def accept_greedy(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
    """Drafted tokens up to the first that the full model would not have chosen, then the full model's own choice.

    drafted: [N]; logits: [N + 1, V], row i judging drafted[i]. Returns (accepted, next token).
    Raises: ModelError where the logits that choose the next token are not numbers.
    Source: Draft & Verify, algorithm 2.
    """
    *tokens, = torch.cat([drafted, greedy_choice(logits)]).tolist()  # one read from the device for a round
    proposed, chosen = tokens[:len(drafted)], tokens[len(drafted):]
    accepted = next((i for i, (a, b) in enumerate(zip(proposed, chosen, strict=False)) if a != b), len(proposed))
    if chosen[accepted] == BROKEN:
        raise no_numbers()
    return accepted, chosen[accepted]


def accept_sampled(drafted: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Speculative sampling: token x, drawn from q, stands with probability min(1, p(x) / q(x)); the first that falls is replaced
    by a draw from max(p − q, 0), renormalised; if none falls, one more token is drawn from p. So each token is distributed as p.

    drafted: [N]; q: [N, V], or None where the draft was certain of each token (a one-hot q); p: [N + 1, V].
    Raises: ModelError where the distribution of the next token is not one of numbers.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1.
    """
    n = len(drafted)
    px = p[:n].gather(1, drafted[:, None])[:, 0]
    qx = torch.ones_like(px) if q is None else q.gather(1, drafted[:, None])[:, 0]
    u = torch.rand(n, generator=generator, device=p.device, dtype=p.dtype)
    stands = (u * qx < px).long().cumprod(dim=0).sum()   # nothing stands from a row of NaN on
    accepted, *broken = torch.cat([stands[None], p[:, 0].isnan()]).tolist()   # a softmax of anything but numbers is all NaN
    if broken[accepted]:
        raise no_numbers()
    weights = p[accepted] if accepted == n else residual(p[accepted], None if q is None else q[accepted], drafted[accepted])
    return accepted, int(torch.multinomial(weights, 1, generator=generator))


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """max(p − q, 0) renormalised, [V]; q None is the one-hot of `token`.

    Where rounding leaves nothing (p and q equal), p itself: a rejection had probability zero there.
    """
    if q is None:
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp(min=0)
    total = left.sum()
    return torch.where(total > 0, left / total, p)
