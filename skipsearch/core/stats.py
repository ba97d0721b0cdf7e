"""Counters of decoding, trials of a search, closed forms for a round, and confidence intervals.

α   probability that a draft token is accepted, given that those before it were
γ   draft length: draft tokens of a round
τ   mean tokens of a round, that of the verify pass included; 1.00 is plain decoding
β   time of a draft step over the time of a plain pass
v   time of a verify pass over the time of a plain pass
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np


def expected_round_tokens(alpha: float, draft_length: int) -> float:
    """Return the mean tokens of a round if draft tokens are accepted independently.

    That is (1 - alpha**(draft_length + 1)) / (1 - alpha), and draft_length + 1 at alpha = 1.

    Raises: ValueError if alpha is outside [0, 1] or draft_length < 0.
    Source: Leviathan et al. 2023, eq. 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; an acceptance probability lies in 0..1")
    if draft_length < 0:
        raise ValueError(
            f"draft_length is {draft_length}; it counts drafted tokens, so it is 0 or more"
        )
    return float(sum(alpha**k for k in range(draft_length + 1)))


def expected_speedup(
    alpha: float, draft_length: int, beta: float, verify_ratio: float = 1.0
) -> float:
    """Return the speedup over plain decoding on the same engine: expected_round_tokens / (γβ + v).

    Source: Leviathan et al. 2023, theorem 3.8, with a verify pass that costs v instead of 1.
    """
    return expected_round_tokens(alpha, draft_length) / (draft_length * beta + verify_ratio)


def acceptance_rate(accepted: int, rejecting_rounds: int) -> float | None:
    """Return α: accepted / (accepted + rounds that ended in a rejection); None if nothing was
    drafted.
    """
    decided = accepted + rejecting_rounds
    return accepted / decided if decided else None


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """The mean cost of a drafter's rounds, in units of a plain pass.

    beta: cost of a draft step.
    verify_ratio: cost of a verify pass.
    rows_per_round: proposed tokens of a round, siblings included.
    net_gain: tokens that a round yields minus what it costs.
    """

    beta: float
    verify_ratio: float
    rows_per_round: float
    net_gain: float

    @classmethod
    def from_counts(
        cls,
        n_rounds: int,
        n_drafted: int,
        n_accepted: int,
        beta: float,
        verify_ratio: float,
        n_siblings: int = 0,
    ) -> DrafterCost | None:
        """Return the cost that follows from a drafter's counters; None if it ran no round."""
        if not n_rounds:
            return None
        return cls(
            beta,
            verify_ratio,
            (n_drafted + n_siblings) / n_rounds,
            n_accepted / n_rounds + 1 - (beta * n_drafted / n_rounds + verify_ratio),
        )

    def of_round(self, n_drafted: int, n_siblings: int = 0) -> float:
        """Return the cost of a round.

        The extra cost of a verify pass over a plain one is proportional to its proposed tokens.
        """
        return (
            n_drafted * self.beta
            + 1
            + (self.verify_ratio - 1) * (n_drafted + n_siblings) / max(self.rows_per_round, 1.0)
        )


@dataclass(slots=True)
class DrafterStats:
    """What one drafter of a recipe did. Times are in seconds.

    rounds: rounds that it drafted.
    rejecting_rounds: rounds that ended in a rejection of its token.
    copied: accepted tokens that it copied from the prompt.
    siblings: tokens that were verified as alternatives of draft tokens; an accepted one counts in
        `accepted`.
    reached_at, accepted_at: for each position of a draft, rounds whose tokens before it were all
        accepted, and rounds in which it was accepted too.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejecting_rounds: int = 0
    copied: int = 0
    siblings: int = 0
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)
    reached_at: list[int] = field(default_factory=list, compare=False)
    accepted_at: list[int] = field(default_factory=list, compare=False)

    def add_round(
        self,
        n_drafted: int,
        n_accepted: int,
        rejected: bool,
        n_copied: int = 0,
        n_siblings: int = 0,
    ) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += n_drafted
        self.accepted += n_accepted
        self.rejecting_rounds += rejected
        self.copied += n_copied
        self.siblings += n_siblings
        self.reached_at = _add(self.reached_at, [1] * min(n_drafted, n_accepted + 1))
        self.accepted_at = _add(self.accepted_at, [1] * n_accepted)

    @property
    def alpha(self) -> float | None:
        """The acceptance rate, as in `acceptance_rate`."""
        return acceptance_rate(self.accepted, self.rejecting_rounds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """The acceptance rate at each position of a draft.

        Only rounds whose tokens before that position were all accepted count.
        """
        return [a / n for a, n in zip_longest(self.accepted_at, self.reached_at, fillvalue=0)]

    def __add__(self, other: DrafterStats) -> DrafterStats:
        return DrafterStats(
            *(_add(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        )


def _add(a: Any, b: Any) -> Any:
    """Return the sum of two numbers, or of two lists position by position."""
    if isinstance(a, list):
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
    return a + b


@dataclass(slots=True)
class DecodeStats:
    """What one generation did, or the sum of several. Times are in seconds.

    tokens: emitted tokens, the first one (of the prefill) included.
    round_tokens: tokens emitted by rounds. A round of plain decoding is one full pass over one
        token, with nothing drafted.
    by_drafter: counters of each drafter, in the order of the recipe.
    decode_seconds: time of all rounds, and watching_seconds of the prefill. The rest of the prefill
        is not included.
    watching_seconds: the part of decode_seconds in which drafters read hidden states of full
        passes. The time of drafts is not included.
    choosing_seconds: the part of watching_seconds in which drafters read them to choose a mask.
    cached_tokens: prompt tokens whose K/V an earlier request had left in the prefix cache.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejecting_rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    watching_seconds: float = 0.0
    choosing_seconds: float = 0.0
    decode_seconds: float = 0.0
    by_drafter: list[DrafterStats] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def alpha(self) -> float | None:
        """The acceptance rate, as in `acceptance_rate`."""
        return acceptance_rate(self.accepted, self.rejecting_rounds)

    @property
    def accepted_fraction(self) -> float | None:
        """accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tau(self) -> float | None:
        """Mean tokens of a round; None before the first one."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def mask_selection_share(self) -> float:
        """Fraction of the decode time in which masks were chosen."""
        return self.choosing_seconds / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """Decode seconds per token, without the prefill and the token that it yields."""
        return self.decode_seconds / self.round_tokens if self.round_tokens else None

    def cost_ratios(self, plain_pass_s: float) -> tuple[float | None, float | None]:
        """Return (β, v): time of a drafted token and of a verify pass over that of a plain pass.

        Both are None if nothing was drafted. plain_pass_s: seconds of a plain pass.
        """
        if not self.drafted:
            return None, None
        return (
            self.draft_seconds / self.drafted / plain_pass_s,
            self.verify_seconds / self.rounds / plain_pass_s,
        )

    def add_observing_time(self, seconds: float, selects_mask: bool) -> None:
        """Add the seconds in which a session read hidden states.

        selects_mask: it read them to choose its mask.
        """
        self.watching_seconds += seconds
        if selects_mask:
            self.choosing_seconds += seconds

    def __add__(self, other: DecodeStats) -> DecodeStats:
        both = [
            a + b
            for a, b in zip_longest(self.by_drafter, other.by_drafter, fillvalue=DrafterStats())
        ]
        counts = (name for name in self.__dataclass_fields__ if name != "by_drafter")
        return DecodeStats(
            **{name: getattr(self, name) + getattr(other, name) for name in counts}, by_drafter=both
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counters and the figures that follow from them."""
        return asdict(self) | {
            "alpha": self.alpha,
            "accepted_fraction": self.accepted_fraction,
            "tau": self.tau,
            "seconds_per_token": self.seconds_per_token,
        }


class TrialState(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class Trial:
    """One judged mask.

    seconds_per_token: time of a token under the recipe. stderr: its standard error over prompts.
    recipe: the best recipe with this mask among those that the search tried.
    fidelity: "replay" (predicted from replay) or "wall" (measured by decoding).
    baseline_seconds_per_token: time of a token of plain decoding, interleaved with this trial. The
        ratio of the two times is free of the noise of the machine.
    searcher: the searcher that proposed the mask.
    search_seconds: time in which the mask was proposed and judged.
    """

    mask: SkipMask
    seconds_per_token: float
    stderr: float = 0.0
    fidelity: str = "wall"
    alpha: float | None = None
    tau: float | None = None
    beta: float | None = None
    state: TrialState = TrialState.COMPLETE
    baseline_seconds_per_token: float | None = None
    recipe: Recipe | None = None
    searcher: str = ""
    search_seconds: float | None = None

    @property
    def has_time(self) -> bool:
        """Whether it was judged and has a time."""
        return self.state is TrialState.COMPLETE and math.isfinite(self.seconds_per_token)

    @property
    def speedup(self) -> float | None:
        """Speedup over plain decoding; None if either time is missing."""
        if (
            not self.baseline_seconds_per_token
            or not self.seconds_per_token
            or not math.isfinite(self.seconds_per_token)
        ):
            return None
        return self.baseline_seconds_per_token / self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


# An interval is this much wider if decoding stopped because the interval was narrow: it is narrow
# more often where the prompts decoded so far differ less than others, so it would hold the truth
# less often than it says. Chosen by tests/benchmarks/sequential_rules.py.
EARLY_STOP_WIDENING = 1.1


def estimate_ratio(
    numerators: Sequence[float], denominators: Sequence[float], stopped_early: bool = False
) -> Estimate:
    """Return the ratio of totals with its 95 % interval over prompts.

    Prompt i has both numerator i and denominator i. The interval is symmetric on a logarithmic
    scale: the standard error is the jackknife's, which weighs long prompts as the totals do, and
    Student's t has the degrees of freedom of as many equal prompts as the totals are worth. A
    single prompt has no interval: its bounds are the ratio.
    stopped_early: these prompts were the last because their interval was narrow.

    Raises: ValueError if the two differ in length, are empty, or a number is not positive.
    Source: Efron & Tibshirani 1993, chapter 11; Kish 1965 for the degrees of freedom.
    """
    # Imported here, because reading a profile imports this file and must not need NumPy.
    import numpy as np

    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(
            f"paired samples must be two equally long lists, not {top.shape} and {bottom.shape}"
        )
    if not ((top > 0).all() and (bottom > 0).all()):
        raise ValueError("a paired ratio needs positive numerators and denominators")
    ratio = float(top.sum() / bottom.sum())
    if len(top) == 1:
        return Estimate(ratio, ratio, ratio)
    without_one = np.log((top.sum() - top) / (bottom.sum() - bottom))
    shares = (top / top.sum() + bottom / bottom.sum()) / 2
    reach = math.exp(
        (EARLY_STOP_WIDENING if stopped_early else 1.0)
        * float(jackknife_stderr(without_one) * student_quantile(0.975, shares))
    )
    return Estimate(ratio, ratio / reach, ratio * reach)


def jackknife_stderr(without_one: np.ndarray) -> np.ndarray:
    """Return the standard error of a statistic from its values without each one of the samples.

    without_one: [..., samples]. Returns [...].
    """
    n = without_one.shape[-1]
    return without_one.std(axis=-1) * (n - 1) ** 0.5


def student_quantile(probability: float, shares: np.ndarray) -> float:
    """Return the quantile of Student's t for a mean of samples with different weights.

    shares: [samples] the weights, whose sum is 1. The degrees of freedom, at least 1, are those of
    1 / sum(shares**2) samples of equal weight.
    """
    from scipy.special import stdtrit

    return float(stdtrit(max(1 / float((shares**2).sum()) - 1, 1.0), probability))
