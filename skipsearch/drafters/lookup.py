"""`lookup`: what followed the last tokens when they stood in the text before. It needs no pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.suffixes import DEFAULT_MAX_MATCH, Match, SuffixIndex
from skipsearch.fields import left_out
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter


class Lookup(DrafterSpec):
    """Looks for the longest end of the text so far that stood in it before, prompt included, and proposes what followed it the last time.

    Where the request has a memory of earlier answers and more tokens match there, it copies from those. Where fewer than `min_match` tokens
    match it proposes nothing. A looked-up token is a certain proposal (a one-hot q), also where the
    request samples. Source: prompt lookup decoding (Saxena 2023).
    """

    kind: Literal["lookup"] = "lookup"
    about = About("Prompt lookup decoding (Saxena 2023)", "nothing: it reads the text", "stands before any other drafter")
    min_match: Annotated[int, Field(ge=1, le=DEFAULT_MAX_MATCH)] = Field(description="tokens that must match at least, 1..16")
    per_match: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, exclude_if=left_out, description="most tokens drafted for each token that matched, 1..64; left out: `draft_length`")

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        return LookupDrafter(self)

    def room(self, match: int) -> int:
        """Tokens that it proposes behind a match of so many tokens, at most; 0: it proposes nothing."""
        if match < self.min_match:
            return 0
        return self.draft_length if self.per_match is None else min(self.draft_length, self.per_match * match)

    def __str__(self) -> str:
        growing = f", at most {self.per_match} per matched token" if self.per_match else ""
        return f"lookup: {self.min_match} token{'' if self.min_match == 1 else 's'} must match, copies up to {self.draft_length}{growing}"


class LookupDrafter:
    def __init__(self, spec: Lookup):
        self.spec = spec

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return LookupSession(self.spec, ctx)


class LookupSession:
    """One request's index over its own prompt and what was generated behind it."""

    def __init__(self, spec: Lookup, ctx: DecodeContext):
        self.spec, self.index = spec, SuffixIndex()
        self.index.extend(ctx.history)

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        self.index.extend(ctx.history[len(self.index):])
        match: Match | None = self.index.match()
        if ctx.memory is not None:
            recalled = ctx.memory.match(ctx.history, 0 if match is None else match.length, most)
            if recalled is not None and (n := self.spec.room(recalled[0].length)):
                return Draft(ctx.pending.new_tensor(recalled[1][:n]))
        n = 0 if match is None else min(most, self.spec.room(match.length))
        if match is None or not n:
            return None
        return Draft(ctx.pending.new_tensor(self.index.follow(match.position, n)), source=match.position)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        pass
