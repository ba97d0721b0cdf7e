"""The cost model: what the parts of a pass cost on a machine, and from that what a round costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from skipsearch.core.mask import SkipMask


@dataclass(frozen=True)
class Costs:
    """The latency table at one context length: seconds of the parts of a pass.

    sublayers: seconds of each sub-layer for one token, in the flat order of `SkipMask` (attention
        0, MLP 0, …).
    overhead: seconds that every pass takes besides its sub-layers (embedding, head, the loop
        itself).
    verify: verify[n] is a full pass over n + 1 tokens, with all weights just used.
    first: relative extra time of a round's first draft step over its later ones.
    cold: relative extra time of a verify pass after drafts that skip everything. Both `first` and
        `cold` are cache misses: other weights were read in between.
    call: extra seconds of a draft besides its steps, if the engine runs all of them in one call. A
        draft step that skips nothing is then shorter than a plain pass by that much; otherwise the
        two cost the same.
    curve: exponent. A draft step that keeps a fraction f of the sub-layers' time takes f ** curve
        of it. It is 1 if weights are read from memory, and above 1 if the kept weights fit into a
        faster cache level than all of them.
    """

    sublayers: tuple[float, ...]
    overhead: float
    verify: tuple[float, ...]
    first: float = 0.0
    cold: float = 0.0
    call: float = 0.0
    curve: float = 1.0

    @property
    def plain_step_seconds(self) -> float:
        """Seconds of a draft step of the whole model as it is stored."""
        return self.overhead + sum(self.sublayers)

    def draft_step_seconds(self, mask: SkipMask) -> float:
        """Return the seconds of one draft step under `mask`, the first of a round excepted."""
        return self.step_seconds(
            sum(s for s, skipped in zip(self.sublayers, mask.bits, strict=True) if not skipped)
        )

    def step_seconds(self, kept_seconds: float) -> float:
        """Return the seconds of one draft step.

        kept_seconds: sum of `sublayers` over the sub-layers that it runs.
        """
        if self.curve != 1.0 and kept_seconds:
            total = sum(self.sublayers)
            kept_seconds = total * (kept_seconds / total) ** self.curve
        return self.overhead + kept_seconds

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        """Return the seconds of drafting `n_tokens` under `mask`, in one step each."""
        return self.call + n_tokens * self.draft_step_seconds(mask)

    def skipped_share(self, mask: SkipMask) -> float:
        """Return the fraction of a plain pass's time that a draft pass under `mask` saves."""
        total = self.plain_step_seconds
        return 1 - self.draft_step_seconds(mask) / total if total else 0.0

    def round_seconds(self, mask: SkipMask | None, max_draft: int) -> tuple[float, ...]:
        """Return the time of a round for each number of draft tokens from 0 (plain decoding) to
        `max_draft`.

        mask: the skip mask of the draft steps; None if drafting runs no model pass, as lookup does.
        """
        return self.tree_round_seconds(mask, max_draft, 0)[0]

    def tree_round_seconds(
        self, mask: SkipMask | None, max_draft: int, max_siblings: int
    ) -> tuple[tuple[float, ...], ...]:
        """Return the time of a round as in `round_seconds`, for each number of verified siblings
        from 0 to `max_siblings`.

        The result is [max_siblings + 1][max_draft + 1].
        """
        if mask is None:
            return tuple(
                tuple(self.verify_seconds(n + s) for n in range(max_draft + 1))
                for s in range(max_siblings + 1)
            )
        draft, colder = self.draft_step_seconds(mask), 1 + self.cold * self.skipped_share(mask)
        drafted = [self.draft_seconds(mask, n) + self.first * draft for n in range(max_draft + 1)]
        return tuple(
            (
                self.verify[0],
                *(
                    drafted[n] + colder * self.verify_after_draft_seconds(n, s)
                    for n in range(1, max_draft + 1)
                ),
            )
            for s in range(max_siblings + 1)
        )

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        """Return the seconds of a verify pass after draft passes of the model."""
        return self.verify_seconds(n_drafted + n_siblings)

    def verify_seconds(self, n_proposed: int) -> float:
        """Return the seconds of a verify pass over the pending token and `n_proposed` proposed
        tokens.

        Beyond the largest measured number, each token adds the average time of a token.
        """
        last = len(self.verify) - 1
        if n_proposed <= last:
            return self.verify[n_proposed]
        per_token = (self.verify[last] - self.verify[1]) / (last - 1) if last > 1 else 0.0
        return self.verify[last] + (n_proposed - last) * max(per_token, 0.0)


@dataclass(frozen=True)
class OnePassDraftCosts(Costs):
    """Costs of a parallel draft, in which a single pass predicts all draft tokens (S3D).

    The time of that pass grows with the number of draft tokens as the time of a verify pass does.
    nodes_by_depth: for a tree, the cumulative number of nodes down to each depth; () for a chain.
    """

    nodes_by_depth: tuple[int, ...] = ()

    @classmethod
    def from_costs(cls, costs: Costs, nodes_by_depth: tuple[int, ...] = ()) -> OnePassDraftCosts:
        """Return these costs for a parallel draft."""
        return cls(**_base_fields(costs), nodes_by_depth=nodes_by_depth)

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        return (
            self.call
            + self.draft_step_seconds(mask)
            * self.verify_seconds(max(n_tokens, 1) - 1)
            / self.verify[0]
        )

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        return self.verify_seconds(
            (
                self.nodes_by_depth[min(n_drafted, len(self.nodes_by_depth)) - 1]
                if self.nodes_by_depth
                else n_drafted
            )
            + n_siblings
        )


@dataclass(frozen=True)
class ReadingCosts(Costs):
    """Costs of drafts that read other weights than a plain pass, or fewer rows of the head.

    `sublayers` and `overhead` are those of a draft step, `verify` those of a full pass.
    plain_pass: seconds of a draft step of the model as it is stored, with nothing skipped.
    shares_weights: whether drafts read the weights that a verify pass reads.
    """

    plain_pass: float = 0.0
    shares_weights: bool = True

    @property
    def plain_step_seconds(self) -> float:
        return self.plain_pass

    def skipped_share(self, mask: SkipMask) -> float:
        # Of a copy, nothing that verification reads was just read.
        return super().skipped_share(mask) if self.shares_weights else 1.0


@dataclass(frozen=True)
class ResumedVerifyCosts(Costs):
    """Costs of an early-exit draft, whose verify pass resumes at the layer where the draft left the
    model.

    Each draft step is a call of its own.
    share_below_exit: share of a plain pass's time that the layers before that layer take. The
        verify pass runs these layers for the last draft token and the siblings only. The draft
        steps have run them for the pending token and the other draft tokens.
    """

    share_below_exit: float = 0.0

    @classmethod
    def from_costs(cls, costs: Costs, exit_layer: int) -> ResumedVerifyCosts:
        """Return these costs for an early-exit draft.

        exit_layer: the layer before which the draft leaves the model.
        """
        return cls(
            **_base_fields(costs),
            share_below_exit=sum(costs.sublayers[: 2 * exit_layer]) / costs.plain_step_seconds,
        )

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        return n_tokens * (self.call + self.draft_step_seconds(mask))

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        return (1 - self.share_below_exit) * self.verify_seconds(
            n_drafted + n_siblings
        ) + self.share_below_exit * self.verify_seconds(n_siblings)


@dataclass(frozen=True)
class TimedDraftCosts(Costs):
    """Costs of drafts whose steps were timed while they decoded.

    first_step_s: seconds of a draft of one token, without its verify pass. step_s: of each further
    token. verify_costs: prices the verify pass after a draft.
    """

    first_step_s: float = 0.0
    step_s: float = 0.0
    verify_costs: Costs | None = None

    @classmethod
    def from_costs(cls, costs: Costs, first_step_s: float, step_s: float) -> TimedDraftCosts:
        """Return these costs with timed draft steps, which include all misses of caches."""
        untimed = {"first": 0.0, "cold": 0.0, "call": 0.0}
        return cls(
            **_base_fields(costs) | untimed,
            first_step_s=first_step_s,
            step_s=step_s,
            verify_costs=costs,
        )

    def draft_step_seconds(self, mask: SkipMask) -> float:
        return self.step_s

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        return self.first_step_s + (n_tokens - 1) * self.step_s

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        assert self.verify_costs is not None
        return self.verify_costs.verify_after_draft_seconds(n_drafted, n_siblings)


def _base_fields(costs: Costs) -> dict[str, Any]:
    return {field.name: getattr(costs, field.name) for field in fields(Costs)}
