"""`Costs`: what the pieces of a pass cost on a machine, and from that what any round costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from skipsearch.core.mask import SkipMask


@dataclass(frozen=True)
class Costs:
    """The latency table at one context length: seconds of the pieces of a pass.

    sublayers: of each sub-layer at one token, in the flat order of `SkipMask` (attention 0, MLP 0,
    …). overhead: what every pass pays (embedding, head, the loop itself). verify[n]: a full pass
    over n + 1 tokens, all weights just used. first: by what share the first draft step of a round
    takes longer than those behind it; cold: by what share a verify pass does behind drafts that
    skip everything. In both cases weights have left the caches meanwhile. call: seconds that a
    draft takes beyond its steps, where the engine runs them all in one call. A draft step under a
    mask that skips nothing is then that much shorter than a plain pass; elsewhere the two cost the
    same. curve: what is left of a pass costs its share of the sub-layers' time to this power. It is
    1 where the weights come from memory, and more where few of them fit into a faster cache than
    all of them do."""

    sublayers: tuple[float, ...]
    overhead: float
    verify: tuple[float, ...]
    first: float = 0.0
    cold: float = 0.0
    call: float = 0.0
    curve: float = 1.0

    def draft_step_seconds(self, mask: SkipMask) -> float:
        """Seconds of one draft step under `mask`, behind another."""
        return self.step_seconds(
            sum(s for s, skipped in zip(self.sublayers, mask.bits, strict=True) if not skipped)
        )

    def step_seconds(self, kept_seconds: float) -> float:
        """Seconds of one draft step whose sub-layers take so many of the seconds in `sublayers`."""
        if self.curve != 1.0 and kept_seconds:
            every = sum(self.sublayers)
            kept_seconds = every * (kept_seconds / every) ** self.curve
        return self.overhead + kept_seconds

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        """Seconds of drafting so many tokens under `mask`, one step each."""
        return self.call + n_tokens * self.draft_step_seconds(mask)

    def skipped_share(self, mask: SkipMask) -> float:
        """The share of a plain pass's time that a draft pass under `mask` leaves out."""
        every = self.overhead + sum(self.sublayers)
        return 1 - self.draft_step_seconds(mask) / every if every else 0.0

    def round_seconds(self, mask: SkipMask | None, max_draft: int) -> tuple[float, ...]:
        """Seconds of a round by how many tokens it drafts under `mask`, 0 (plain decoding) to
        `max_draft`. None: its tokens come without a pass of the model, as looked-up ones do.

        """
        return self.tree_round_seconds(mask, max_draft, 0)[0]

    def tree_round_seconds(
        self, mask: SkipMask | None, max_draft: int, max_siblings: int
    ) -> tuple[tuple[float, ...], ...]:
        """The same by how many siblings are verified beside the drafted tokens, 0 to
        `max_siblings`: [siblings + 1][longest + 1].
        """
        if mask is None:
            return tuple(
                tuple(self.verify_seconds(n + s) for n in range(max_draft + 1))
                for s in range(max_siblings + 1)
            )
        draft, colder = self.draft_step_seconds(mask), 1 + self.cold * self.skipped_share(mask)
        return tuple(
            (
                self.verify[0],
                *(
                    self.draft_seconds(mask, n)
                    + self.first * draft
                    + colder * self.verify_after_draft_seconds(n, s)
                    for n in range(1, max_draft + 1)
                ),
            )
            for s in range(max_siblings + 1)
        )

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        """Seconds of a verify pass behind draft passes of the model."""
        return self.verify_seconds(n_drafted + n_siblings)

    def verify_seconds(self, n_proposed: int) -> float:
        """Seconds of a verify pass over so many proposed tokens. Beyond the longest that was
        measured, each costs what one costs on average."""
        last = len(self.verify) - 1
        if n_proposed <= last:
            return self.verify[n_proposed]
        a_row = (self.verify[last] - self.verify[1]) / (last - 1) if last > 1 else 0.0
        return self.verify[last] + (n_proposed - last) * max(a_row, 0.0)


@dataclass(frozen=True)
class OnePassDraftCosts(Costs):
    """The same machine, for drafts of which one pass has all tokens as its rows: it grows with them
    as a verify pass does.

    nodes_by_depth: of a draft that is a tree, how many tokens it proposes down to each depth; ()
    for a chain."""

    nodes_by_depth: tuple[int, ...] = ()

    @classmethod
    def from_costs(cls, costs: Costs, nodes_by_depth: tuple[int, ...] = ()) -> OnePassDraftCosts:
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
class ResumedVerifyCosts(Costs):
    """The same machine, for drafts whose verify pass goes on where they left the model, and whose
    steps are a call each. share_below_exit: the share of a pass that lies before that layer; there
    it runs the last drafted token and the siblings alone."""

    share_below_exit: float = 0.0

    @classmethod
    def from_costs(cls, costs: Costs, exit_layer: int) -> ResumedVerifyCosts:
        """exit_layer: where the drafts leave the model."""
        return cls(
            **_base_fields(costs),
            share_below_exit=sum(costs.sublayers[: 2 * exit_layer])
            / (costs.overhead + sum(costs.sublayers)),
        )

    def draft_seconds(self, mask: SkipMask, n_tokens: int) -> float:
        return n_tokens * (self.call + self.draft_step_seconds(mask))

    def verify_after_draft_seconds(self, n_drafted: int, n_siblings: int) -> float:
        return (1 - self.share_below_exit) * self.verify_seconds(
            n_drafted + n_siblings
        ) + self.share_below_exit * self.verify_seconds(n_siblings)


def _base_fields(costs: Costs) -> dict[str, Any]:
    return {field.name: getattr(costs, field.name) for field in fields(Costs)}
