"""`Costs`: what the pieces of a pass cost on a machine, and from that what any round costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from skipsearch.mask import SkipMask


@dataclass(frozen=True)
class Costs:
    """The latency table at one context length: seconds of the pieces of a pass.

    sublayers: of each sub-layer at one token, in the flat order of `SkipMask` (attention 0, MLP 0, …).
    overhead: what every pass pays (embedding, head, the loop itself). verify[n]: a full pass over n + 1 tokens, all weights just used.
    first: by what share the first draft step of a round takes longer than those behind it; cold: by what share a verify pass does behind
    drafts that skip everything. In both cases weights have left the caches meanwhile.
    call: seconds that a draft takes beyond its steps, where the engine runs them all in one call. A draft step under a mask that skips
    nothing is then that much shorter than a plain pass; elsewhere the two cost the same.
    curve: what is left of a pass costs its share of the sub-layers' time to this power. It is 1 where the weights come from memory, and
    more where few of them fit into a faster cache than all of them do.
    """

    sublayers: tuple[float, ...]
    overhead: float
    verify: tuple[float, ...]
    first: float = 0.0
    cold: float = 0.0
    call: float = 0.0
    curve: float = 1.0

    def draft(self, mask: SkipMask) -> float:
        """Seconds of one draft step under `mask`, behind another."""
        return self.step(sum(s for s, skipped in zip(self.sublayers, mask.bits, strict=True) if not skipped))

    def step(self, kept: float) -> float:
        """Seconds of one draft step whose sub-layers take so many of the seconds in `sublayers`."""
        if self.curve != 1.0 and kept:
            every = sum(self.sublayers)
            kept = every * (kept / every) ** self.curve
        return self.overhead + kept

    def drafting(self, mask: SkipMask, tokens: int) -> float:
        """Seconds of drafting so many tokens under `mask`, one step each."""
        return self.call + tokens * self.draft(mask)

    def spared(self, mask: SkipMask) -> float:
        """The share of a plain pass's time that a draft pass under `mask` leaves out."""
        every = self.overhead + sum(self.sublayers)
        return 1 - self.draft(mask) / every if every else 0.0

    def rounds(self, mask: SkipMask | None, longest: int) -> tuple[float, ...]:
        """Seconds of a round by how many tokens it drafts under `mask`, 0 (plain decoding) to `longest`. None: its tokens come without a
        pass of the model, as looked-up ones do.

        """
        return self.trees(mask, longest, 0)[0]

    def trees(self, mask: SkipMask | None, longest: int, siblings: int) -> tuple[tuple[float, ...], ...]:
        """The same by how many siblings are verified beside the drafted tokens, 0 to `siblings`: [siblings + 1][longest + 1]."""
        if mask is None:
            return tuple(tuple(self.verifying(n + s) for n in range(longest + 1)) for s in range(siblings + 1))
        draft, colder = self.draft(mask), 1 + self.cold * self.spared(mask)
        return tuple((self.verify[0], *(self.drafting(mask, n) + self.first * draft + colder * self.judging(n, s)
                                         for n in range(1, longest + 1)))
                     for s in range(siblings + 1))

    def judging(self, drafted: int, siblings: int) -> float:
        """Seconds of a verify pass behind draft passes of the model."""
        return self.verifying(drafted + siblings)

    def verifying(self, proposed: int) -> float:
        """Seconds of a verify pass over so many proposed tokens. Beyond the longest that was measured, each costs what one costs on
        average."""
        last = len(self.verify) - 1
        if proposed <= last:
            return self.verify[proposed]
        a_row = (self.verify[last] - self.verify[1]) / (last - 1) if last > 1 else 0.0
        return self.verify[last] + (proposed - last) * max(a_row, 0.0)


@dataclass(frozen=True)
class InOnePass(Costs):
    """The same machine, for drafts of which one pass has all tokens as its rows: it grows with them as a verify pass does.

    nodes: of a draft that is a tree, how many tokens it proposes down to each depth; () for a chain.
    """

    nodes: tuple[int, ...] = ()

    @classmethod
    def of(cls, costs: Costs, nodes: tuple[int, ...] = ()) -> InOnePass:
        return cls(**_pieces(costs), nodes=nodes)

    def drafting(self, mask: SkipMask, tokens: int) -> float:
        return self.call + self.draft(mask) * self.verifying(max(tokens, 1) - 1) / self.verify[0]

    def judging(self, drafted: int, siblings: int) -> float:
        return self.verifying((self.nodes[min(drafted, len(self.nodes)) - 1] if self.nodes else drafted) + siblings)


@dataclass(frozen=True)
class Resumed(Costs):
    """The same machine, for drafts whose verify pass goes on where they left the model, and whose steps are a call each. below: the share
    of a pass that lies before that layer; there it runs the last drafted token and the siblings alone."""

    below: float = 0.0

    @classmethod
    def of(cls, costs: Costs, layer: int) -> Resumed:
        """layer: where the drafts leave the model."""
        return cls(**_pieces(costs), below=sum(costs.sublayers[:2 * layer]) / (costs.overhead + sum(costs.sublayers)))

    def drafting(self, mask: SkipMask, tokens: int) -> float:
        return tokens * (self.call + self.draft(mask))

    def judging(self, drafted: int, siblings: int) -> float:
        return (1 - self.below) * self.verifying(drafted + siblings) + self.below * self.verifying(siblings)


def _pieces(costs: Costs) -> dict[str, Any]:
    return {field.name: getattr(costs, field.name) for field in fields(Costs)}
