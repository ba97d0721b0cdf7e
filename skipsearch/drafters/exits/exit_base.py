"""The interface of exit policies, which end a draft before its draft length.

A policy is a frozen `Exit`: its settings, as a profile stores them. `begin()` returns the state of
one request. An adaptive policy stores what it learns in this state, so requests do not change each
other's drafts. A policy without state returns itself. This policy has a state within each round
(docs/extending.md shows every step):

    class Joint(Exit):
        kind: Literal["joint"] = "joint"
        threshold: Fraction = Field(default=0.3, description="probability, 0..1")

        def begin(self) -> ExitSession:
            return JointSession(self.threshold)

        def stop_lengths(self, confidence: np.ndarray) -> np.ndarray:
            return first_below(confidence.cumprod(axis=1), self.threshold)

        @classmethod
        def search_grid(cls, fine: bool) -> Iterable[Exit]:
            return [cls(threshold=t / 10) for t in (range(1, 10) if fine else (2, 4, 6))]


    class JointSession:
        def __init__(self, threshold: float):
            self.threshold, self.product = threshold, 1.0  # of this round's top probabilities

        def should_stop(self, confidence: float, n_drafted: int) -> bool:
            self.product = confidence if n_drafted == 1 else self.product * confidence
            return self.product < self.threshold

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            pass

If the rule within a round is a threshold on each token's confidence, the session should be a
`ThresholdExitSession`, with which an engine can draft all tokens of a round in one call. The
threshold of `JointSession` applies to a product, so it is not such a rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from skipsearch.core.recipe import ExitSpec

if TYPE_CHECKING:  # loading a profile must not import numpy
    import numpy as np


class ExitSession(Protocol):
    """The state of one request in an exit policy."""

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        """Return whether the draft ends after its latest token. This token is still verified.

        confidence: the draft's top probability at this token. n_drafted: tokens drafted in this
        round, the latest included.
        """

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        """Learn the result of a round that drafted at least one token."""


@runtime_checkable
class ThresholdExitSession(ExitSession, Protocol):
    """A session whose rule may be a threshold that is constant during a round.

    With such a threshold, an engine can draft all tokens of the round in one call.
    """

    def current_threshold(self) -> float | None:
        """Return the threshold that is valid until the next `observe`; None if there is none.

        With a threshold, `should_stop(confidence, n)` is `confidence < threshold` for every n.
        """


class BatchedExits(Protocol):
    """The sessions of many adaptive exits of one kind, for the sweep.

    The sweep simulates W requests (walkers) at once. A walker is one prompt under one policy, and
    has a number.
    """

    def stop_lengths(self, walkers: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        """Return the number of tokens that each of R walkers drafts, [R].

        walkers: their numbers, [R]. confidence: [R, K]. The token that ends the draft is counted.
        If no token ends it, the number is K.
        """

    def observe(self, walkers: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Learn the results of one round of each of R walkers. All arrays are [R]."""


class Exit(ExitSpec):
    """The settings of an exit policy.

    If `reads_confidence` is False, draft steps need not copy the confidence from the device."""

    @property
    def shared_across_requests(self) -> bool:
        """Whether learned state persists across the requests of a decoder."""
        return False

    def begin(self) -> ExitSession:
        """Return the initial state of a new request."""
        raise NotImplementedError

    def stop_lengths(self, confidence: np.ndarray) -> np.ndarray | None:
        """Return how many tokens are drafted, [A], for rounds with these confidences, [A, K].

        The token that ends the draft is counted. If no token ends it, the number is K. Returns None
        if the rule depends on more than these confidences; the sweep then uses `make_batched`.
        """
        return None

    @classmethod
    def make_batched(cls, exits: Sequence[Exit]) -> BatchedExits | None:
        """Return the sessions of these exits for the sweep, or None.

        None: the sweep simulates each exit alone, which is slower and has the same result.
        """
        return None

    @classmethod
    def search_grid(cls, fine: bool) -> Iterable[Exit]:
        """Return the settings that a search tries. fine: return more, for the best masks."""
        return ()


def first_below(confidence: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """Return the number of tokens [A] up to the first one below a threshold, which is counted.

    confidence: [A, K]. If no token is below the threshold, the number is K.
    """
    import numpy as np

    is_below = confidence < threshold
    return np.where(is_below.any(axis=1), is_below.argmax(axis=1) + 1, confidence.shape[1])
