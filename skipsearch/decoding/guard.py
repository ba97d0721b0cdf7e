"""The guard, which pauses a drafter if its rounds cost more than they save, and retries it later.

A profile is made for a task. On a request of another kind its drafts may be rejected, and every
round then costs a draft and a longer verify pass for nothing. The guard computes the gain of each
round from counts, in units of one plain pass, so its decisions are repeatable and a simulation
makes the same ones:

    gain of a round = tokens − cost = (accepted + 1) − (drafted · β + v)

A drafter's credit is the sum of its gains, at most `MAX_CREDIT`. It starts each request with the
gain that the profile predicts for `PRIOR_ROUNDS` rounds. If it falls below zero, the drafter is
paused: its rounds go to the next drafter, or are those of plain decoding. After the pause the
drafter is retried; if it fails again, the next pause is twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.core.stats import DrafterCost

# Rounds of predicted gain at the start of a request. A smaller number pauses drafters sooner, even
# if drafting pays.
PRIOR_ROUNDS = 3.0
MAX_CREDIT = 4.0  # plain passes; with more, drafts that turn bad late in a text are noticed later
FIRST_PAUSE = 8  # rounds of the first pause
MAX_PAUSE = 64  # rounds; each pause is twice as long as the last, until a retry pays
RETRY_CREDIT = 0.25  # plain passes; credit of a drafter after a pause


@dataclass
class _DrafterCredit:
    cost: DrafterCost
    credit: float  # plain passes
    rounds_paused: int = 0  # rounds until the end of the pause; 0: not paused
    next_pause: int = FIRST_PAUSE  # rounds


class Guard:
    """The guard of one request.

    drafter_costs: one for each drafter of the recipe; None: unknown, so it is never paused.
    """

    def __init__(self, drafter_costs: Sequence[DrafterCost | None]):
        self._credits = [
            None
            if cost is None
            else _DrafterCredit(cost, min(MAX_CREDIT, PRIOR_ROUNDS * max(0.0, cost.net_gain)))
            for cost in drafter_costs
        ]

    def is_paused(self, drafter: int) -> bool:
        credit = self._credits[drafter]
        return credit is not None and credit.rounds_paused > 0

    def record_round(
        self, drafter: int | None, n_drafted: int = 0, n_accepted: int = 0, n_siblings: int = 0
    ) -> None:
        """Count a finished round.

        drafter: index of the drafter that drafted; None: none did. n_siblings: verified tokens in
        addition to `n_drafted`.
        """
        for i, credit in enumerate(self._credits):
            if credit is None:
                continue
            if credit.rounds_paused:
                credit.rounds_paused -= 1
                if not credit.rounds_paused:
                    credit.credit = RETRY_CREDIT
            elif i == drafter:
                self._update(credit, n_accepted + 1 - credit.cost.of_round(n_drafted, n_siblings))

    def _update(self, credit: _DrafterCredit, gain: float) -> None:
        credit.credit = min(MAX_CREDIT, credit.credit + gain)
        if credit.credit < 0:
            credit.rounds_paused, credit.next_pause = (
                credit.next_pause,
                min(MAX_PAUSE, 2 * credit.next_pause),
            )
        elif gain > 0:
            credit.next_pause = FIRST_PAUSE
