"""`Costs`: what the pieces of a pass cost on a machine, and from that what any round costs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from skipsearch.mask import SkipMask


@dataclass(frozen=True)
class Costs:
    """The latency table at one context length: seconds of the pieces of a pass.

    sublayers: of each sub-layer at one token, in the flat order of `SkipMask` (attention 0, MLP 0, …).
    overhead: what every pass pays (embedding, head, the loop itself). verify[n]: a full pass over n + 1 tokens, all weights just used.
    first: by what share the first draft step of a round takes longer than those behind it; cold: by what share a verify pass does behind
    drafts that skip everything. In both cases weights have left the caches meanwhile.
    """

    sublayers: tuple[float, ...]
    overhead: float
    verify: tuple[float, ...]
    first: float = 0.0
    cold: float = 0.0

    def draft(self, mask: SkipMask) -> float:
        """Seconds of one draft pass under `mask`, behind another."""
        return self.overhead + sum(s for s, skipped in zip(self.sublayers, mask.bits, strict=True) if not skipped)

    def drafting(self, mask: SkipMask, tokens: int) -> float:
        """Seconds of drafting so many tokens under `mask`, one pass each."""
        return tokens * self.draft(mask)

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
        return tuple((self.verify[0], *(self.drafting(mask, n) + self.first * draft + colder * self.verifying(n + s)
                                         for n in range(1, longest + 1)))
                     for s in range(siblings + 1))

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
    """The same machine, for drafts of which one pass has all tokens as its rows: it grows with them as a verify pass does."""

    @classmethod
    def of(cls, costs: Costs) -> InOnePass:
        return cls(**{field.name: getattr(costs, field.name) for field in fields(Costs)})

    def drafting(self, mask: SkipMask, tokens: int) -> float:
        return self.draft(mask) * self.verifying(max(tokens, 1) - 1) / self.verify[0]
