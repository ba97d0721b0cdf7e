"""What was proposed in each round, for whoever wants to show it: the draft sessions of a request, with an eye on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.drafters import DecodeContext, Draft, DraftSession


@dataclass(frozen=True)
class Proposal:
    """drafter: its place in the recipe. tokens: the chain that it drafted; of these, those that a chunk begins with were accepted."""

    drafter: int
    tokens: list[int]

    def accepted(self, emitted: list[int]) -> int:
        """How many of them a round that emitted these tokens accepted. A token in the place of a rejected one is never that token."""
        pairs = zip(self.tokens, emitted, strict=False)
        return next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), min(len(self.tokens), len(emitted)))


class Watch:
    """Of one request."""

    def __init__(self) -> None:
        self._latest: Proposal | None = None

    def over(self, drafter: int, session: DraftSession) -> DraftSession:
        """The session, which tells what it proposes from now on."""
        return _Watched(self, drafter, session)

    def take(self) -> Proposal | None:
        """What was proposed since the last call."""
        latest, self._latest = self._latest, None
        return latest


class _Watched:
    def __init__(self, watch: Watch, drafter: int, session: DraftSession):
        self._watch, self._drafter, self._session = watch, drafter, session

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        draft = self._session.draft(ctx, most)
        self._watch._latest = None if draft is None else Proposal(self._drafter, draft.chain().tokens.tolist())
        return draft

    def __getattr__(self, name: str) -> Any:   # whatever else a session is told
        return getattr(self._session, name)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self._session.verified(ctx, path)
