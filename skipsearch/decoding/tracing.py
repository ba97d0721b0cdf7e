"""Traces of proposals, and a tap that calls the taps of several draft sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from skipsearch.core.sequences import common_prefix_length
from skipsearch.core.stats import DecodeStats
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import LayerTap, MidLayerTap


@dataclass(frozen=True)
class Proposal:
    """The draft of one round, for display."""

    drafter_index: int  # in the recipe
    tokens: list[int]  # the main path
    siblings: tuple[tuple[int, int], ...] = ()  # (parent node as in `Draft.parents`, token)

    def count_accepted(self, emitted: Sequence[int]) -> int:
        """Return the number of proposed tokens that were accepted. emitted: tokens of the round."""
        edges = [*enumerate(self.tokens), *self.siblings]
        node = 0
        for n, token in enumerate(emitted):
            child = next(
                (i for i, edge in enumerate(edges, start=1) if edge == (node, token)), None
            )
            if child is None:
                return n
            node = child
        return len(emitted)

    def rejected_tokens(self, emitted: Sequence[int]) -> list[int]:
        """Return the rejected tokens of the main path. emitted: tokens of the round."""
        return self.tokens[common_prefix_length(self.tokens, emitted) :]


class Trace:
    """A record of the proposals in the rounds of one request."""

    def __init__(self) -> None:
        self.chains_only = False  # siblings are removed before verification
        self._latest: Proposal | None = None

    def wrap_session(self, drafter_index: int, session: DraftSession) -> DraftSession:
        """Return a session whose proposals are recorded."""
        return _TracedSession(self, drafter_index, session)

    def record_proposal(self, drafter_index: int, draft: Draft | None) -> None:
        if draft is None:
            self._latest = None
            return
        chain = draft.main_path().tokens.tolist()
        siblings: list[tuple[int, int]] = []
        if draft.parents is not None and not self.chains_only:
            siblings = list(
                zip(draft.parents[len(chain) :], draft.tokens[len(chain) :].tolist(), strict=True)
            )
        self._latest = Proposal(drafter_index, chain, tuple(siblings))

    def pop_proposal(self) -> Proposal | None:
        """Return the proposal that was recorded since the last call, or None."""
        latest, self._latest = self._latest, None
        return latest


class _TracedSession(DraftSession):
    def __init__(self, trace: Trace, drafter_index: int, session: DraftSession):
        self._trace, self._drafter_index, self._session = trace, drafter_index, session

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        draft = self._session.draft(ctx, max_tokens)
        self._trace.record_proposal(self._drafter_index, draft)
        return draft

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self._session.verified(ctx, accepted_nodes)


class TapFanout:
    """A tap that calls the taps of several sessions, and measures their time.

    taps: (tap, whether its session selects masks).
    """

    def __init__(self, taps: Sequence[tuple[LayerTap, bool]], stats: DecodeStats):
        self.taps, self.stats = taps, stats
        self._mid_layer_taps: list[tuple[MidLayerTap, bool]] = []

    @property
    def layers(self) -> frozenset[int] | None:
        """The layers that at least one tap observes; None: all."""
        union = frozenset[int]()
        for tap, _ in self.taps:
            layers = getattr(tap, "layers", None)
            if layers is None:
                return None
            union |= frozenset(layers)
        return union

    def __call__(self, layer: int, hidden: Tensor) -> MidLayerTap | None:
        self._mid_layer_taps = []
        for tap, selects_mask in self.taps:
            began = perf_counter()
            if (mid_layer_tap := tap(layer, hidden)) is not None:
                self._mid_layer_taps.append((mid_layer_tap, selects_mask))
            self.stats.add_observing_time(perf_counter() - began, selects_mask)
        return self.call_mid_layer_taps if self._mid_layer_taps else None

    def call_mid_layer_taps(self, hidden: Tensor) -> None:
        """Give each mid-layer tap the hidden state between attention and MLP of its layer."""
        for mid_layer_tap, selects_mask in self._mid_layer_taps:
            began = perf_counter()
            mid_layer_tap(hidden)
            self.stats.add_observing_time(perf_counter() - began, selects_mask)
