"""CLaSp, ASD and SWIFT while they decode: lossless, with masks by the rules of their papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, zip_longest
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from helpers.marks import engine_params, thorough
from helpers.properties import with_examples
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, use_engine
from hypothesis import given
from hypothesis import strategies as st
from models.tiny import adapted, hf_model
from torch.nn.functional import cosine_similarity

from decoding.checks import PROMPTS, assert_partly_accepted
from decoding.dynamic_mask_checks import (
    CHOOSING,
    FIXED,
    check_asd,
    check_choosing,
    check_clasp,
    check_swift,
    check_swift_as_published,
    noted,
)
from decoding.sampling_checks import Warp, check_sampling
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.dynamic_program import DPStep, solve_one_token
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.dynamic_mask import DynamicMaskSession
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.swift.session import SWIFTDrafter, SWIFTPolicy
from skipsearch.drafters.swift.spec import SWIFT, InitialMask, SiblingSchedule
from skipsearch.engine import forward
from skipsearch.errors import DecodeError, MaskError
from skipsearch.models.kv_cache import KVCache, Planner

# --- lossless


@pytest.mark.parametrize(
    "engine", engine_params("native", thorough=("hf", "lean"), slow=("graph",))
)
def test_greedy_text_is_the_full_models_own(engine: str) -> None:
    with use_engine(engine):
        assert_partly_accepted(check_choosing())


@pytest.mark.parametrize("engine", engine_params("native", thorough=("hf",)))
def test_requests_that_interleave_share_no_mask_and_stay_lossless(engine: str) -> None:
    total = DecodeStats()
    with use_engine(engine):
        model, full = tiny_model_and_reference()

    @with_examples(12)
    @given(
        st.sampled_from(CHOOSING),
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=2, max_size=3
        ),
    )
    def holds(spec, prompts) -> None:
        nonlocal total
        decoder = Decoder(model, Recipe((spec,)))
        read = [[] for _ in prompts]
        for chunks in zip_longest(*(decoder.stream(prompt, 16) for prompt in prompts)):
            for tokens, chunk in zip(read, chunks, strict=True):
                tokens.extend(chunk.tokens if chunk else ())
                total += chunk.stats if chunk and chunk.stats else DecodeStats()
        assert read == [full.greedy(prompt, 16) for prompt in prompts]

    holds()
    assert_partly_accepted(total)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", "lean", "graph", "native"])
def test_that_holds_of_thousands_of_requests(engine: str) -> None:
    """Run it by hand: `pytest -m slow tests/decoding/test_dynamic_masks.py -s`."""
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    total, cases = DecodeStats(), 0

    @with_examples(700 if engine == "hf" else 120)
    @given(
        st.sampled_from(CHOOSING),
        st.sampled_from([(), (Lookup(min_match=1, draft_length=3),)]),
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=3, max_size=3
        ),
    )
    def holds(spec, before, prompts) -> None:
        nonlocal total, cases
        decoder = Decoder(model, Recipe((*before, spec)))
        for prompt in prompts:
            result = decoder.generate(prompt, 20)
            assert result.tokens == full.greedy(prompt, 20)
            total += result.stats
            cases += 1

    holds()
    assert_partly_accepted(total)
    print(
        f"\n{engine}: {cases} requests, {total.drafted} tokens drafted, {total.accepted} accepted"
    )


@pytest.mark.parametrize("family", ["gemma2", "phi", *thorough("qwen3")])
def test_families_with_norms_of_their_own_and_a_parallel_residual_stay_lossless(
    family: str,
) -> None:
    model, hf = adapted(family), hf_model(family)
    for spec in CHOOSING[:1] + CHOOSING[2:]:
        for prompt in ((5, 17, 40, 3, 8, 8, 21), (9, 2)):
            prompt = tuple(t % model.spec.vocab_size for t in prompt)
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(
                    int(hf(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
                )
            assert (
                Decoder(model, Recipe((spec,))).generate(prompt, 12, ignore_eos=True).tokens
                == tokens[len(prompt) :]
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spec",
    [
        CLaSp(skip=1, interval=1, draft_length=2, exit=FIXED),
        ASD(threshold=1.0, every=2, keep_last=0, draft_length=2, exit=FIXED),
        SWIFT(
            skip_ratio=0.5,
            window=2,
            bayes_interval=2,
            max_score=1.0,
            tolerance=10_000,
            draft_length=2,
            exit=FIXED,
        ),
    ],
    ids=lambda s: s.kind,
)
def test_samples_are_distributed_as_the_full_models_own(spec) -> None:
    from helpers.table_model import TableModel

    model = TableModel(vocab=4, branch=0.5, layers=4)  # SWIFT keeps the first layer and the last
    assert_partly_accepted(
        check_sampling(
            Warp(0.8), samples=1200, recipe=Recipe((spec,)), model=model, prompt=(2, 0, 1, 2, 0, 1)
        )
    )


@torch.no_grad()
@pytest.mark.parametrize("engine", engine_params("hf", thorough=("lean", "native")))
def test_choosing_leaves_what_is_committed_as_it_is_which_is_what_a_fresh_prefill_writes(
    engine: str,
) -> None:
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    looked = Counter[str]()

    class Checked(DynamicMaskSession):
        def __init__(self, inner: DynamicMaskSession):
            self.__dict__ = inner.__dict__

        def begin(self, ctx: DecodeContext) -> None:
            self.unmoved(ctx, "begin", super().begin)

        def committed(self, ctx: DecodeContext, path: Sequence[int]) -> None:
            self.unmoved(ctx, "committed", super().committed, path)

        def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
            fresh, planner, n = (
                model.new_cache(1, 128),
                Planner(128, torch.device("cpu")),
                ctx.cache.length,
            )
            forward(model, torch.tensor([ctx.history[:n]]), fresh, planner.plan_chain(0, n))
            for mine, theirs in zip(kv(ctx.cache, n), kv(fresh, n), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
            looked["draft"] += 1
            return super().draft(ctx, most)

        def unmoved(
            self, ctx: DecodeContext, what: str, call: Callable[..., None], *more: object
        ) -> None:
            before = kv(ctx.cache, ctx.cache.length)
            call(ctx, *more)
            assert all(map(torch.equal, before, kv(ctx.cache, ctx.cache.length)))
            looked[what] += 1

    def kv(cache: KVCache, n: int) -> list[torch.Tensor]:
        return [t[:, :, :n].clone() for t in (*cache.keys, *cache.values) if t is not None]

    for spec in CHOOSING:
        decoder, [drafter] = noted(model, Recipe((Lookup(min_match=2, draft_length=3), spec)))
        new_session = drafter.new_session
        drafter.new_session = lambda new_session=new_session: Checked(new_session())  # type: ignore[method-assign]
        for prompt in PROMPTS[1:]:
            assert decoder.generate(prompt, 20).tokens == full.greedy(prompt, 20)
    assert min(looked.values()) >= len(CHOOSING)
    assert len(looked) == 3


# --- the rules


def test_claspes_plans_are_equation_2_by_hand_at_the_last_verified_token() -> None:
    check_clasp()


def test_asds_cosines_are_those_of_hugging_faces_modules_over_the_prompt() -> None:
    check_asd()


def test_swift_judges_masks_by_one_row_drafts() -> None:
    check_swift()


def test_as_published_swift_judges_masks_on_the_first_tokens_and_keeps_the_luckiest() -> None:
    check_swift_as_published()


def test_trees_have_as_many_candidates_as_the_confidence_asks_for() -> None:
    tree = SiblingSchedule(thresholds=(0.95, 0.8, 0.5), widths=(3, 5, 8, 10))
    assert [tree.count_for(c) for c in (0.99, 0.95, 0.81, 0.6, 0.5, 0.0)] == [2, 4, 4, 7, 9, 9]
    assert tree.most == 9
    model, full = tiny_model_and_reference()
    spec = SWIFT(
        skip_ratio=0.5,
        window=4,
        draft_length=3,
        exit=FIXED,
        tree=SiblingSchedule(thresholds=(0.5,), widths=(1, 4)),
    )
    decoder = Decoder(model, Recipe((spec,)))
    total, sizes = DecodeStats(), set()
    for prompt in PROMPTS:
        for chunk in decoder.stream(prompt, 30, trace=True):
            if chunk.proposal:
                beside = [
                    sum(node == below for node, _ in chunk.proposal.siblings)
                    for below in range(len(chunk.proposal.tokens))
                ]
                sizes |= set(beside)
            total += chunk.stats or DecodeStats()
        assert decoder.generate(prompt, 30).tokens == full.greedy(prompt, 30)
    assert sizes == {0, 3}
    assert total.by_drafter[0].siblings > 0
    assert_partly_accepted(total)


@pytest.mark.parametrize(
    ("thresholds", "widths", "said"),
    [((0.5,), (1,), "one number more"), ((0.5, 0.8), (1, 2, 3), "below the one before")],
)
def test_trees_that_make_no_sense_are_refused(thresholds, widths, said) -> None:
    with pytest.raises(DecodeError, match=said):
        Recipe.from_data(
            [
                {
                    "kind": "swift",
                    "draft_length": 2,
                    "exit": {"kind": "fixed"},
                    "tree": {"thresholds": list(thresholds), "widths": list(widths)},
                }
            ]
        )


def test_sublayers_are_planned_only_where_they_follow_one_another() -> None:
    model = adapted("phi")
    with pytest.raises(MaskError, match="write unit: layer"):
        Decoder(model, Recipe((CLaSp(skip=2, unit="sublayer", draft_length=2, exit=FIXED),)))


def test_swift_learns_from_its_initial_mask_on_and_equal_requests_repeat_a_sample() -> None:
    model, _ = tiny_model_and_reference()
    recipe = Recipe(
        (
            Lookup(min_match=2, draft_length=2),
            SWIFT(
                skip_ratio=0.5,
                window=4,
                max_score=1.0,
                warm=InitialMask(attn=(1, 2), mlp=(3,)),
                draft_length=3,
                exit=FIXED,
            ),
        )
    )

    def sample() -> list[list[int]]:
        decoder = Decoder(model, recipe)
        assert decoder.is_learning
        search = decoder.loop.drafters[1][1].search
        assert search.mask == SkipMask(LAYERS, (1, 2), (3,))
        samples = [
            decoder.generate(prompt, 30, temperature=1.2, seed=seed).tokens
            for seed, prompt in enumerate(PROMPTS)
        ]
        assert search.n_trials
        return samples

    assert sample() == sample()
    assert not Decoder(model).is_learning


def test_choosing_is_paid_for_by_the_drafts_and_not_by_the_prompt() -> None:
    model, _ = tiny_model_and_reference()
    for spec in CHOOSING:
        stats = Decoder(model, Recipe((spec,))).generate(PROMPTS[2] * 4, 12).stats
        assert 0 < stats.choosing_seconds == stats.watching_seconds < stats.decode_seconds
    assert Decoder(model).generate(PROMPTS[2], 12).stats.choosing_seconds == 0


def layers_that_add(vectors: torch.Tensor):
    """Return blocks of two sub-layers, each of which adds a fixed vector."""
    return lambda layer, g, attn, mlp: g + vectors[layer] * (0.5 * attn + 0.5 * mlp)


@with_examples(60)
@given(st.integers(2, 8), st.data())
def test_on_orthogonal_steps_the_programme_skips_the_smallest(n: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.floats(0.1, 2), min_size=n, max_size=n, unique=True))
    count = data.draw(st.integers(1, n - 1))
    vectors = torch.diag(torch.tensor([*sizes, 0.0], dtype=torch.double))[:n]
    start = torch.zeros(n + 1, dtype=torch.double)
    start[n] = 1.0
    states = torch.stack([start, *(start + vectors[: i + 1].sum(0) for i in range(n))])
    skipped = solve_one_token(
        states, [DPStep(i, True, True, True) for i in range(n)], layers_that_add(vectors), count
    )
    kept = sum(size**2 for i, size in enumerate(sizes) if i not in {step.layer for step in skipped})
    assert len(skipped) == count
    assert kept == pytest.approx(sum(sorted(size**2 for size in sizes)[count:]), rel=1e-6)


@with_examples(25)
@given(st.integers(2, 6), st.data())
def test_on_any_network_it_is_no_better_than_trying_every_mask_and_its_mask_is_what_it_says(
    n: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weights = torch.randn(n, 6, 6, generator=generator, dtype=torch.double) * 0.6
    count = data.draw(st.integers(1, n - 1))

    def run(layer: int, g: torch.Tensor, attn: bool, mlp: bool) -> torch.Tensor:
        return g + torch.tanh(g @ weights[layer])

    states = [torch.randn(6, generator=generator, dtype=torch.double)]
    for i in range(n):
        states.append(run(i, states[-1][None], True, True)[0])

    def closeness(skipped: set[int]) -> float:
        g = states[0]
        for i in range(n):
            g = g if i in skipped else run(i, g[None], True, True)[0]
        return float(cosine_similarity(g, states[-1], dim=0))

    def by_equation_2() -> float:
        """Return D(n, count), one state at a time; g[j] has skipped j of the layers so far."""
        g = {0: states[0]}
        for i in range(n):
            run_on = {j: run(i, state[None], True, True)[0] for j, state in g.items()}
            ways = {
                j: [of[k] for of, k in ((g, j - 1), (run_on, j)) if k in of]
                for j in range(min(i + 1, count) + 1)
            }
            g = {
                j: max(some, key=lambda way: float(cosine_similarity(way, states[i + 1], dim=0)))
                for j, some in ways.items()
            }
        return float(cosine_similarity(g[count], states[-1], dim=0))

    found = {
        step.layer
        for step in solve_one_token(
            torch.stack(states), [DPStep(i, True, True, True) for i in range(n)], run, count
        )
    }
    assert len(found) == count
    assert closeness(found) == pytest.approx(by_equation_2(), abs=1e-10), (
        "the mask reproduces the state that the programme ended with"
    )
    assert (
        closeness(found)
        <= max(closeness(set(some)) for some in combinations(range(n), count)) + 1e-12
    )


def test_layers_that_are_never_skipped_are_kept_and_fewer_are_skipped_where_there_are_no_more() -> (
    None
):
    vectors = torch.eye(4, dtype=torch.double)
    states = torch.cat([torch.ones(1, 4, dtype=torch.double), 1 + vectors.cumsum(0)])
    steps = [DPStep(i, True, True, i != 2) for i in range(4)]
    assert {step.layer for step in solve_one_token(states, steps, layers_that_add(vectors), 9)} == {
        0,
        1,
        3,
    }


def test_swift_stops_searching_at_each_of_its_limits() -> None:
    model, _ = tiny_model_and_reference()
    spec = SWIFT(skip_ratio=0.5, window=4, max_score=1.0, tolerance=3, draft_length=3, exit=FIXED)
    decoder, [drafter] = noted(model, Recipe((spec,)))
    for prompt in PROMPTS:
        decoder.generate(prompt, 30)
    assert not drafter.inner.is_learning
    assert drafter.inner.search.stale_trials == 3
    trials = drafter.inner.search.n_trials
    decoder.generate(PROMPTS[0], 30)
    assert drafter.inner.search.n_trials == trials, "a search that ended stays ended"
    for limit in ({"max_score": 0.0}, {"most_trials": 1}):
        decoder, [drafter] = noted(model, Recipe((spec.model_copy(update=limit),)))
        decoder.generate(PROMPTS[0], 40)
        assert drafter.inner.search.n_trials <= 1


def test_swift_adopts_a_better_mask_that_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny_model_and_reference()
    spec = SWIFT(skip_ratio=0.5, window=8, max_score=1.0, draft_length=3, exit=FIXED)
    decoder, [drafter] = noted(model, Recipe((spec,)))
    planted, harmful = SkipMask(LAYERS, (), (3,)), SkipMask(LAYERS, (0, 1, 2, 3), (0, 1, 2, 3))
    drafter.inner.search.mask = harmful
    monkeypatch.setattr(drafter.inner, "propose_mask", lambda: (planted, planted.bits))
    for prompt in PROMPTS:
        decoder.generate(prompt, 40)
    assert drafter.inner.search.mask == planted


def test_requests_of_several_threads_try_masks_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither request waits for a pass of the other.

    Here the first pass of each waits until the other one's has begun.
    """
    model, full = tiny_model_and_reference()
    spec = SWIFT(
        skip_ratio=0.5, window=4, max_score=1.0, tolerance=10_000, draft_length=3, exit=FIXED
    )
    decoder = Decoder(model, Recipe((spec,)))
    drafter = decoder.loop.drafters[0][1]
    assert isinstance(drafter, SWIFTDrafter)
    real, meeting, met = SWIFTPolicy._score, Barrier(2), set[int]()

    def judged(self: SWIFTPolicy, *arguments: Any) -> int:
        if get_ident() not in met:
            met.add(get_ident())
            meeting.wait(timeout=20)
        return real(self, *arguments)

    monkeypatch.setattr(SWIFTPolicy, "_score", judged)
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda prompt: decoder.generate(prompt, 40).tokens, PROMPTS[:2]))
    assert texts == [full.greedy(prompt, 40) for prompt in PROMPTS[:2]]
    assert len(met) == 2
    assert drafter.search.n_trials == len(drafter.search.results) > 2


def test_a_fit_holds_no_lock_and_leaves_the_random_numbers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from botorch import models  # takes seconds, and other tests need it too

    model, _ = tiny_model_and_reference()
    drafter = SWIFT(skip_ratio=0.5, bayes_interval=1, draft_length=3, exit=FIXED).build(model, [])
    assert isinstance(drafter, SWIFTDrafter)
    fitted, drawn, real = list[bool](), list[torch.Tensor](), models.SingleTaskGP

    def fit(*arguments: Any, **settings: Any) -> Any:
        fitted.append(drafter.lock.locked())
        drawn.append(torch.rand(3))  # as another thread may meanwhile
        return real(*arguments, **settings)

    monkeypatch.setattr(models, "SingleTaskGP", fit)
    for score in (0.1, 0.4):
        drafter.search.results.append((drafter._random_mask()[1], score))
    before = torch.get_rng_state()
    drafter.propose_mask()
    after = torch.rand(3)
    assert fitted == [False]
    torch.set_rng_state(before)
    assert torch.equal(torch.cat([drawn[0], after]), torch.cat([torch.rand(3), torch.rand(3)]))


def test_a_search_that_finds_nothing_better_leaves_a_sample_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Search and sampling use separate random numbers."""
    model, _ = tiny_model_and_reference()
    spec = SWIFT(
        skip_ratio=0.5, window=4, max_score=1.0, tolerance=10_000, draft_length=3, exit=FIXED
    )
    decoder, [drafter] = noted(model, Recipe((spec,)))
    start = drafter.inner.search.mask
    policy = type(drafter.inner.new_session().policy)
    monkeypatch.setattr(policy, "_score_recent", lambda self, ctx, mask: int(mask == start))
    off, [unlearned] = noted(model, Recipe((spec.model_copy(update={"most_trials": 1}),)))
    unlearned.inner.search.n_trials = 1
    for seed in range(4):
        both = [
            d.generate(PROMPTS[2], 24, temperature=1.1, seed=seed).tokens for d in (decoder, off)
        ]
        assert both[0] == both[1]
    assert (drafter.inner.search.mask, unlearned.inner.search.mask) == (start, start)
    assert drafter.inner.search.n_trials > 5
    assert not unlearned.inner.search.results


def test_greedy_text_is_the_same_with_the_search_on_and_off() -> None:
    model, _ = tiny_model_and_reference()
    on, off = (
        SWIFT(skip_ratio=0.5, window=4, max_score=1.0, most_trials=most, draft_length=3, exit=FIXED)
        for most in (1000, 1)
    )
    for prompt in PROMPTS:
        assert (
            Decoder(model, Recipe((on,))).generate(prompt, 30).tokens
            == Decoder(model, Recipe((off,))).generate(prompt, 30).tokens
        )
