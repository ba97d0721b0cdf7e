"""`adaptive`: Draft & Verify's threshold that follows the acceptance rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from skipsearch.core.schema_types import Fraction, is_falsy
from skipsearch.drafters.exits.exit_base import BatchedExits, Exit, first_below

if TYPE_CHECKING:
    import numpy as np


class Adaptive(Exit):
    """Stops below a threshold that rises if the acceptance rate is too low, and falls otherwise.

    After a round with acceptance rate AR_e:  AR ← β1·AR + (1 − β1)·AR_e, or AR_e after the first
    round; γ̃ = γ + ε if AR ≤ target else γ − ε;  γ ← β2·γ + (1 − β2)·γ̃. So γ changes by at most
    (1 − β2)·ε a round. γ is clipped to 0..1, because outside of this range it would react late.

    Each request starts from `threshold`. In the paper γ persists across requests, which
    `across_requests` does within one decoder. The drafts of a request, and its sample, then depend
    on earlier requests. Greedy tokens do not. Source: Draft & Verify, section 3.4, equations 2 to
    4; defaults from its appendix B."""

    kind: Literal["adaptive"] = "adaptive"
    threshold: Fraction = Field(default=0.6, description="probability to start from, 0..1")
    target_acceptance: Fraction = Field(
        default=0.9, description="accepted share of drafted tokens to hold, 0..1"
    )
    step: Fraction = Field(
        default=0.01, description="change of the threshold before smoothing, a probability, 0..1"
    )
    beta1: Fraction = Field(default=0.5, description="smoothing of the acceptance, a weight, 0..1")
    beta2: Fraction = Field(default=0.9, description="smoothing of the threshold, a weight, 0..1")
    across_requests: bool = Field(
        default=False,
        exclude_if=is_falsy,
        description="whether the threshold lives on from one request to the next; left out if not",
    )

    @property
    def shared_across_requests(self) -> bool:
        return self.across_requests

    def begin(self) -> AdaptiveSession:
        return AdaptiveSession(self)

    @classmethod
    def make_batched(cls, exits: Sequence[Exit]) -> BatchedExits:
        return BatchedAdaptive(exits)

    @classmethod
    def search_grid(cls, fine: bool) -> Iterable[Exit]:
        if not fine:
            return []
        return [
            cls(threshold=threshold, target_acceptance=target, step=step, beta2=beta2)
            for threshold, target, (step, beta2) in product(
                (0.3, 0.45, 0.6), (0.6, 0.7, 0.8, 0.9), ((0.01, 0.9), (0.05, 0.5))
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.threshold:g} for {self.target_acceptance:g}"


class AdaptiveSession:
    """The threshold of one request, or of all requests (`across_requests`).

    Threads may share the threshold of all requests, so updates are locked.
    """

    def __init__(self, settings: Adaptive):
        self.settings, self.threshold = settings, settings.threshold
        self.acceptance_rate: float | None = None  # AR; None before the first round
        self._lock = Lock()

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        return confidence < self.threshold

    def current_threshold(self) -> float:
        return self.threshold

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        s = self.settings
        with self._lock:
            self.acceptance_rate, threshold = update_threshold(
                self.acceptance_rate or 0.0,
                self.threshold,
                n_accepted / n_drafted,
                0.0 if self.acceptance_rate is None else s.beta1,
                s.target_acceptance,
                s.step,
                s.beta2,
            )
            self.threshold = min(1.0, max(0.0, threshold))


class BatchedAdaptive:
    """The sessions of many `adaptive` exits in a sweep, as arrays with one entry per walker."""

    def __init__(self, exits: Sequence[Any]):
        import numpy as np

        self.threshold, self.target, self.step, self.beta1, self.beta2 = (
            np.array([getattr(exit_policy, name) for exit_policy in exits])
            for name in ("threshold", "target_acceptance", "step", "beta1", "beta2")
        )
        self.acceptance_rate = np.zeros(len(exits))
        self._has_rate = np.zeros(len(exits), dtype=bool)

    def stop_lengths(self, walkers: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        return first_below(confidence, self.threshold[walkers, None])

    def observe(self, walkers: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        self.acceptance_rate[walkers], threshold = update_threshold(
            self.acceptance_rate[walkers],
            self.threshold[walkers],
            accepted / drafted,
            self.beta1[walkers] * self._has_rate[walkers],
            self.target[walkers],
            self.step[walkers],
            self.beta2[walkers],
        )
        self._has_rate[walkers] = True
        self.threshold[walkers] = threshold.clip(0.0, 1.0)


def update_threshold(
    rate: Any, threshold: Any, share: Any, beta1: Any, target: Any, step: Any, beta2: Any
) -> tuple[Any, Any]:
    """Return (acceptance rate, threshold) after a round, by Draft & Verify's equations 2 to 4.

    All arguments are numbers, or arrays of one shape. share: accepted share of the round's draft
    tokens. beta1: 0 in the first round, because there is no earlier rate."""
    rate = beta1 * rate + (1 - beta1) * share
    proposed = threshold + step * (1 - 2 * (rate > target))
    return rate, beta2 * threshold + (1 - beta2) * proposed
