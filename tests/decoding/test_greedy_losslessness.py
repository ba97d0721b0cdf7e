"""Greedy decoding in fp64: for every mask, all tokens are the full model's own."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from helpers.marks import thorough
from helpers.properties import with_examples
from helpers.tiny import LAYERS, VOCAB, FullModel, tiny_llama, tiny_model_and_reference, use_engine
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import DRAFT_WEIGHTS, READ_ALL, Reading, Vocabulary
from skipsearch.core.recipe import Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import EXITS
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.models import adapt

from .checks import (
    MASKS,
    PROMPTS,
    Drafting,
    assert_partly_accepted,
    check_greedy,
    check_streams_side_by_side,
)

shares = st.floats(0, 1)
parameters = {
    "fixed": st.just({}),
    "confidence": st.fixed_dictionaries({"threshold": shares}),
    "adaptive": st.fixed_dictionaries(
        dict.fromkeys(("threshold", "target_acceptance", "step", "beta1", "beta2"), shares)
    ),
}
masks = st.integers(0, 2 ** (2 * LAYERS) - 1).map(
    lambda n: SkipMask.from_bits([n >> i & 1 for i in range(2 * LAYERS)])
)
light_masks = st.sets(st.integers(0, 2 * LAYERS - 1), max_size=3).map(
    lambda s: SkipMask.from_sublayers(LAYERS, s)
)
lookups = st.builds(
    Lookup,
    min_match=st.integers(1, 4),
    draft_length=st.integers(1, 12),
    per_match=st.none() | st.integers(1, 3),
)
vocabularies = st.builds(
    Vocabulary.from_ids, st.sets(st.integers(0, VOCAB - 1), max_size=20), st.integers(0, VOCAB)
)
readings = st.builds(Reading, st.sampled_from(DRAFT_WEIGHTS), st.none() | vocabularies) | st.just(
    READ_ALL
)
siblings = st.builds(Siblings, below=shares | st.just(1.0), most=st.integers(1, 4))
draftings = st.sampled_from(sorted(EXITS)).flatmap(
    lambda kind: st.builds(
        Drafting,
        mask=st.none() | masks | light_masks,
        draft_length=st.integers(1, 12),
        exit=st.just(kind),
        parameters=parameters[kind],
        lookup=st.none() | lookups,
        guarded=st.booleans(),
        siblings=st.none() | siblings,
        reading=readings,
    )
)
prompts = st.sampled_from(PROMPTS) | st.lists(
    st.integers(0, VOCAB - 1), min_size=1, max_size=12
).map(tuple)
requests = st.tuples(prompts, st.integers(1, 20))


def test_greedy_tokens_are_the_full_models_own_for_every_mask_draft_length_and_request() -> None:
    total = DecodeStats()

    @with_examples(60)
    @given(draftings, requests)
    def holds(drafting: Drafting, request: tuple[tuple[int, ...], int]) -> None:
        nonlocal total
        total += check_greedy([drafting], [request])

    holds()
    assert_partly_accepted(total)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["hf", "lean", "graph", "native", "native-8bit-float-activations"]
)
def test_that_holds_of_thousands_of_recipes_and_of_requests_that_interleave(engine: str) -> None:
    """Run it by hand: `pytest -m slow tests/decoding -s`.

    It uses float64, with lookup, skip, both and neither, guarded and not.
    """
    total, cases = DecodeStats(), 0
    with use_engine(engine):
        model, full = tiny_model_and_reference()

    @with_examples(1700)
    @given(draftings, st.lists(requests, min_size=3, max_size=3))
    def holds(drafting: Drafting, several: list[tuple[tuple[int, ...], int]]) -> None:
        nonlocal total, cases
        decoder = drafting.decoder(model)
        read: list[list[int]] = [[] for _ in several]
        for chunks in zip_longest(*(decoder.stream(prompt, n) for prompt, n in several)):
            for tokens, chunk in zip(read, chunks, strict=True):
                tokens.extend(chunk.tokens if chunk else ())
                total += chunk.stats if chunk and chunk.stats else DecodeStats()
        assert read == [full.greedy(prompt, n) for prompt, n in several]
        cases += len(several)

    holds()
    assert_partly_accepted(total)
    print(
        f"\n{engine}: {cases} requests, {total.drafted} tokens drafted, {total.accepted} accepted, "
        f"{total.rejecting_rounds} rejecting "
        "rounds"
    )


def test_requests_one_after_the_other_on_one_decoder_do_not_disturb_each_other() -> None:
    total = DecodeStats()

    @with_examples(15)
    @given(draftings, st.lists(requests, min_size=2, max_size=4))
    def holds(drafting: Drafting, several: list[tuple[tuple[int, ...], int]]) -> None:
        nonlocal total
        total += check_greedy([drafting], several)

    holds()
    assert_partly_accepted(total)


def test_a_request_too_long_for_the_kept_cache_gets_a_larger_one_and_shorter_ones_go_on_in_it() -> (
    None
):
    hf = tiny_llama(layers=2, hidden=16, context=400)
    model, full = adapt(hf), FullModel(hf)
    decoder = Decoder(model, SkipMask(2, (1,), (1,)), draft_length=5)
    long = tuple(i * 7 % VOCAB for i in range(300))
    for prompt, n in [((4, 5), 6), (long, 12), ((4, 5), 9), (long[:250], 12)]:
        assert decoder.generate(prompt, n).tokens == full.greedy(prompt, n)


def test_two_streams_of_one_decoder_read_in_turns_do_not_disturb_each_other() -> None:
    check_streams_side_by_side()


def test_a_stream_that_nobody_finishes_leaves_the_decoder_as_it_was() -> None:
    model, full = tiny_model_and_reference()
    decoder = Drafting().decoder(model)
    stream = decoder.stream(PROMPTS[0], 16)
    next(stream)
    del stream
    assert decoder.generate(PROMPTS[1], 10).tokens == full.greedy(PROMPTS[1], 10)


def test_without_a_profile_the_same_tokens_come_one_a_round() -> None:
    model, full = tiny_model_and_reference()
    for prompt in PROMPTS:
        result = Decoder(model).generate(prompt, 12)
        assert result.tokens == full.greedy(prompt, 12)
        assert (
            result.stats.rounds,
            result.stats.drafted,
            result.stats.tau,
            result.stats.alpha,
        ) == (11, 0, 1.0, None)


def test_a_mask_that_skips_nothing_drafts_what_the_full_model_says_and_all_of_it_is_accepted() -> (
    None
):
    stats = check_greedy([Drafting(SkipMask(LAYERS), n) for n in (1, 3, 12)])
    assert stats.accepted == stats.drafted > 0
    assert stats.rejecting_rounds == 0


def test_a_mask_that_skips_everything_is_lossless_too() -> None:
    everything = SkipMask.from_layers(LAYERS, range(LAYERS))
    assert_partly_accepted(check_greedy([Drafting(everything, n) for n in (1, 6)]))


@pytest.mark.parametrize("prompt_length", [1, 2, 63, 64, 65])
def test_prompts_of_any_length_are_continued_exactly(prompt_length: int) -> None:
    check_greedy(
        [Drafting(MASKS[1], 3)], [(tuple(i * 11 % VOCAB for i in range(prompt_length)), 8)]
    )


@pytest.mark.parametrize("seed", [1, *thorough(2)])
def test_other_weights_are_decoded_losslessly(seed: int) -> None:
    assert_partly_accepted(check_greedy(world=tiny_model_and_reference(seed)))
