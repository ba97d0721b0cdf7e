"""Checks of a decoder's counts and of what a policy observes.

They are counted again from the drafts and the true text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from helpers.drafting import decoder_with, wrap_drafters
from helpers.tiny import FullModel, tiny_model_and_reference

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats, DrafterStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.skip.session import SkipDrafter
from skipsearch.models import ModelAdapter

from .checks import MASKS, PROMPTS

Case = tuple[SkipMask, int, int, tuple[int, ...], int]


class Recorder:
    """A drafter that wraps another one and records its rounds."""

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.histories: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.limits: list[int] = []
        self.trunks: list[int] = []
        self.verified: list[list[int]] = []  # accepted nodes

    def new_session(self) -> RecordedSession:
        return RecordedSession(self, self.inner.new_session())


class RecordedSession:
    def __init__(self, notes: Recorder, inner: DraftSession):
        self.notes, self.inner = notes, inner

    def __getattr__(self, name: str) -> Any:  # other attributes of a session that observes
        return getattr(self.inner, name)

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        draft = self.inner.draft(ctx, most)
        if draft is not None:
            self.notes.histories.append(list(ctx.history))
            self.notes.limits.append(most)
            self.notes.drafts.append(draft.tokens.tolist())
            self.notes.trunks.append(len(draft.tokens) if draft.n_main is None else draft.n_main)
        return draft

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.notes.verified.append(list(path))
        self.inner.verified(ctx, path)


class StopAt:
    """A policy that ends every draft at its nth token, and records what it observes."""

    reads_confidence: ClassVar[bool] = True
    shared_across_requests: ClassVar[bool] = False

    def __init__(self, n: int):
        self.n, self.told = n, list[tuple[int, int]]()

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        assert 0 < confidence <= 1
        return n_drafted >= self.n

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        self.told.append((n_accepted, n_drafted))

    def begin(self) -> StopAt:
        return self


@dataclass(frozen=True)
class Recorded:
    """A drafted round.

    history: all tokens before it. most: the allowed number of tokens. chain, others: the draft.
    """

    history: list[int]
    most: int
    chain: list[int]
    others: list[int]


def recorded(
    model: ModelAdapter,
    full: FullModel,
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    n: int,
    modules: Sequence[Path] = (),
    exact: bool = False,
    in_session: bool = False,
) -> tuple[DecodeStats, list[Recorded]]:
    """Decode each prompt; return the counts and all rounds of the recipe's last drafter.

    The greedy text must be the full model's own. in_session: a prompt reuses what it shares with
    the text before it.
    """
    recorders, total = list[Recorder](), DecodeStats()

    def recording(drafter: Any) -> Recorder:
        recorders.append(Recorder(drafter))
        return recorders[-1]

    decoder = wrap_drafters(Decoder(model, recipe, exact=exact, module_folders=modules), recording)
    generate = decoder.new_session().generate if in_session else decoder.generate
    for prompt in prompts:
        found = generate(prompt, n)
        assert found.tokens == full.greedy(prompt, n)
        total += found.stats
    last = recorders[-1]
    return total, [
        Recorded(history, most, draft[:trunk], draft[trunk:])
        for history, most, draft, trunk in zip(
            last.histories, last.limits, last.drafts, last.trunks, strict=True
        )
    ]


CASES: tuple[Case, ...] = (
    (MASKS[0], 4, 12, PROMPTS[0], 24),
    (MASKS[1], 5, 2, PROMPTS[1], 11),
    (MASKS[3], 3, 1, PROMPTS[2], 17),
)


def check_counts(cases: Sequence[Case] = CASES) -> DecodeStats:
    """Check a case: mask, draft length, token at which the policy stops a draft, prompt, limit."""
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for mask, draft_length, last, prompt, limit in cases:
        policy = StopAt(last)
        recorder = Recorder(SkipDrafter(mask, policy))
        result = decoder_with(model, recorder, draft_length).generate(prompt, limit)
        stats = result.stats

        judged = []
        for history, draft, room in zip(
            recorder.histories, recorder.drafts, recorder.limits, strict=True
        ):
            done = len(history) - len(prompt)
            truth = full.greedy(prompt, done + len(draft) + 1)
            assert history == [*prompt, *truth[:done]], "a drafter must see all tokens so far"
            assert room == min(draft_length, limit - done - 1), (
                "a draft leaves room for the token that the full model adds"
            )
            assert len(draft) == min(last, room), (
                "the token that ends a draft is in it, and is verified"
            )
            wrong = [i for i, token in enumerate(draft) if token != truth[done + i]]
            judged.append((wrong[0] if wrong else len(draft), len(draft)))
        emitted = 1 + sum(accepted + 1 for accepted, _ in judged)
        undrafted = limit - emitted
        assert stats.prompt_tokens == len(prompt)
        assert stats.tokens == len(result.tokens) == stats.round_tokens + 1
        assert stats.drafted == sum(n for _, n in judged)
        assert stats.accepted == sum(a for a, _ in judged)
        assert stats.rejecting_rounds == sum(a < n for a, n in judged)
        assert stats.rounds == len(judged) + undrafted, (
            "only the last token of all may come from a round without a draft"
        )
        assert undrafted in (0, 1)
        assert policy.told == judged, (
            "the policy hears of every round what was accepted, and of how many"
        )
        assert [*map(len, recorder.verified)] == [a for a, _ in judged]
        assert stats.by_drafter == [
            DrafterStats(len(judged), stats.drafted, stats.accepted, stats.rejecting_rounds)
        ]
        total += stats
    return total
