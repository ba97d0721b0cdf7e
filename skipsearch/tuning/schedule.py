"""How `tune` divides its budget: when each stage ends."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

# The shares of the budget that are spent when a stage ends. The final measurement ends with it.
TEXT_END, SEARCH_END, RACE_END = 0.2, 0.5, 0.7
LEAST_SHARE = 0.1  # of the budget, for a stage that begins late


@dataclass(frozen=True)
class Schedule:
    """The times at which the stages of a `tune` end."""

    budget_s: float | None  # of all stages; None: each takes as long as it needs
    started: float  # as from `perf_counter`

    def seconds_until(self, end: float, n_parts: int = 1, reserved_s: float = 0.0) -> float | None:
        """Return the seconds left to a stage that ends at this share; None: no limit.

        They are at least LEAST_SHARE of the budget. n_parts: that share the time. reserved_s: of a
        part, for what follows it.
        """
        if self.budget_s is None:
            return None
        left_s = self.started + end * self.budget_s - perf_counter()
        return max(LEAST_SHARE * self.budget_s, left_s / n_parts - reserved_s)
