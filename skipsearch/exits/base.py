"""The exit-policy port: when to stop drafting before the draft length is reached.

A policy is a frozen `Exit`: its settings, as a profile stores them. `begin()` gives what one request holds of it. A policy that learns
keeps what it learnt there, so two requests never change each other's drafts. A policy without memory returns itself. This one remembers
its round (CONTRIBUTING.md goes the whole way):

    class Joint(Exit):
        kind: Literal["joint"] = "joint"
        threshold: Fraction = Field(default=0.3, description="probability, 0..1")

        def begin(self) -> ExitSession:
            return JointSession(self.threshold)

        def stops(self, confidence: np.ndarray) -> np.ndarray:
            return first_under(confidence.cumprod(axis=1), self.threshold)

        @classmethod
        def grid(cls, fine: bool) -> Iterable[Exit]:
            return [cls(threshold=t / 10) for t in (range(1, 10) if fine else (2, 4, 6))]


    class JointSession:
        def __init__(self, threshold: float):
            self.threshold, self.product = threshold, 1.0   # of this round's top probabilities

        def stop(self, confidence: float, n_drafted: int) -> bool:
            self.product = confidence if n_drafted == 1 else self.product * confidence
            return self.product < self.threshold

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            pass

A session whose rule within a round is a plain threshold says so (`ThresholdSession`), and is then not asked token by token where the engine
drafts in one call. The threshold of `JointSession` is one for a product, so it does not say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from skipsearch.recipe import ExitSpec

if TYPE_CHECKING:   # reading a profile needs no numpy
    import numpy as np


class ExitSession(Protocol):
    """One request's exit policy: decides after each drafted token whether it ends the draft. That token is still verified."""

    def stop(self, confidence: float, n_drafted: int) -> bool:
        """confidence: top probability of the draft at its latest token; n_drafted: tokens drafted in this round so far."""

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        """Told after each verify pass of a round that drafted something."""


@runtime_checkable
class ThresholdSession(ExitSession, Protocol):
    """A session whose rule may be a threshold that stays the same while a round is drafted. An engine can then draft the whole round in one
    call, and nobody asks the session after each token."""

    def threshold_now(self) -> float | None:
        """Until the next `observe`, `stop(confidence, n)` is `confidence < threshold` for every n. None: another rule for now."""


class LearningExits(Protocol):
    """Many sessions of one learning kind, walked in step by the sweep: W of them, each known by its number."""

    def stops(self, walkers: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        """walkers [R], confidence [R, K] -> [R]: tokens that each of them would draft now, the one that ends the draft included; K if none
        does."""

    def observe(self, walkers: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """All [R]: told after a round of each of these walkers."""


class Exit(ExitSpec):
    """Settings of an exit policy. reads_confidence: False spares reading a number off the device at every draft step.

    shared: what it learns lives on across the requests of a decoder.
    """

    @property
    def shared(self) -> bool:
        return False

    def begin(self) -> ExitSession:
        """What one request holds of it, having learnt nothing yet."""
        raise NotImplementedError

    def stops(self, confidence: np.ndarray) -> np.ndarray | None:
        """confidence [A, K] -> [A]: tokens drafted until it says stop, itself included; K if it never does. None: it depends on more than
        these confidences, so the sweep asks `learning`."""
        return None

    @classmethod
    def learning(cls, exits: Sequence[Exit]) -> LearningExits | None:
        """Sessions of these exits, one each, for the sweep; None: the sweep walks each alone, which is slow and the same."""
        return None

    @classmethod
    def grid(cls, fine: bool) -> Iterable[Exit]:
        """The settings that a search tries: a few for every mask, more of them (`fine`) for the best ones."""
        return ()


def first_under(confidence: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """[A, K] -> [A]: tokens drafted until one is less sure than the threshold, itself included; K if none is."""
    import numpy as np

    under = confidence < threshold
    return np.where(under.any(axis=1), under.argmax(axis=1) + 1, confidence.shape[1])
