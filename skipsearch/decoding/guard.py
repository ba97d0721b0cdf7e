"""The guard: a drafter whose rounds cost more than they bring rests, and is tried again later.

A profile is made for a task, and a request may be of another kind: there its drafts fail, and every round costs a draft and a longer verify
pass for nothing. The guard weighs each drafter's rounds by counts, in units of one plain pass, so its decisions are repeatable and a
simulation makes the same ones:

    gain of a round = tokens it yields − its cost = (accepted + 1) − (drafted · β + v)

The sum of these gains starts each request at what the profile promises for `PRIOR` rounds, and is kept below `MOST_CREDIT`. Where it falls
below zero the drafter rests: its rounds go to the next drafter, or are exactly those of plain decoding. After some rounds the drafter is
tried again, and if it fails again it rests twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.stats import Price

PRIOR = 3.0        # rounds that the profile counts for at the start of a request; fewer rest sooner, also where drafting pays
MOST_CREDIT = 4.0  # plain passes; with more of it, a long text that turns bad is noticed later
FIRST_REST = 8     # rounds of the first rest
LONGEST_REST = 64  # rounds of any rest; each one is twice as long as the last, until a try pays
TRY = 0.25         # credit of a drafter that is tried again, in plain passes


@dataclass
class _Watched:
    price: Price
    credit: float
    rest: int = 0        # rounds left to rest
    next_rest: int = FIRST_REST


class Guard:
    """One request's. prices: of each drafter of the recipe; None: nothing is known of it, so it is never sent to rest."""

    def __init__(self, prices: Sequence[Price | None]):
        self._watched = [None if price is None else _Watched(price, min(MOST_CREDIT, PRIOR * max(0.0, price.gain))) for price in prices]

    def rests(self, drafter: int) -> bool:
        watched = self._watched[drafter]
        return watched is not None and watched.rest > 0

    def passed(self, drafter: int | None, drafted: int = 0, accepted: int = 0, siblings: int = 0) -> None:
        """A round is over. drafter: who drafted it; None: nobody. siblings: tokens that were verified beside the drafted ones."""
        for i, watched in enumerate(self._watched):
            if watched is None:
                continue
            if watched.rest:
                watched.rest -= 1
                if not watched.rest:
                    watched.credit = TRY
            elif i == drafter:
                self._weigh(watched, accepted + 1 - watched.price.of(drafted, siblings))

    def _weigh(self, watched: _Watched, gain: float) -> None:
        watched.credit = min(MOST_CREDIT, watched.credit + gain)
        if watched.credit < 0:
            watched.rest, watched.next_rest = watched.next_rest, min(LONGEST_REST, 2 * watched.next_rest)
        elif gain > 0:
            watched.next_rest = FIRST_REST
