"""What a decoder counts and what it tells a policy, recounted from the drafts and the true text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from helpers.tiny import small_world

from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft, Drafter
from skipsearch.mask import SkipMask
from skipsearch.stats import DecodeStats

from .checks import MASKS, PROMPTS

Case = tuple[SkipMask, int, int, tuple[int, ...], int]


class Recorder:
    """A drafter that does as another does and takes notes."""

    kind: ClassVar[str] = "recorder"

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.histories: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.limits: list[int] = []
        self.commits: list[list[list[int]]] = []

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft:
        draft = self.inner.draft(ctx, max_tokens)
        self.histories.append(list(ctx.history[0]))
        self.limits.append(max_tokens)
        self.drafts.append(draft.tokens[0].tolist())
        return draft

    def commit(self, accepted: list[list[int]]) -> None:
        self.commits.append(accepted)
        self.inner.commit(accepted)


class StopAt:
    """Ends every draft at its nth token, and keeps what it is told."""

    kind: ClassVar[str] = "stop-at"
    reads_confidence: ClassVar[bool] = True

    def __init__(self, n: int):
        self.n, self.told = n, list[tuple[int, int]]()

    def stop(self, confidence: float, n_drafted: int) -> bool:
        assert 0 < confidence <= 1
        return n_drafted >= self.n

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        self.told.append((n_accepted, n_drafted))

    def parameters(self) -> dict[str, Any]:
        return {}


CASES: tuple[Case, ...] = ((MASKS[0], 4, 12, PROMPTS[0], 24), (MASKS[1], 5, 2, PROMPTS[1], 11), (MASKS[3], 3, 1, PROMPTS[2], 17))


def check_counts(cases: Sequence[Case] = CASES) -> DecodeStats:
    """A case: mask, draft length, the token at which the policy stops a draft, prompt, limit."""
    model, full = small_world()
    total = DecodeStats()
    for mask, draft_length, last, prompt, limit in cases:
        policy = StopAt(last)
        decoder = Decoder(model, mask, draft_length=draft_length, exit_policy=policy)
        assert decoder.loop.drafter is not None
        recorder = decoder.loop.drafter = Recorder(decoder.loop.drafter)
        result = decoder.generate(prompt, limit)
        stats = result.stats

        judged = []
        for history, draft, room in zip(recorder.histories, recorder.drafts, recorder.limits, strict=True):
            done = len(history) - len(prompt)
            truth = full.greedy(prompt, done + len(draft) + 1)
            assert history == [*prompt, *truth[:done]], "a drafter must see all tokens so far"
            assert room == min(draft_length, limit - done - 1), "a draft leaves room for the token that the full model adds"
            assert len(draft) == min(last, room), "the token that ends a draft is in it, and is verified"
            wrong = [i for i, token in enumerate(draft) if token != truth[done + i]]
            judged.append((wrong[0] if wrong else len(draft), len(draft)))
        emitted = 1 + sum(accepted + 1 for accepted, _ in judged)
        undrafted = limit - emitted
        assert stats.prompt_tokens == len(prompt)
        assert stats.tokens == len(result.tokens) == stats.round_tokens + 1
        assert stats.drafted == sum(n for _, n in judged)
        assert stats.accepted == sum(a for a, _ in judged)
        assert stats.rejecting_rounds == sum(a < n for a, n in judged)
        assert stats.rounds == len(judged) + undrafted, "only the last token of all may come from a round without a draft"
        assert undrafted in (0, 1)
        assert policy.told == judged, "the policy hears of every round what was accepted, and of how many"
        assert recorder.commits == [[list(range(a))] for a, _ in judged]
        total += stats
    return total
