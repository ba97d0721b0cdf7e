"""The exit-policy port: when to stop drafting before the draft length is reached.

A policy is a frozen `Exit`: its settings, as a profile stores them. `begin()` returns the state of
one request. A policy that learns stores there what it learned, so two requests never change each
other's drafts. A policy without memory returns itself. This one remembers its round
(CONTRIBUTING.md shows every step):

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
            self.threshold, self.product = threshold, 1.0   # of this round's top probabilities

        def should_stop(self, confidence: float, n_drafted: int) -> bool:
            self.product = confidence if n_drafted == 1 else self.product * confidence
            return self.product < self.threshold

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            pass

If the rule within a round is a plain threshold, the session is a `ThresholdExitSession`. It is then
not asked token by token if the engine can draft in one call. The threshold of `JointSession`
applies to a product, so it is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from skipsearch.core.recipe import ExitSpec

if TYPE_CHECKING:  # reading a profile needs no numpy
    import numpy as np


class ExitSession(Protocol):
    """The state of one request in an exit policy."""

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        """Return whether the draft ends after its latest token, which is still verified.

        confidence: the draft's top probability at that token. n_drafted: tokens drafted in this
        round so far, that one included."""

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        """Learn the result of a round that drafted at least one token."""


@runtime_checkable
class ThresholdExitSession(ExitSession, Protocol):
    """A session whose rule may be a threshold that stays the same during a round.

    An engine can then draft the whole round in one call, without asking after each token."""

    def current_threshold(self) -> float | None:
        """Return the threshold until the next `observe`; None: another rule for now.

        With a threshold, `should_stop(confidence, n)` is `confidence < threshold` for every n."""


class BatchedExits(Protocol):
    """Sessions of many exits of one kind that learns, for the sweep.

    The sweep walks W rounds at once; each walker is known by its number."""

    def stop_lengths(self, walkers: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        """Return how many tokens each of these walkers would draft now, [R].

        walkers: [R]. confidence: [R, K]. The token that ends the draft counts; K if none does."""

    def observe(self, walkers: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Learn the result of a round of each of these walkers. All arrays are [R]."""


class Exit(ExitSpec):
    """The settings of an exit policy.

    If `reads_confidence` is False, draft steps need not read a number from the device."""

    @property
    def shared_across_requests(self) -> bool:
        """Whether what it learns persists across the requests of a decoder."""
        return False

    def begin(self) -> ExitSession:
        """Return the state of a new request, which has learned nothing yet."""
        raise NotImplementedError

    def stop_lengths(self, confidence: np.ndarray) -> np.ndarray | None:
        """Return how many tokens are drafted, [A], from their confidence [A, K].

        The token that ends the draft counts; K if none does. Returns None if the rule depends on
        more than these confidences; the sweep then uses `make_batched`."""
        return None

    @classmethod
    def make_batched(cls, exits: Sequence[Exit]) -> BatchedExits | None:
        """Return one session for each of these exits, for the sweep.

        If it is None, the sweep walks each exit alone: slower, with the same result."""
        return None

    @classmethod
    def search_grid(cls, fine: bool) -> Iterable[Exit]:
        """Return the settings that a search tries: a few for every mask, more if `fine`, which is
        for the best masks.
        """
        return ()


def first_below(confidence: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """Return how many tokens [A] are drafted up to the first below a threshold.

    confidence: [A, K]. The token below the threshold counts; K if there is none."""
    import numpy as np

    is_below = confidence < threshold
    return np.where(is_below.any(axis=1), is_below.argmax(axis=1) + 1, confidence.shape[1])
