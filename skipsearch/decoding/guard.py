"""The guard, which pauses a drafter if its rounds cost more than they save, and retries it later.

A profile is tuned for a task. On a request of another kind, most of its drafts may be rejected, and
every round then wastes a draft and a longer verify pass. The guard computes the gain of each round
from counts, in units of one plain pass. Its decisions are therefore reproducible, and a simulation
makes the same decisions:

    gain of a round = tokens − cost = (accepted + 1) − (drafted · β + v)

A drafter's credit is the sum of its gains, at most `MAX_CREDIT`. At the start of a request, it is
the gain that the profile predicts for `PRIOR_ROUNDS` rounds. If the credit falls below zero, the
drafter is paused: the next drafter drafts, or decoding is plain. After the pause, the drafter is
retried. If it fails again, the next pause is twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.core.stats import DrafterCost

# Rounds of predicted gain at the start of a request. With fewer rounds, drafters are paused sooner,
# even if drafting pays.
PRIOR_ROUNDS = 3.0
MAX_CREDIT = 4.0  # plain passes; a higher limit delays the pause if drafts get bad late in a text
FIRST_PAUSE = 8  # rounds of the first pause
MAX_PAUSE = 64  # rounds; each pause is twice as long as the one before, until a retry pays
RETRY_CREDIT = 0.25  # plain passes; credit of a drafter after a pause


@dataclass
class _DrafterCredit:
    cost: DrafterCost
    credit: float  # plain passes
    rounds_paused: int = 0  # rounds until the end of the pause; 0: not paused
    next_pause: int = FIRST_PAUSE  # rounds


class Guard:
    """The guard of one request.

    drafter_costs: the costs of each drafter of the recipe; None: unknown, the drafter is never
    paused.
    """

    def __init__(self, drafter_costs: Sequence[DrafterCost | None]):
        self._credits = [
            None
            if cost is None
            else _DrafterCredit(cost, min(MAX_CREDIT, PRIOR_ROUNDS * max(0.0, cost.net_gain)))
            for cost in drafter_costs
        ]

    def is_paused(self, drafter: int) -> bool:
        # Forced tokens come after the drafters of the recipe, and are never paused.
        credit = self._credits[drafter] if drafter < len(self._credits) else None
        return credit is not None and credit.rounds_paused > 0

    def record_round(
        self, drafter: int | None, n_drafted: int = 0, n_accepted: int = 0, n_siblings: int = 0
    ) -> None:
        """Count a finished round.

        drafter: index of the drafter that drafted; None: no drafter. n_siblings: verified tokens in
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
