"""Draft by copying the tokens that followed the longest match of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.drafters.base import DecodeContext, Draft, DraftSession
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.lookup.suffix_index import DEFAULT_MAX_MATCH, SuffixIndex


class LookupDrafter:
    """A drafter that copies from the text of its request."""

    def __init__(self, spec: Lookup):
        self.spec = spec

    def new_session(self) -> LookupSession:
        return LookupSession(self.spec)


class LookupSession(DraftSession):
    """The lookup of one request. Its index covers the prompt and the generated tokens."""

    def __init__(self, spec: Lookup):
        self.spec, self.index = spec, SuffixIndex()

    def begin(self, ctx: DecodeContext) -> None:
        self.index.extend(ctx.history)

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        self.index.extend(ctx.history[len(self.index) :])
        match = self.index.longest_match()
        if ctx.answer_memory is not None:
            recalled = ctx.answer_memory.longest_match(
                ctx.history, 0 if match is None else match.length, max_tokens
            )
            if recalled is not None and (n := self.spec.max_copy(recalled[0].length)):
                return Draft(ctx.pending.new_tensor(recalled[1][:n]))
        n = 0 if match is None else min(max_tokens, self.spec.max_copy(match.length))
        if match is None or not n:
            return None
        copied = self.index.continuation(match.position, n)
        return Draft(ctx.pending.new_tensor(copied), copied_from=match.position)

    def continue_draft(
        self, ctx: DecodeContext, tokens: Sequence[int], max_tokens: int
    ) -> Draft | None:
        self.index.extend(ctx.history[len(self.index) :])
        # The index must not contain tokens that may be rejected, so their match is only read.
        match = self.index.longest_match_of([*ctx.history[-DEFAULT_MAX_MATCH:], *tokens])
        n = 0 if match is None else min(max_tokens, self.spec.max_copy(match.length))
        if match is None or not n or match.position >= len(self.index):
            return None
        return Draft(ctx.pending.new_tensor(self.index.continuation(match.position, n)))
