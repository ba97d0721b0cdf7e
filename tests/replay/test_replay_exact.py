"""Exact replay counts what real decoding counts: the same rounds, drafted and accepted tokens,
wherever and however texts end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.marks import thorough
from helpers.properties import with_examples
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference, use_engine, with_eos
from hypothesis import example, given
from hypothesis import strategies as st
from models.tiny import adapted

from replay.exact_replay import ExactDrafts, ExactReplay, count_exact_rounds
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats, DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.engine import forward
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.kv_cache import Planner
from skipsearch.replay import replay_batches
from skipsearch.replay.lookup_replay import LookupReplay
from skipsearch.replay.replay import Replay
from skipsearch.tuning.objective import make_skip_spec

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))
MASKS = (
    SkipMask(LAYERS, (1, 3), (2,)),
    SkipMask(LAYERS, (0,), (0, 4)),
    SkipMask(LAYERS, mlp=(1, 2, 3)),
)
DEPTH = 6
POLICIES = (
    DraftPolicy(5),
    DraftPolicy(DEPTH, Confidence(threshold=0.4)),
    DraftPolicy(DEPTH, Adaptive(threshold=0.35, target_acceptance=0.6, step=0.9)),
    DraftPolicy(DEPTH, Confidence(threshold=0.4), Siblings(below=0.6, most=3)),
)

bits = st.lists(st.integers(0, 1), min_size=2 * LAYERS, max_size=2 * LAYERS).map(SkipMask.from_bits)
lengths = st.integers(1, DEPTH)
siblings = st.builds(Siblings, below=st.floats(0.1, 1), most=st.integers(1, 4))
policies = st.one_of(
    st.builds(DraftPolicy, lengths, siblings=st.none() | siblings),
    st.builds(
        lambda n, t, beside: DraftPolicy(n, Confidence(threshold=t), beside),
        lengths,
        st.floats(0.1, 0.9),
        st.none() | siblings,
    ),
    st.builds(
        lambda n, t, target: DraftPolicy(
            n, Adaptive(threshold=t, target_acceptance=target, step=0.9)
        ),
        lengths,
        st.floats(0.1, 0.9),
        st.floats(0.2, 0.9),
    ),
)


def decoded(
    model: ModelAdapter,
    mask: SkipMask,
    policy: DraftPolicy,
    tokens: int,
    end_on_repeat: int | None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
) -> tuple[DecodeStats, Counter[str]]:
    """What one decoder counts on the prompts in turn, those left out that end with the prefill's
    own token; and how the texts ended.
    """
    decoder = Decoder(model, Recipe((make_skip_spec(mask, policy),)))
    total, reasons = DecodeStats(), Counter[str]()
    for prompt in prompts:
        generation = decoder.generate(prompt, tokens, end_on_repeat=end_on_repeat)
        if generation.stats.round_tokens:
            total, reasons = total + generation.stats, reasons + Counter([generation.finish_reason])
    return total, reasons


def counts(stats: DecodeStats) -> dict[str, int]:
    return {
        name: getattr(stats, name)
        for name in ("tokens", "round_tokens", "rounds", "drafted", "accepted", "rejecting_rounds")
    }


def assert_counts(
    model: ModelAdapter,
    exact: ExactReplay,
    mask: SkipMask,
    policy: DraftPolicy,
    tokens: int,
    end_on_repeat: int | None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
) -> tuple[DecodeStats, Counter[str]]:
    stats, reasons = decoded(model, mask, policy, tokens, end_on_repeat, prompts)
    assert counts(exact.count_stats(mask, policy)) == counts(stats)
    return stats, reasons


@cache
def world(
    engine: str = "hf", tokens: int = 24, end_on_repeat: int | None = 6
) -> tuple[ModelAdapter, ExactReplay]:
    with use_engine(engine):
        model, _ = tiny_model_and_reference()
    return model, ExactReplay(Replay(model, PROMPTS, tokens, end_on_repeat), DEPTH)


# --- against real decoding


@pytest.mark.parametrize("engine", ["hf", *thorough("lean")])
@pytest.mark.parametrize("policy", [*POLICIES[2:], *thorough(*POLICIES[:2])], ids=str)
def test_counts_are_those_of_real_decoding(engine: str, policy: DraftPolicy) -> None:
    model, exact = world(engine)
    total = DecodeStats()
    for mask in MASKS:
        total += assert_counts(model, exact, mask, policy, 24, 6)[0]
    assert 0 < total.accepted < total.drafted
    assert 0 < total.rejecting_rounds < total.rounds, (
        "some rounds were accepted whole and some were not"
    )
    if policy.exit.kind != "fixed":
        assert total.drafted < decoded(model, MASKS[2], DraftPolicy(DEPTH), 24, 6)[0].drafted * len(
            MASKS
        ), "the policy stopped some"


def test_that_holds_for_any_mask_policy_and_ending() -> None:
    seen: Counter[str] = Counter()
    total = DecodeStats()
    model, _ = tiny_model_and_reference()

    @with_examples(16)
    @given(
        bits,
        policies,
        st.sampled_from([2, 7, 16, 24]),
        st.sampled_from([None, 1, 2]),
        st.sampled_from([(), (3,), (9, 41, 58)]),
    )
    @example(MASKS[0], POLICIES[0], 24, 1, ())  # ends with a repeat
    def holds(
        mask: SkipMask,
        policy: DraftPolicy,
        tokens: int,
        end_on_repeat: int | None,
        eos: tuple[int, ...],
    ) -> None:
        nonlocal total
        stats, reasons = assert_counts(
            with_eos(model, *eos),
            ending(tokens, end_on_repeat, eos),
            mask,
            policy,
            tokens,
            end_on_repeat,
        )
        seen.update(reasons)
        total += stats

    holds()
    assert set(seen) == {"length", "repeat", "eos"}, seen
    assert 0 < total.rejecting_rounds < total.rounds
    assert total.accepted + total.rounds > total.round_tokens, (
        "some drafts were right past the end of a text"
    )


@cache
def ending(tokens: int, end_on_repeat: int | None, eos: tuple[int, ...]) -> ExactReplay:
    return ExactReplay(
        Replay(with_eos(tiny_model_and_reference()[0], *eos), PROMPTS, tokens, end_on_repeat), DEPTH
    )


@pytest.mark.parametrize("engine", thorough("hf", "lean"))
def test_counts_of_lookup_with_the_skipped_model_behind_it_are_those_of_real_decoding(
    engine: str,
) -> None:
    """Drafter by drafter: lookup's rounds follow from the text alone, and the skip drafter gets
    those that it leaves over.
    """
    model, exact = world(engine)
    replay, total = exact.replay, DecodeStats()
    lookups = LookupReplay(replay.prompt_ids, replay.continuations, exact.known_texts)
    prompts = [i for i, text in enumerate(replay.continuations) if len(text) > 1]
    for mask in MASKS:
        for spec in (
            Lookup(min_match=1, draft_length=5),
            Lookup(min_match=2, draft_length=6, per_match=1),
        ):
            for policy in POLICIES:
                decoder = Decoder(model, Recipe((spec, make_skip_spec(mask, policy))))
                results = [
                    decoder.generate(prompt, 24, end_on_repeat=6).stats for prompt in PROMPTS
                ]
                real = sum((stats for stats in results if stats.round_tokens), DecodeStats())
                walked = count_exact_rounds(exact(mask), policy, [lookups(spec, prompts)])
                assert counts(walked) == counts(real)
                assert [replace(d, copied=0) for d in real.by_drafter] == walked.by_drafter
                total += real
    assert all(0 < d.accepted < d.drafted for d in total.by_drafter), (
        "both drafters were right now and then, and wrong"
    )


@pytest.mark.parametrize("engine", ["hf", *thorough("lean")])
def test_the_guard_decides_in_replay_as_it_does_in_decoding(engine: str) -> None:
    model, exact = world(engine)
    replay, rested = exact.replay, 0
    lookups = LookupReplay(replay.prompt_ids, replay.continuations, exact.known_texts)
    prompts = [i for i, text in enumerate(replay.continuations) if len(text) > 1]
    spec, policy = Lookup(min_match=1, draft_length=4), DraftPolicy(5)
    for mask in MASKS:
        for prices in (
            (DrafterCost(0.0, 1.4, 3.0, 0.02), DrafterCost(0.5, 1.4, 3.0, 0.02)),
            (None, DrafterCost(0.6, 1.5, 4.0, 0.1)),
        ):
            decoder = Decoder(
                model, Recipe((spec, make_skip_spec(mask, policy))), drafter_costs=prices
            )
            results = [decoder.generate(prompt, 24, end_on_repeat=6).stats for prompt in PROMPTS]
            real = sum((stats for stats in results if stats.round_tokens), DecodeStats())
            walked = count_exact_rounds(exact(mask), policy, [lookups(spec, prompts)], prices)
            assert counts(walked) == counts(real)
            assert [replace(d, copied=0) for d in real.by_drafter] == walked.by_drafter
            rested += real.rounds - sum(d.rounds for d in real.by_drafter)
    assert rested > len(PROMPTS) * len(MASKS), "more plain rounds than those without room"


@pytest.mark.parametrize("policy", [*POLICIES[2:], *thorough(*POLICIES[:2])], ids=str)
def test_that_holds_where_the_models_context_ends_the_text(policy: DraftPolicy) -> None:
    model = adapt(tiny_llama(context=16))
    prompts = (tuple(range(8)), (1,), tuple(range(14)), tuple(range(13)))
    exact = ExactReplay(Replay(model, prompts, 24, end_on_repeat=None), DEPTH)
    assert [len(t) for t in exact.replay.continuations] == [8, 15, 2, 3]
    for mask in MASKS:
        stats, _ = assert_counts(model, exact, mask, policy, 24, None, prompts)
        assert stats.drafted


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen2", id="windows"),
        pytest.param("falcon-rw", id="biases by distance", marks=pytest.mark.thorough),
        pytest.param("phi", id="parallel residuals", marks=pytest.mark.thorough),
        pytest.param("opt", id="learned positions", marks=pytest.mark.thorough),
    ],
)
def test_that_holds_for_models_with(family: str) -> None:
    model, prompts = adapted(family), ((5, 17, 40, 3, 8, 8, 21), (9, 2), (12, 3, 3))
    exact = ExactReplay(
        Replay(model, prompts, 14, end_on_repeat=None), 9
    )  # windows of 8: some hide the draft's own beginning
    for mask in (SkipMask(3, (1,)), SkipMask(3, (), (0, 2))):
        for policy in (DraftPolicy(9), DraftPolicy(9, Confidence(threshold=0.1))):
            assert_counts(model, exact, mask, policy, 14, None, prompts)
        assert_is_one_by_one(model, exact, prompts, mask)


def test_a_prompt_that_ends_with_its_first_token_has_no_rounds() -> None:
    model, exact = world()
    first = exact.replay.continuations[0][0]
    model = with_eos(model, first)
    cut = ExactReplay(Replay(model, PROMPTS, 24, end_on_repeat=6), DEPTH)
    assert len(cut(MASKS[0])) < len(PROMPTS)
    assert_counts(model, cut, MASKS[0], POLICIES[2], 24, 6)


# --- what it is


@torch.no_grad()
def assert_is_one_by_one(
    model: ModelAdapter, exact: ExactReplay, prompts: tuple[tuple[int, ...], ...], mask: SkipMask
) -> None:
    """From each position: a fresh cache, the full model up to there, then draft passes of one token
    on the draft's own tokens.
    """
    for prompt, known, tokens, drafts in zip(
        prompts, exact.known_texts, exact.replay.continuations, exact(mask), strict=True
    ):
        for anchor in range(len(tokens) - 1):
            text = torch.tensor([[*prompt, *tokens[: anchor + 1]]])
            length = text.shape[1]
            depth = min(exact.depth, drafts.token_budget - anchor - 1)
            cache, planner = (
                model.new_cache(1, length + exact.depth),
                Planner(length + exact.depth, text.device),
            )
            if length > 1:
                forward(model, text[:, :-1], cache, planner.plan_chain(0, length - 1))
            token = text[:, -1:]
            for d in range(depth):
                probs = forward(model, token, cache, planner.plan_chain(length - 1 + d, 1), mask)[
                    :, -1
                ].softmax(dim=-1)
                token = probs.argmax(dim=-1, keepdim=True)
                assert drafts.accepted[anchor, d] == (int(token) == known[anchor + d + 1])
                assert drafts.confidence[anchor, d] == pytest.approx(float(probs.max()), rel=1e-4)


@pytest.mark.parametrize("mask", [MASKS[0], *thorough(*MASKS[1:])])
def test_each_draft_is_passes_over_its_own_tokens_behind_the_full_models_keys_and_values(
    mask: SkipMask,
) -> None:
    model, exact = world()
    assert_is_one_by_one(model, exact, PROMPTS, mask)
    wrong_then_right = [drafts.accepted[:, 0] < drafts.accepted[:, 1] for drafts in exact(mask)]
    assert any(w.any() for w in wrong_then_right), "a draft goes on past its own mistake"


def test_its_first_drafts_are_what_fast_replay_sees() -> None:
    _, exact = world()
    for fast, drafts in zip(exact.replay(MASKS[0]), exact(MASKS[0]), strict=True):
        may_draft = slice(
            min(len(fast.acceptance), fast.token_budget - 1)
        )  # the last token within the budget is not drafted
        assert np.array_equal(fast.acceptance[may_draft], drafts.accepted[may_draft, 0])
        np.testing.assert_allclose(
            fast.confidence[may_draft], drafts.confidence[may_draft, 0], rtol=1e-5
        )


def test_how_many_positions_share_a_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, exact = world()
    together = exact(MASKS[0])
    monkeypatch.setattr(replay_batches, "MAX_PASS_ROWS", {"cpu": 12})
    for before, after in zip(together, exact(MASKS[0]), strict=True):
        had_room = (
            np.add.outer(np.arange(len(before.accepted)), np.arange(DEPTH))
            < before.token_budget - 1
        )
        assert np.array_equal(before.accepted & had_room, after.accepted & had_room)
        np.testing.assert_allclose(
            before.confidence[had_room], after.confidence[had_room], rtol=1e-6
        )


def test_a_replay_is_left_as_it_was() -> None:
    _, exact = world()
    before = exact.replay(MASKS[0])
    exact(MASKS[1])
    assert all(
        np.array_equal(a.confidence, b.confidence)
        for a, b in zip(before, exact.replay(MASKS[0]), strict=True)
    )


def test_the_text_is_followed_past_its_end_as_far_as_a_draft_may_reach() -> None:
    model, exact = world(end_on_repeat=1)
    for prompt, known, tokens, room in zip(
        PROMPTS,
        exact.known_texts,
        exact.replay.continuations,
        exact.replay.token_budgets,
        strict=True,
    ):
        assert (
            known
            == Decoder(model)
            .generate(prompt, min(room + 1, len(tokens) + DEPTH - 1), end_on_repeat=None)
            .tokens
        )
    assert any(
        len(known) > len(tokens)
        for known, tokens in zip(exact.known_texts, exact.replay.continuations, strict=True)
    )


# --- rounds on paper


def test_a_policy_observes_every_round_that_drafted_and_decides_on_every_draft_but_the_last() -> (
    None
):
    heard: list[tuple[int, int]] = []
    asked: list[tuple[float, int]] = []

    class Spy:
        reads_confidence: ClassVar[bool] = True
        shared_across_requests: ClassVar[bool] = False

        def begin(self) -> Spy:
            return self

        def should_stop(self, confidence: float, n_drafted: int) -> bool:
            asked.append((confidence, n_drafted))
            return confidence < 0.5

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            heard.append((n_accepted, n_drafted))

    right = np.array([[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=bool)
    confidence = np.array(
        [[0.9, 0.8, 0.7], [1, 1, 1], [0.6, 0.25, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    )
    stats = count_exact_rounds(
        [ExactDrafts(right, confidence, np.zeros_like(right), token_budget=6)],
        DraftPolicy(3, Spy()),
    )  # type: ignore[arg-type]
    assert heard == [(1, 3), (2, 2)], (
        "from position 0, then 2; from 5 there is room for the full model's own token alone"
    )
    assert asked == [(0.9, 1), (0.8, 2), (0.6, 1), (0.25, 2)]
    assert counts(stats) == {
        "tokens": 7,
        "round_tokens": 6,
        "rounds": 3,
        "drafted": 5,
        "accepted": 3,
        "rejecting_rounds": 1,
    }


def test_a_draft_length_that_was_not_replayed_is_refused() -> None:
    with pytest.raises(
        SearchError, match="draft length 7 was asked for and drafts were replayed to depth 6"
    ):
        world()[1].count_stats(MASKS[0], DraftPolicy(7))


def test_sampled_texts_are_refused() -> None:
    replay = Replay(tiny_model_and_reference()[0], PROMPTS, 8, None, sampling=SamplingParams(0.7))
    with pytest.raises(SearchError, match="this task samples"):
        ExactReplay(replay, 4)
