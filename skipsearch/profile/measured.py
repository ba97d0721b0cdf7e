"""What was measured with a profile: times, acceptance, and what each drafter did, on prompts that no search step saw."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skipsearch.fields import Count, Fraction, Interval, Name, Part, Positive, broken_rule, is_none, left_out
from skipsearch.stats import Price


class ContextTokens(Part):
    p50: Positive = Field(description="median tokens before the last one generated, over prompts")
    max: Positive = Field(description="most tokens before the last one generated")

    @model_validator(mode="after")
    def _ordered(self) -> ContextTokens:
        if self.p50 > self.max:
            raise broken_rule("p50", f"the median cannot be above the maximum of {self.max}")
        return self


class Lossless(Part):
    """Greedy tokens with this profile against plain decoding of the same prompts."""

    prompts: Count = Field(description="prompts compared; 0 if none were")
    identical: Count = Field(description="prompts with identical tokens, 0..prompts")
    first_divergence_logit_gap: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        description="gap of the full model's two top logits at the first difference, in logits, 0..1e6; null if nothing differs")

    @model_validator(mode="after")
    def _counted(self) -> Lossless:
        if self.identical > self.prompts:
            raise broken_rule("identical", f"no more than the {self.prompts} prompts compared can be identical")
        if (self.first_divergence_logit_gap is None) != (self.identical == self.prompts):
            raise broken_rule("first_divergence_logit_gap",
                              f"it is null exactly when all are identical, here {self.identical} of {self.prompts}")
        return self


class DrafterCounts(Part):
    """What one drafter did over all prompts."""

    kind: Name
    rounds: Count = Field(description="rounds that it drafted")
    drafted: Count = Field(description="tokens that it drafted")
    accepted: Count = Field(description="of these, tokens that were accepted")
    siblings: Count = Field(default=0, exclude_if=left_out, description="tokens verified beside the drafted ones; left out where none were")
    beta: Annotated[float, Field(ge=0, le=1000)] | None = Field(
        default=None, exclude_if=is_none, description="its draft pass / one-token full pass, 0..1000; left out where it was not measured")
    verify_ratio: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        default=None, exclude_if=is_none,
        description="its verify passes / one-token full pass, 0..1000; left out where it was not measured")

    @property
    def price(self) -> Price | None:
        """What its rounds cost and brought; None if it drafted none, or its passes were not measured."""
        if self.beta is None or self.verify_ratio is None:
            return None
        return Price.counted(self.rounds, self.drafted, self.accepted, self.beta, self.verify_ratio, self.siblings)

    @model_validator(mode="after")
    def _counted(self) -> DrafterCounts:
        if not self.rounds <= self.drafted or not self.accepted <= self.drafted:   # one token stands at each depth of a draft
            raise broken_rule("drafted", "it is at least the rounds and at least the accepted tokens")
        return self


class BatchSpeed(Part):
    """Requests side by side, with the profile against plain decoding of as many."""

    requests: Annotated[int, Field(ge=1, le=1024)] = Field(description="decoded side by side, 1..1024")
    speedup: Interval = Field(description="ratio of total times, plain over profile, > 0, no unit")


class StreamPart(Part):
    """The prompts of a stream that were decoded while drafters still learned, or those behind them."""

    prompts: Positive = Field(description="prompts of this part, from 1")
    speedup: Interval = Field(description="ratio of total times of this part, plain over profile, > 0, no unit")
    choosing_share: Fraction = Field(description="share of this part's decode time that choosing masks took, 0..1")


class Stream(Part):
    """Of drafters that learn from one request for the next. Prompts were decoded in the task's order, which is part of the result."""

    learning: StreamPart | None = Field(description="while they learned; null if no prompt was")
    settled: StreamPart | None = Field(description="once they had stopped learning; null if no prompt was")


class Measured(Part):
    """Wall-clock measurement on prompts that no search step saw, interleaved with plain decoding by the same engine."""

    baseline_ms_per_token: Interval = Field(description="plain decoding, milliseconds per token, > 0")
    ms_per_token: Interval = Field(description="with this profile, milliseconds per verified token, > 0")
    speedup: Interval = Field(description="ratio of total times, plain over profile, > 0, no unit")
    alpha: Fraction | None = Field(description="probability that a drafted token is accepted, given those before it were, 0..1")
    accepted_fraction: Fraction | None = Field(description="accepted / drafted, 0..1")
    tau: float = Field(ge=1, le=1025, description="mean tokens of a round, bonus included, 1..1025")
    beta: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        description="draft pass / one-token full pass, a ratio of times, 0..1000")
    verify_ratio: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        description="verify pass / one-token full pass, a ratio of times, 0..1000")
    prompts: Positive = Field(description="prompts measured, from 1")
    tokens: Positive = Field(description="tokens generated by the profile over all prompts, from 1")
    context_tokens: ContextTokens
    ended_on_repeat: Count = Field(description="prompts whose generation stopped at its first repeated 6-gram, 0..prompts")
    split: Literal["holdout"]
    lossless: Lossless
    by_drafter: Annotated[tuple[DrafterCounts, ...], Field(strict=False)] = Field(
        default=(), exclude_if=left_out, description="of each drafter, in the order of the recipe; left out where it was not counted")
    copied_from_prompt: Fraction | None = Field(
        default=None, exclude_if=is_none,
        description="share of the generated tokens that lookup copied from the prompt, 0..1; left out where it was not counted")
    by_batch: Annotated[tuple[BatchSpeed, ...], Field(strict=False, max_length=32)] = Field(
        default=(), exclude_if=left_out, description="speedup of requests side by side, by how many there are, ascending; left out where "
                                                     "it was not measured")

    choosing_share: Fraction | None = Field(
        default=None, exclude_if=is_none,
        description="share of the decode time that choosing masks took, 0..1; left out where drafters choose none")
    stream: Stream | None = Field(default=None, exclude_if=is_none, description="its parts; left out where no drafter learns")

    @property
    def plain_from(self) -> int | None:
        """Requests side by side from which on drafting does not pay; None where it pays at every size that was measured, or none was."""
        wins = [row.speedup.mean > 1 for row in self.by_batch]
        pays = len(wins) - wins[::-1].index(True) if True in wins else 0   # up to the last size at which it wins
        return self.by_batch[pays].requests if pays < len(wins) else None

    @model_validator(mode="after")
    def _parts_are_the_whole(self) -> Measured:
        parts = [part for part in (self.stream.learning, self.stream.settled) if part] if self.stream else []
        if self.stream and sum(part.prompts for part in parts) != self.prompts:
            raise broken_rule("stream", f"its parts have the {self.prompts} prompts that were measured")
        return self

    @model_validator(mode="after")
    def _counted(self) -> Measured:
        if self.ended_on_repeat > self.prompts:
            raise broken_rule("ended_on_repeat", f"no more than the {self.prompts} prompts measured can end so")
        sizes = [row.requests for row in self.by_batch]
        if sizes != sorted(set(sizes)):
            raise broken_rule("by_batch", "its sizes ascend, each of them once")
        return self
