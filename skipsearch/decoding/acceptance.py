"""Accept or reject the draft tokens of a chain, and choose the token after them.

The rules of acceptance make decoding lossless. This module has the rules for chains, `trees.py`
those for trees, and `processed.py` those for requests with logits processors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.sequences import common_prefix_length
from skipsearch.engine import draws
from skipsearch.errors import non_finite_logits

NOT_FINITE = -1  # instead of a token, if the logits of its position are not finite


def choose_greedy(logits: Tensor) -> Tensor:
    """Return the most likely tokens, [..., V] -> [...]; NOT_FINITE if the best logit is not finite.

    Only the best logit is checked, because `argmax` returns the index of a NaN if there is one.
    """
    if logits.device.type == "cpu":  # torch's argmax of bfloat16 takes 30 times as long
        wide = logits.detach().float() if logits.dtype.itemsize == 2 else logits.detach()
        values = wide.numpy()
        best_numpy = values.argmax(axis=-1)
        largest = np.take_along_axis(values, best_numpy[..., None], axis=-1)[..., 0]
        return torch.from_numpy(np.where(np.isfinite(largest), best_numpy, NOT_FINITE))
    best = logits.argmax(dim=-1)
    return torch.where(logits.gather(-1, best[..., None])[..., 0].isfinite(), best, NOT_FINITE)


def accept_greedy(draft_tokens: Tensor, logits: Tensor) -> tuple[int, int]:
    """Accept draft tokens up to the first that differs from the full model's choice.

    draft_tokens: [N]. logits: the full model's, [N + 1, V]; row i is for draft_tokens[i]. Returns
    (number of accepted tokens, the full model's choice after them). Raises: ModelError if the
    logits of the next token are not finite. Source: Draft & Verify, algorithm 2.
    """
    # Copy from the device once per round.
    tokens = torch.cat([draft_tokens, choose_greedy(logits)]).tolist()
    proposed, chosen = tokens[: len(draft_tokens)], tokens[len(draft_tokens) :]
    accepted = common_prefix_length(proposed, chosen)
    if chosen[accepted] == NOT_FINITE:
        raise non_finite_logits()
    return accepted, chosen[accepted]


def accept_sampled(
    draft_tokens: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Accept draft tokens by speculative sampling, so that each token is distributed as p.

    Token x, drawn from q, is accepted with probability min(1, p(x) / q(x)). The first rejected
    token is replaced by a draw from max(p − q, 0), renormalised. If none is rejected, one more
    token is drawn from p.

    draft_tokens: [N]; q: [N, V], or None if each q is one-hot; p: [N + 1, V]. Returns (number of
    accepted tokens, the token after them). Raises: ModelError if the distribution of the next token
    is NaN. Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1."""
    n = len(draft_tokens)
    px = p[:n].gather(1, draft_tokens[:, None])[:, 0]
    qx = torch.ones_like(px) if q is None else q.gather(1, draft_tokens[:, None])[:, 0]
    u = torch.rand(n, generator=generator, device=p.device, dtype=p.dtype)
    # Comparisons with NaN are false, so the tokens from the first row of NaN on are rejected.
    n_accepted = (u * qx < px).long().cumprod(dim=0).sum()
    # A softmax of logits with a NaN or +inf is NaN everywhere, so one entry per row is checked.
    accepted, *is_nan = torch.cat([n_accepted[None], p[:, 0].isnan()]).tolist()
    if is_nan[accepted]:
        raise non_finite_logits()
    weights = (
        p[accepted]
        if accepted == n
        else residual(p[accepted], None if q is None else q[accepted], draft_tokens[accepted])
    )
    return accepted, int(draws.draw_tokens(weights, generator))


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """Return max(p − q, 0), renormalised, [V]. q: None is the one-hot distribution of `token`.

    If all entries round to zero (p equals q), return p; a rejection then has probability zero.
    """
    if q is None:
        difference = p.clone()
        difference[token] = 0
    else:
        difference = (p - q).clamp(min=0)
    total = difference.sum()
    return torch.where(total > 0, difference / total, p)
