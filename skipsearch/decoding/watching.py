"""Who watches a request: code that shows what was proposed in each round, and sessions that read the states of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import Between, Tap
from skipsearch.stats import DecodeStats


@dataclass(frozen=True)
class Proposal:
    """drafter: its place in the recipe. tokens: the chain that it drafted. siblings: (which token it follows, token) of each alternative to
    one of these, counted as `Draft.parents` does."""

    drafter: int
    tokens: list[int]
    siblings: tuple[tuple[int, int], ...] = ()

    def accepted(self, emitted: Sequence[int]) -> int:
        """How many proposed tokens a round that emitted these accepted. A token in the place of a rejected one is none that was proposed
        there."""
        edges = [*enumerate(self.tokens), *self.siblings]
        node = 0
        for n, token in enumerate(emitted):
            child = next((i for i, edge in enumerate(edges, start=1) if edge == (node, token)), None)
            if child is None:
                return n
            node = child
        return len(emitted)

    def rejected(self, emitted: Sequence[int]) -> list[int]:
        """What of the chain fell."""
        pairs = zip(self.tokens, emitted, strict=False)
        stood = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), min(len(self.tokens), len(emitted)))
        return self.tokens[stood:]


class Watch:
    """Of one request. chains: siblings are left out before a pass verifies them."""

    def __init__(self) -> None:
        self.chains = False
        self._latest: Proposal | None = None

    def over(self, drafter: int, session: DraftSession) -> DraftSession:
        """The session, which tells what it proposes from now on."""
        return _Watched(self, drafter, session)

    def proposed(self, drafter: int, draft: Draft | None) -> None:
        if draft is None:
            self._latest = None
            return
        chain = draft.chain().tokens.tolist()
        more: list[tuple[int, int]] = []
        if draft.parents is not None and not self.chains:
            more = list(zip(draft.parents[len(chain):], draft.tokens[len(chain):].tolist(), strict=True))
        self._latest = Proposal(drafter, chain, tuple(more))

    def take(self) -> Proposal | None:
        """What was proposed since the last call."""
        latest, self._latest = self._latest, None
        return latest


class _Watched:
    def __init__(self, watch: Watch, drafter: int, session: DraftSession):
        self._watch, self._drafter, self._session = watch, drafter, session

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        draft = self._session.draft(ctx, most)
        self._watch.proposed(self._drafter, draft)
        return draft

    def __getattr__(self, name: str) -> Any:   # whatever else a session is told
        return getattr(self._session, name)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self._session.verified(ctx, path)


class Shown:
    """Shows a pass to every session that watches it, and counts the time that they take. taps: each with whether it chooses masks."""

    def __init__(self, taps: Sequence[tuple[Tap, bool]], stats: DecodeStats):
        self.taps, self.stats = taps, stats
        self._between: list[tuple[Between, bool]] = []

    @property
    def layers(self) -> frozenset[int] | None:
        """What any of them wants to see; None: everything."""
        found = frozenset[int]()
        for tap, _ in self.taps:
            wanted = getattr(tap, "layers", None)
            if wanted is None:
                return None
            found |= frozenset(wanted)
        return found

    def __call__(self, i: int, h: Tensor) -> Between | None:
        self._between = []
        for tap, chooses in self.taps:
            began = perf_counter()
            if (between := tap(i, h)) is not None:
                self._between.append((between, chooses))
            self.stats.watched(perf_counter() - began, chooses)
        return self.between if self._between else None

    def between(self, h: Tensor) -> None:
        """The state between attention and MLP of the layer that was shown last."""
        for show, chooses in self._between:
            began = perf_counter()
            show(h)
            self.stats.watched(perf_counter() - began, chooses)
