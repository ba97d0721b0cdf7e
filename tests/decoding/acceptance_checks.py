"""The acceptance rule, checked exactly: every random number that it draws is enumerated.

So the checks compare probabilities, not samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance
from skipsearch.engine import draws

Row = tuple[float, ...]
Tokens = tuple[int, ...]
# every ratio of quarters is a multiple of 1/12, so a midpoint represents its twelfth
# twelfth
GRID = 12


def outcomes(drafted: Tokens, q: Sequence[Row] | None, p: Sequence[Row]) -> dict[Tokens, float]:
    """Return the probability of each result of one call of accept_sampled for a given draft.

    A result is the accepted tokens and the token after them.
    """
    found: dict[Tokens, float] = defaultdict(float)
    p_rows, q_rows = (
        torch.tensor(p, dtype=torch.float64),
        None if q is None else torch.tensor(q, dtype=torch.float64),
    )
    for us in product([(k + 0.5) / GRID for k in range(GRID)], repeat=len(drafted)):
        weights: list[Tensor] = []

        def drawn(w: Tensor, *_: Any, seen: list[Tensor] = weights, **__: Any) -> Tensor:
            seen.append(w)
            return w.argmax()[None]

        uniform = torch.tensor(us, dtype=torch.float64)
        with (
            patch.object(torch, "rand", lambda *_, u=uniform, **__: u),
            patch.object(draws, "draw_tokens", drawn),
        ):
            accepted, _ = acceptance.accept_sampled(
                torch.tensor(drafted, dtype=torch.long), q_rows, p_rows, torch.Generator()
            )
        [w] = weights
        assert float(w.min()) >= 0
        for token, share in enumerate((w / w.sum()).tolist()):
            if share > 0:
                found[(*drafted[:accepted], token)] += share / GRID ** len(drafted)
    return found


def emitted(
    vocab: int,
    n_drafted: int,
    q: Callable[[Tokens], Row] | None,
    p: Callable[[Tokens], Row],
    certain: Tokens = (),
) -> dict[Tokens, float]:
    """Return the probability of every text of n_drafted + 1 tokens, if a round drafts n_drafted.

    If the round ends earlier, the full model writes the remaining tokens. q, p: next-token
    distribution after a text. q None: the draft is `certain`.
    """
    texts: dict[Tokens, float] = defaultdict(float)
    for drafted in product(range(vocab), repeat=n_drafted) if q else [certain]:
        rows = [q(drafted[:i]) for i in range(n_drafted)] if q else None
        chance = 1.0
        for row, token in zip(rows or (), drafted, strict=True) if rows else ():
            chance *= row[token]
        if chance == 0:
            continue
        for text, share in outcomes(
            drafted, rows, [p(drafted[:i]) for i in range(n_drafted + 1)]
        ).items():
            completed = {text: chance * share}
            while len(next(iter(completed))) <= n_drafted:
                completed = {
                    (*t, y): mass * w for t, mass in completed.items() for y, w in enumerate(p(t))
                }
            for t, mass in completed.items():
                texts[t] += mass
    return {text: mass for text, mass in texts.items() if mass > 1e-12}


def text_distribution(vocab: int, length: int, p: Callable[[Tokens], Row]) -> dict[Tokens, float]:
    """Return the same probabilities without drafting."""
    texts: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*t, y): mass * w
            for t, mass in texts.items()
            for y, w in enumerate(p(t))
            if mass * w > 1e-12
        }
    return texts


def assert_same_distribution(found: dict[Tokens, float], wanted: dict[Tokens, float]) -> None:
    assert found.keys() == wanted.keys()
    for text, mass in wanted.items():
        assert abs(found[text] - mass) < 1e-9, (text, found[text], mass)


P0, P1, Q0, Q1 = (0.5, 0.25, 0.25), (0.0, 0.25, 0.75), (0.25, 0.75, 0.0), (0.25, 0.5, 0.25)


def check_acceptance() -> None:
    """Check two drafted tokens of different distributions, one-hot drafts and the residual."""

    def p(text: Tokens) -> Row:
        return (P0, P1, Q1)[len(text)] if sum(text) % 2 else (P1, P0, Q0)[len(text)]

    def q(text: Tokens) -> Row:
        return Q0 if sum(text) % 2 else Q1

    wanted = text_distribution(3, 3, p)
    assert_same_distribution(emitted(3, 2, q, p), wanted)
    for certain in product(range(3), repeat=2):
        assert_same_distribution(emitted(3, 2, None, p, certain), wanted)
    left = acceptance.residual(torch.tensor(P0), torch.tensor(Q0), torch.tensor(1))
    assert torch.allclose(left, torch.tensor([0.5, 0.0, 0.5]))
    assert torch.allclose(
        acceptance.residual(torch.tensor(P0), None, torch.tensor(1)),
        torch.tensor([2 / 3, 0.0, 1 / 3]),
    )
