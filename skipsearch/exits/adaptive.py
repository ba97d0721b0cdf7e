"""`adaptive`: Draft & Verify's threshold that follows the acceptance rate."""

from __future__ import annotations

from typing import Any, ClassVar

from skipsearch.errors import DecodeError
from skipsearch.exits.confidence import checked_share


class Adaptive:
    """Stop under a threshold that rises while too few drafts are accepted and falls while enough are.

    After a round with acceptance rate AR_e:  AR ← β1·AR + (1 − β1)·AR_e, the first round alone counting whole;
    γ̃ = γ + ε if AR ≤ target else γ − ε;  γ ← β2·γ + (1 − β2)·γ̃. So γ moves by at most (1 − β2)·ε a round, and it lives on
    across requests. It is kept in 0..1, outside of which it would only have to find its way back.
    Source: Draft & Verify, section 3.4, equations 2 to 4; defaults from its appendix B.
    """

    kind: ClassVar[str] = "adaptive"
    reads_confidence: ClassVar[bool] = True

    def __init__(self, threshold: float = 0.6, target_acceptance: float = 0.9, step: float = 0.01, beta1: float = 0.5,
                 beta2: float = 0.9):
        self.initial_threshold = checked_share("threshold", threshold)
        self.target_acceptance = checked_share("target_acceptance", target_acceptance)
        self.beta1, self.beta2 = checked_share("beta1", beta1), checked_share("beta2", beta2)
        if not 0 <= step <= 1:
            raise DecodeError(f"step is {step}; a threshold moves by 0..1")
        self.step = float(step)
        self.threshold = self.initial_threshold
        self.acceptance: float | None = None

    def stop(self, confidence: float, n_drafted: int) -> bool:
        return confidence < self.threshold

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        rate = n_accepted / n_drafted
        self.acceptance = rate if self.acceptance is None else self.beta1 * self.acceptance + (1 - self.beta1) * rate
        wanted = self.threshold + (self.step if self.acceptance <= self.target_acceptance else -self.step)
        self.threshold = min(1.0, max(0.0, self.beta2 * self.threshold + (1 - self.beta2) * wanted))

    def parameters(self) -> dict[str, Any]:
        return {"threshold": self.initial_threshold, "target_acceptance": self.target_acceptance, "step": self.step,
                "beta1": self.beta1, "beta2": self.beta2}
