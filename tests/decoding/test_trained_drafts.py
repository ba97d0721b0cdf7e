"""Drafts from trained parts are lossless on every engine, greedy and sampled, alone and behind lookup, in requests that interleave."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import pytest
from helpers.modules import folder, kangaroo, s3d, small_kangaroo, small_module, small_s3d
from helpers.properties import examples
from helpers.tiny import VOCAB, FullModel, driven_by, small_world, tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.decoding import Decoder
from skipsearch.drafters.clasp import CLaSp
from skipsearch.drafters.lookup import Lookup
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.models import adapt
from skipsearch.recipe import DrafterSpec, Recipe, Siblings
from skipsearch.stats import DecodeStats, Price

from .adapted_checks import check_adapted, check_adapted_drafts, check_adapted_sampling
from .checks import PROMPTS, assert_partly_accepted
from .kangaroo_checks import check_kangaroo_drafts, check_kangaroo_passes, check_kangaroo_siblings, check_kangaroo_side_by_side
from .s3d_checks import TREE, check_s3d_drafts, check_s3d_tree_sampling, check_s3d_trees
from .sampling_checks import Warp, check_sampling

NATIVE = ("native", "native-8bit")
CHECKS = (check_adapted, check_adapted_drafts, check_kangaroo_drafts, check_kangaroo_siblings, check_kangaroo_side_by_side,
          check_s3d_drafts, check_s3d_trees)
trained = st.sampled_from([0.0, 0.1, 0.5, 30.0]).flatmap(lambda noise: st.sampled_from(
    [small_module(noise), small_kangaroo("attention", noise), small_kangaroo("layer", noise), small_s3d(), small_s3d(2)]))
exits = st.just(make_exit("fixed")) | st.floats(0, 1).map(lambda t: make_exit("confidence", threshold=t))
lookups = st.none() | st.builds(Lookup, min_match=st.integers(1, 3), draft_length=st.integers(1, 6))
siblings = st.none() | st.builds(Siblings, below=st.floats(0, 1), most=st.integers(1, 3))
requests = st.lists(st.tuples(st.sampled_from(PROMPTS) | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
                              st.integers(1, 18)), min_size=2, max_size=3)


@pytest.fixture(params=["hf", "lean", "graph", *(pytest.param(name, marks=pytest.mark.xdist_group("native")) for name in NATIVE)])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with driven_by(request.param):
        yield request.param


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes_on_every_engine(check, engine: str) -> None:
    stats = check()
    if isinstance(stats, DecodeStats):
        assert_partly_accepted(stats)


def test_requests_that_interleave_get_the_full_models_own_tokens_whatever_the_module_and_the_settings(engine: str) -> None:
    total = DecodeStats()
    model, full = small_world()

    @examples(20)
    @given(trained, st.integers(1, 6), exits, lookups, siblings, st.booleans(), requests)
    def holds(spec: DrafterSpec, length: int, policy: object, lookup: Lookup | None, siblings: Siblings | None,
              guarded: bool, several: list[tuple[tuple[int, ...], int]]) -> None:
        nonlocal total
        more = {"tree": TREE if siblings else None} if spec.kind == "s3d" else {"exit": policy, "siblings": siblings}
        drafter = spec.model_copy(update={"draft_length": length} | more)
        recipe = Recipe((drafter,) if lookup is None else (lookup, drafter))
        prices = [Price(0.4, 1.2, 3.0, 0.1)] * len(recipe.drafters) if guarded else ()
        decoder = Decoder(model, recipe, prices=prices, modules=[folder()])
        read: list[list[int]] = [[] for _ in several]
        for chunks in zip_longest(*(decoder.stream(prompt, n) for prompt, n in several)):
            for tokens, chunk in zip(read, chunks, strict=True):
                tokens.extend(chunk.tokens if chunk else ())
                total += chunk.stats if chunk and chunk.stats else DecodeStats()
        assert read == [full.greedy(prompt, n) for prompt, n in several]

    holds()
    assert_partly_accepted(total)


@pytest.mark.parametrize("spec", [small_module(0.1, 4), small_kangaroo("attention", 0.1, 4), small_s3d(2)], ids=lambda spec: spec.kind)
def test_exact_passes_verify_their_drafts_too(spec: DrafterSpec) -> None:
    model, full = small_world()
    found = Decoder(model, Recipe((spec,)), exact=True, modules=[folder()]).generate(PROMPTS[0], 16)
    assert found.tokens == full.greedy(PROMPTS[0], 16)
    assert found.stats.drafted


def test_kangaroos_drafts_are_verified_from_the_exit_layer_on() -> None:
    check_kangaroo_passes()


@pytest.mark.parametrize("siblings", [None, Siblings(below=1.0, most=2)], ids=["chain", "siblings"])
def test_a_prompt_that_goes_on_from_the_last_one_drafts_as_if_it_were_the_first(siblings: Siblings | None, engine: str) -> None:
    model, full = small_world()
    decoder = Decoder(model, Recipe((small_kangaroo("attention", 0.1, 4).model_copy(update={"siblings": siblings}),)), modules=[folder()])
    session, prompt = decoder.session(), list(PROMPTS[0])
    for _ in range(3):
        found, alone = session.generate(prompt, 8), decoder.generate(prompt, 8)
        assert found.tokens == alone.tokens == full.greedy(prompt, 8)
        assert (found.stats.rounds, found.stats.drafted) == (alone.stats.rounds, alone.stats.drafted)
        prompt += [*found.tokens, 5]
    assert found.stats.cached_tokens


def test_what_kangaroo_reads_of_the_verify_pass_is_no_choosing_of_masks() -> None:
    model, _ = small_world()
    stats = Decoder(model, Recipe((small_kangaroo(),)), modules=[folder()]).generate(PROMPTS[2], 20).stats
    assert 0 == stats.choosing_share < stats.watching_seconds < stats.decode_seconds


def test_two_drafters_that_watch_leave_each_other_the_states_they_want() -> None:
    model, full = small_world()
    recipe = Recipe((small_kangaroo("attention", 0.1, 3, 0.9), CLaSp(skip=2, interval=1, draft_length=4, exit=make_exit("fixed"))))
    total = sum((Decoder(model, recipe, modules=[folder()]).generate(prompt, 18).stats for prompt in PROMPTS), DecodeStats())
    assert [Decoder(model, recipe, modules=[folder()]).generate(prompt, 18).tokens for prompt in PROMPTS] == [
        full.greedy(prompt, 18) for prompt in PROMPTS]
    assert_partly_accepted(total)
    assert 0 < total.choosing_seconds < total.watching_seconds, "of which only one chooses masks"


def test_samples_of_adapted_drafts_are_distributed_as_the_full_models_own() -> None:
    assert_partly_accepted(check_adapted_sampling())


def test_samples_of_s3ds_drafts_are_distributed_as_the_full_models_own() -> None:
    hf = tiny_llama(3, vocab=8, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    recipe = Recipe((s3d(model, SkipMask(3, (1,), (1,)), 1, "sampling-s3d.safetensors", 3, seed=-5),))
    assert_partly_accepted(check_sampling(Warp(0.8), samples=600, model=model, recipe=recipe, length=3, prompt=(2, 0, 2, 0),
                                          next_logits=full.next_logits, modules=[folder()]))


def test_samples_of_s3ds_trees_are_distributed_as_the_full_models_own() -> None:
    assert_partly_accepted(check_s3d_tree_sampling())


def test_samples_of_kangaroos_drafts_are_distributed_as_the_full_models_own() -> None:
    hf = tiny_llama(3, vocab=5, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    recipe = Recipe((Lookup(min_match=2, draft_length=1), kangaroo(model, 1, "attention", 0.3, "sampling-early.safetensors", 2)))
    assert_partly_accepted(check_sampling(Warp(0.8), samples=600, model=model, recipe=recipe, length=3, prompt=(2, 0, 2, 0),
                                          next_logits=full.next_logits, modules=[folder()]))
