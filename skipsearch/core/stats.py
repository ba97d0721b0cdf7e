"""The field's numbers: closed forms for a round, what a decoder counted, one trial of a search, and
intervals.

α  probability that a drafted token is accepted, given that those before it were γ  draft length:
drafted tokens of a round τ  mean tokens a round yields, the bonus or corrected token included (1.00
is autoregressive decoding) β  time of one draft pass / time of a one-token full pass v  time of a
verify pass / time of a one-token full pass"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe


def expected_round_tokens(alpha: float, draft_length: int) -> float:
    """Mean tokens of a round, bonus included, when drafts are accepted independently.

    (1 - alpha**(draft_length + 1)) / (1 - alpha); draft_length + 1 at alpha = 1.
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
    """Speedup over autoregressive decoding by the same engine: expected_round_tokens / (γβ + v).

    Source: Leviathan et al. 2023, theorem 3.8, with the verify pass priced at v instead of 1.
    """
    return expected_round_tokens(alpha, draft_length) / (draft_length * beta + verify_ratio)


def best_draft_length(
    alpha: float, beta: float, verify_ratios: Sequence[float]
) -> tuple[int, float]:
    """(γ, speedup) of the best draft length, 0 (do not draft, speedup 1) included.

    verify_ratios[γ] is v of a verify pass over γ + 1 rows; its first element is 1 by definition.
    """
    options = [
        (1.0 if g == 0 else expected_speedup(alpha, g, beta, v), -g)
        for g, v in enumerate(verify_ratios)
    ]
    speedup, negative = max(options)
    return -negative, speedup


def break_even_alpha(beta: float, verify_ratio: float = 1.0) -> float:
    """The α above which drafting one token pays: β + v − 1."""
    return beta + verify_ratio - 1


def acceptance_rate(accepted: int, rejecting_rounds: int) -> float | None:
    """α: accepted / (accepted + rounds that ended in a rejection); None if nothing was drafted."""
    judged = accepted + rejecting_rounds
    return accepted / judged if judged else None


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """What is known of a drafter's rounds, in units of a plain pass. beta: of a draft pass;
    verify_ratio: of its verify passes, on average; rows_per_round: proposed tokens of a round,
    siblings included, on average; net_gain: tokens that an average round yields less what it
    costs."""

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
        """From what a drafter did; None if it did nothing."""
        if not n_rounds:
            return None
        return cls(
            beta,
            verify_ratio,
            (n_drafted + n_siblings) / n_rounds,
            n_accepted / n_rounds + 1 - (beta * n_drafted / n_rounds + verify_ratio),
        )

    def of_round(self, n_drafted: int, n_siblings: int = 0) -> float:
        """Of a round. A verify pass costs more than a plain one in proportion to its rows."""
        return (
            n_drafted * self.beta
            + 1
            + (self.verify_ratio - 1) * (n_drafted + n_siblings) / max(self.rows_per_round, 1.0)
        )


@dataclass(slots=True)
class DrafterStats:
    """What one drafter of a recipe did. rounds: those that it drafted. rejecting_rounds: those that
    ended in a rejection of its token.

    copied: accepted tokens that it copied from the prompt. siblings: tokens that were verified
    beside the drafted ones; one that stands counts as accepted. Times in seconds."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejecting_rounds: int = 0
    copied: int = 0
    siblings: int = 0
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)

    def add_round(
        self,
        n_drafted: int,
        n_accepted: int,
        rejected: bool,
        n_copied: int = 0,
        n_siblings: int = 0,
    ) -> None:
        """One more round."""
        self.rounds += 1
        self.drafted += n_drafted
        self.accepted += n_accepted
        self.rejecting_rounds += rejected
        self.copied += n_copied
        self.siblings += n_siblings

    @property
    def alpha(self) -> float | None:
        """As `acceptance` has it."""
        return acceptance_rate(self.accepted, self.rejecting_rounds)

    def __add__(self, other: DrafterStats) -> DrafterStats:
        return DrafterStats(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )


@dataclass(slots=True)
class DecodeStats:
    """What one generation (or, added up, many) did. Times in seconds; the prefill's is kept apart.

    tokens: emitted, the prefill's own first one included. round_tokens: emitted by rounds. A round
    of plain decoding is one full pass over one token with nothing drafted. by_drafter: of each
    drafter of the recipe, in its order. watching_seconds: of drafters that read hidden states of
    the full model's passes, what that took beside their drafts, also while the prompt was read. It
    is part of decode_seconds. choosing_seconds: of those among them that choose their masks so.
    cached_tokens: of the prompt, those whose K/V an earlier request of the session had left."""

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
        """As `acceptance` has it."""
        return acceptance_rate(self.accepted, self.rejecting_rounds)

    @property
    def accepted_fraction(self) -> float | None:
        """accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tau(self) -> float | None:
        """Mean tokens of a round; None before the first."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def mask_selection_share(self) -> float:
        """Share of the decode time that choosing masks took."""
        return self.choosing_seconds / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """Decode seconds per verified token, the prefill and the token it yields left out."""
        return self.decode_seconds / self.round_tokens if self.round_tokens else None

    def add_observing_time(self, seconds: float, selects_mask: bool) -> None:
        """A session read hidden states. selects_mask: to choose its mask."""
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
    """One judged mask. seconds_per_token is per verified token; stderr is its standard error over
    prompts.

    recipe: what the mask was judged in, the best of those that the search tried with it. fidelity:
    "replay" (predicted from replayed positions) or "wall" (real draft-and-verify decoding).
    baseline_seconds_per_token: plain decoding, measured interleaved with this trial; their ratio is
    what machine noise leaves alone. searcher: who proposed the mask. search_seconds: what proposing
    and judging it took."""

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


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Ratio of totals with a paired percentile bootstrap over prompts: prompt i carries both its
    numerator and denominator.

    Raises: ValueError if the two differ in length, are empty, or a denominator is not positive.
    Source: Efron & Tibshirani 1993, chapter 13.
    """
    # here, since whatever reads a profile imports this file, and needs no more than PyYAML and
    # pydantic
    import numpy as np

    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(
            f"paired samples must be two equally long lists, not {top.shape} and {bottom.shape}"
        )
    if not (bottom > 0).all():
        raise ValueError("a paired ratio needs positive denominators")
    picks = np.random.default_rng(seed).integers(len(top), size=(resamples, len(top)))
    ratios = top[picks].sum(axis=1) / bottom[picks].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high))
