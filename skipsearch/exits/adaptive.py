"""`adaptive`: Draft & Verify's threshold that follows the acceptance rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from skipsearch.exits.base import Exit, LearningExits, first_under
from skipsearch.fields import Fraction, left_out

if TYPE_CHECKING:
    import numpy as np


class Adaptive(Exit):
    """Stop under a threshold that rises while too few drafts are accepted and falls while enough are.

    After a round with acceptance rate AR_e:  AR ← β1·AR + (1 − β1)·AR_e, the first round alone counting whole;
    γ̃ = γ + ε if AR ≤ target else γ − ε;  γ ← β2·γ + (1 − β2)·γ̃. So γ moves by at most (1 − β2)·ε a round. It is kept in 0..1, outside
    of which it would only have to find its way back.

    Each request starts from `threshold`. In the paper γ lives on across requests: `across_requests` does that, within one decoder. A
    request's drafts, and with a seed its sample, then depend on the requests before it. Its greedy tokens never do.
    Source: Draft & Verify, section 3.4, equations 2 to 4; defaults from its appendix B.
    """

    kind: Literal["adaptive"] = "adaptive"
    threshold: Fraction = Field(default=0.6, description="probability to start from, 0..1")
    target_acceptance: Fraction = Field(default=0.9, description="accepted share of drafted tokens to hold, 0..1")
    step: Fraction = Field(default=0.01, description="change of the threshold before smoothing, a probability, 0..1")
    beta1: Fraction = Field(default=0.5, description="smoothing of the acceptance, a weight, 0..1")
    beta2: Fraction = Field(default=0.9, description="smoothing of the threshold, a weight, 0..1")
    across_requests: bool = Field(default=False, exclude_if=left_out,
                                  description="whether the threshold lives on from one request to the next; left out if not")

    @property
    def shared(self) -> bool:
        return self.across_requests

    def begin(self) -> AdaptiveSession:
        return AdaptiveSession(self)

    @classmethod
    def learning(cls, exits: Sequence[Exit]) -> LearningExits:
        return _ManyAdaptive(exits)

    @classmethod
    def grid(cls, fine: bool) -> Iterable[Exit]:
        if not fine:
            return []
        return [cls(threshold=threshold, target_acceptance=target, step=step, beta2=beta2)
                for threshold, target, (step, beta2) in product((0.3, 0.45, 0.6), (0.6, 0.7, 0.8, 0.9), ((0.01, 0.9), (0.05, 0.5)))]

    def __str__(self) -> str:
        return f"{self.kind} {self.threshold:g} for {self.target_acceptance:g}"


class AdaptiveSession:
    """threshold: γ now. acceptance: AR; None before the first round."""

    def __init__(self, settings: Adaptive):
        self.settings, self.threshold = settings, settings.threshold
        self.acceptance: float | None = None

    def stop(self, confidence: float, n_drafted: int) -> bool:
        return confidence < self.threshold

    def threshold_now(self) -> float:
        return self.threshold

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        s, rate = self.settings, n_accepted / n_drafted
        self.acceptance = rate if self.acceptance is None else s.beta1 * self.acceptance + (1 - s.beta1) * rate
        wanted = self.threshold + (s.step if self.acceptance <= s.target_acceptance else -s.step)
        self.threshold = min(1.0, max(0.0, s.beta2 * self.threshold + (1 - s.beta2) * wanted))


class _ManyAdaptive:
    def __init__(self, exits: Sequence[Any]):
        import numpy as np

        self.threshold, self.target, self.step, self.beta1, self.beta2 = (
            np.array([getattr(e, name) for e in exits]) for name in ("threshold", "target_acceptance", "step", "beta1", "beta2"))
        self.rate = np.full(len(exits), np.nan)   # none yet

    def stops(self, walkers: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        return first_under(confidence, self.threshold[walkers, None])

    def observe(self, walkers: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        import numpy as np

        share, rate, threshold = accepted / drafted, self.rate[walkers], self.threshold[walkers]
        beta1, beta2 = self.beta1[walkers], self.beta2[walkers]
        rate = np.where(np.isnan(rate), share, beta1 * rate + (1 - beta1) * share)
        wanted = threshold + np.where(rate <= self.target[walkers], self.step[walkers], -self.step[walkers])
        self.rate[walkers] = rate
        self.threshold[walkers] = np.clip(beta2 * threshold + (1 - beta2) * wanted, 0.0, 1.0)
