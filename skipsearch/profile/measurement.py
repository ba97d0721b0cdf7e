"""The measurements of a profile, on hold-out prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skipsearch.core.schema_types import (
    Count,
    Fraction,
    FrozenModel,
    Interval,
    Name,
    Positive,
    broken_rule,
    is_falsy,
    is_none,
)
from skipsearch.core.stats import DrafterCost


class ContextTokens(FrozenModel):
    p50: Positive = Field(description="median tokens before the last one generated, over prompts")
    max: Positive = Field(description="most tokens before the last one generated")

    @model_validator(mode="after")
    def _check_order(self) -> ContextTokens:
        if self.p50 > self.max:
            raise broken_rule("p50", f"the median cannot be above the maximum of {self.max}")
        return self


NOT_COMPARED = "not compared: this task draws its tokens at random"


class Lossless(FrozenModel):
    """Greedy tokens with this profile compared with plain decoding of the same prompts."""

    prompts: Count = Field(description="prompts compared; 0 if none were")
    identical: Count = Field(description="prompts with identical tokens, 0..prompts")
    first_divergence_logit_gap: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        description="gap of the full model's two top logits at the first difference, in logits, "
        "0..1e6; null if nothing differs"
    )

    @model_validator(mode="after")
    def _check_counts(self) -> Lossless:
        if self.identical > self.prompts:
            raise broken_rule(
                "identical", f"no more than the {self.prompts} prompts compared can be identical"
            )
        if (self.first_divergence_logit_gap is None) != (self.identical == self.prompts):
            raise broken_rule(
                "first_divergence_logit_gap",
                f"it is null exactly when all are identical, here {self.identical} of "
                f"{self.prompts}",
            )
        return self


class FinishReasons(FrozenModel):
    """Why the measured answers ended, by prompt."""

    end: Count = Field(description="answers that the model ended itself, or a stop string did")
    loop: Count = Field(description="answers that ended in a loop; the text before it was measured")
    cut: Count = Field(description="answers cut at the limit of tokens or at a repeated n-gram")

    @property
    def total(self) -> int:
        return self.end + self.loop + self.cut


class DrafterCounts(FrozenModel):
    """The counts of one drafter over all prompts."""

    kind: Name
    rounds: Count = Field(description="rounds that it drafted")
    drafted: Count = Field(description="tokens that it drafted")
    accepted: Count = Field(description="of these, tokens that were accepted")
    siblings: Count = Field(
        default=0,
        exclude_if=is_falsy,
        description="tokens verified beside the drafted ones; left out if none were",
    )
    beta: Annotated[float, Field(ge=0, le=1000)] | None = Field(
        default=None,
        exclude_if=is_none,
        description="its draft pass / one-token full pass, 0..1000; left out if it was not "
        "measured",
    )
    verify_ratio: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        default=None,
        exclude_if=is_none,
        description="its verify passes / one-token full pass, 0..1000; left out if it was not "
        "measured",
    )

    @property
    def drafter_cost(self) -> DrafterCost | None:
        """Cost and gain of the drafter's rounds; None if it drafted nothing or was not timed."""
        if self.beta is None or self.verify_ratio is None:
            return None
        return DrafterCost.from_counts(
            self.rounds, self.drafted, self.accepted, self.beta, self.verify_ratio, self.siblings
        )

    @model_validator(mode="after")
    def _check_counts(self) -> DrafterCounts:
        # A round drafts at least one token.
        if not self.rounds <= self.drafted or not self.accepted <= self.drafted:
            raise broken_rule(
                "drafted", "it is at least the rounds and at least the accepted tokens"
            )
        return self


class BatchSpeed(FrozenModel):
    """The speedup of requests in a batch, over plain decoding of a batch of the same size."""

    requests: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="decoded side by side, 1..1024"
    )
    speedup: Interval = Field(description="ratio of total times, plain over profile, > 0, no unit")


class StreamPart(FrozenModel):
    """The first part of a prompt stream, in which drafters still learned, or the second part."""

    prompts: Positive = Field(description="prompts of this part, from 1")
    speedup: Interval = Field(
        description="ratio of total times of this part, plain over profile, > 0, no unit"
    )
    choosing_share: Fraction = Field(
        description="share of this part's decode time that choosing masks took, 0..1"
    )


class StreamMeasurement(FrozenModel):
    """The measurement of drafters that learn from request to request.

    Prompts were decoded in the order of the task, on which the result depends.
    """

    learning: StreamPart | None = Field(description="while they learned; null if no prompt was")
    settled: StreamPart | None = Field(
        description="once they had stopped learning; null if no prompt was"
    )


class Measurement(FrozenModel):
    """A wall-clock measurement on hold-out prompts.

    Decoding with the profile and plain decoding by the same engine were interleaved.
    """

    baseline_ms_per_token: Interval = Field(
        description="plain decoding, milliseconds per token, > 0"
    )
    ms_per_token: Interval = Field(
        description="with this profile, milliseconds per verified token, > 0"
    )
    speedup: Interval = Field(description="ratio of total times, plain over profile, > 0, no unit")
    request_speedup: Interval | None = Field(
        default=None,
        exclude_if=is_none,
        description="the same ratio of whole requests, prefill included; left out in older "
        "profiles",
    )
    alpha: Fraction | None = Field(
        description="probability that a drafted token is accepted, given those before it were, 0..1"
    )
    accepted_fraction: Fraction | None = Field(description="accepted / drafted, 0..1")
    tau: float = Field(ge=1, le=1025, description="mean tokens of a round, bonus included, 1..1025")
    beta: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        description="draft pass / one-token full pass, a ratio of times, 0..1000"
    )
    verify_ratio: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        description="verify pass / one-token full pass, a ratio of times, 0..1000"
    )
    prompts: Positive = Field(description="prompts measured, from 1")
    stopped: Literal["narrow", "time_over", "prompts_ended"] | None = Field(
        default=None,
        exclude_if=is_none,
        description="why no more prompts were measured: the interval of the speedup was within 5 % "
        "of its centre, the budget was spent, or no prompt was left; left out in older profiles, "
        "which measured all",
    )
    tokens: Positive = Field(description="tokens generated by the profile over all prompts, from 1")
    context_tokens: ContextTokens
    ended_on_repeat: Count = Field(
        description="prompts whose generation stopped at its first repeated 6-gram, 0..prompts"
    )
    finish_reasons: FinishReasons | None = Field(
        default=None,
        exclude_if=is_none,
        description="why answers ended, by prompt; left out in older profiles, whose answers ended "
        "at their first repeated 6-gram",
    )
    split: Literal["holdout"]
    lossless: Lossless
    by_drafter: Annotated[tuple[DrafterCounts, ...], Field(strict=False)] = Field(
        default=(),
        exclude_if=is_falsy,
        description="of each drafter, in the order of the recipe; left out if it was not counted",
    )
    copied_from_prompt: Fraction | None = Field(
        default=None,
        exclude_if=is_none,
        description="share of the generated tokens that lookup copied from the prompt, 0..1; left "
        "out where it was not counted",
    )
    draft_bytes: Count = Field(
        default=0,
        exclude_if=is_falsy,
        description="memory of drafts besides the model's, in bytes: a copy of weights, rows of "
        "the head, trained modules; left out if they need none, or if it was not measured",
    )
    by_batch: Annotated[tuple[BatchSpeed, ...], Field(strict=False, max_length=32)] = Field(
        default=(),
        exclude_if=is_falsy,
        description="speedup of requests side by side, by how many there are, ascending; left out "
        "where "
        "it was not measured",
    )

    choosing_share: Fraction | None = Field(
        default=None,
        exclude_if=is_none,
        description="share of the decode time that choosing masks took, 0..1; left out if "
        "no drafter chooses masks",
    )
    stream: StreamMeasurement | None = Field(
        default=None, exclude_if=is_none, description="its parts; left out if no drafter learns"
    )

    @property
    def measures_beginnings(self) -> bool:
        """Whether answers ended at their first repeated 6-gram, so that speedups are too high."""
        return self.finish_reasons is None and self.ended_on_repeat > 0

    @property
    def plain_from_batch(self) -> int | None:
        """The smallest measured batch size from which on drafting does not pay.

        None if drafting pays at the largest measured size, or no batch was measured.
        """
        losing = None
        for row in reversed(self.by_batch):
            if row.speedup.mean > 1:
                break
            losing = row.requests
        return losing

    @model_validator(mode="after")
    def _check_parts(self) -> Measurement:
        parts = (
            [part for part in (self.stream.learning, self.stream.settled) if part]
            if self.stream
            else []
        )
        if self.stream and sum(part.prompts for part in parts) != self.prompts:
            raise broken_rule(
                "stream", f"its parts have the {self.prompts} prompts that were measured"
            )
        return self

    @model_validator(mode="after")
    def _check_counts(self) -> Measurement:
        if self.ended_on_repeat > self.prompts:
            raise broken_rule(
                "ended_on_repeat", f"no more than the {self.prompts} prompts measured can end so"
            )
        if self.finish_reasons is not None and self.finish_reasons.total != self.prompts:
            raise broken_rule(
                "finish_reasons", f"its counts have the {self.prompts} prompts that were measured"
            )
        sizes = [row.requests for row in self.by_batch]
        if sizes != sorted(set(sizes)):
            raise broken_rule("by_batch", "its sizes ascend, each of them once")
        return self
