"""Decoding with drafts that read less emits the full model's tokens."""

from __future__ import annotations

import pytest
from helpers.marks import thorough
from helpers.tiny import LAYERS, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.swift.spec import SWIFT

from .checks import FEW_TOKENS, PROMPTS, Drafting, assert_partly_accepted
from .reduced_checks import REDUCED, check_known_tokens, check_reduced_greedy, check_reduced_law
from .sampling_checks import Warp

pytestmark = pytest.mark.xdist_group("native")


def test_greedy_tokens_are_the_full_models_own() -> None:
    check_reduced_greedy()


def test_tokens_of_the_vocabulary_and_of_the_text_so_far_can_be_drafted() -> None:
    check_known_tokens()


@pytest.mark.parametrize("warp", [Warp(1.7, top_p=0.95), *thorough(Warp())], ids=str)
def test_sampled_texts_have_the_full_models_probabilities(warp: Warp) -> None:
    check_reduced_law(warp)


def test_siblings_from_a_part_of_the_vocabulary_leave_the_distribution_unchanged() -> None:
    check_reduced_law(siblings=Siblings(below=1.0, most=1))


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_a_drafter_that_learns_its_mask_reads_less(engine: str) -> None:
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    spec = SWIFT(skip_ratio=0.3, window=4, draft_length=4, exit=Fixed(), vocabulary=FEW_TOKENS)
    decoder, total = Decoder(model, Recipe((spec,))), DecodeStats()
    assert decoder.is_learning
    for prompt in PROMPTS:
        result = decoder.generate(prompt, 16)
        assert result.tokens == full.greedy(prompt, 16)
        total += result.stats
    assert_partly_accepted(total)


@pytest.mark.parametrize("weights", ["stored", "int4"])
def test_requests_of_a_batch_get_the_full_models_own_tokens(weights: str) -> None:
    with use_engine("native"):
        model, full = tiny_model_and_reference()
    drafting = Drafting(SkipMask(LAYERS, (1,)), 4, reading=Reading(weights, FEW_TOKENS))  # type: ignore[arg-type]
    results = drafting.decoder(model).generate_batch([Request(p, 12) for p in PROMPTS])
    assert [r.tokens for r in results] == [full.greedy(prompt, 12) for prompt in PROMPTS]
    total = results[0].stats
    for result in results[1:]:
        total += result.stats
    assert_partly_accepted(total)


def test_a_draft_of_all_bits_and_tokens_is_always_accepted_and_one_of_fewer_is_not() -> None:
    with use_engine("native"):
        model, full = tiny_model_and_reference()
        fractions = []
        for reading in (Reading("int8"), REDUCED[0].reading, Reading("int4", FEW_TOKENS)):
            decoder = Drafting(SkipMask(LAYERS), 5, reading=reading).decoder(model)
            result = decoder.generate(PROMPTS[2], 20)
            assert result.tokens == full.greedy(PROMPTS[2], 20)
            fractions.append(result.stats.accepted / result.stats.drafted)
    assert fractions[0] >= fractions[1] >= fractions[2]
    assert fractions[2] < 1
