"""Checks of decoding with drafts that read fewer bits or fewer tokens of the vocabulary."""

from __future__ import annotations

from helpers.tiny import LAYERS, FullModel, tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models import adapt

from .checks import FEW_TOKENS, PROMPTS, Drafting, assert_partly_accepted, check_greedy
from .enumeration_checks import Law, check_law
from .sampling_checks import Warp

REDUCED = (
    Drafting(SkipMask(LAYERS), 5, reading=Reading("int4")),
    Drafting(SkipMask(LAYERS, (1,)), 6, reading=Reading("int5", FEW_TOKENS)),
    Drafting(
        SkipMask(LAYERS),
        4,
        siblings=Siblings(below=0.9, most=3),
        reading=Reading("int8", FEW_TOKENS),
    ),
    Drafting(SkipMask(LAYERS), 7, reading=Reading(vocabulary=FEW_TOKENS)),
)
FEW = 6  # tokens of the model whose texts are enumerated
OF_TWO = Warp(1.3, top_k=3)


def check_reduced_greedy() -> DecodeStats:
    """Check greedy text with reduced drafts on three engines; some drafts must be rejected."""
    total = DecodeStats()
    for engine in ("hf", "native", "graph"):
        with use_engine(engine):
            total += check_greedy(REDUCED, world=tiny_model_and_reference())
    assert_partly_accepted(total)
    return total


def check_reduced_law(warp: Warp = OF_TWO, siblings: Siblings | None = None) -> Law:
    """Check that every sampled text has the full model's probability.

    The draft's vocabulary lacks tokens that the full model draws.
    """
    hf = tiny_llama(layers=2, vocab=FEW, hidden=16)
    reading = Reading(vocabulary=Vocabulary(lowest=0, tokens="1 4"))
    skip = Skip.from_mask(SkipMask(2, (0,)), 2, make_exit("fixed"), siblings, reading)
    return check_law(Decoder(adapt(hf), Recipe((skip,))), FullModel(hf), (1, 4), 3, warp)


def check_known_tokens() -> DecodeStats:
    """Check that a draft with all layers and bits is accepted if its vocabulary has the text.

    The prompt and the text so far bring some of the tokens, the vocabulary the others.
    """
    total = DecodeStats()
    for engine in ("hf", "native", "graph"):
        with use_engine(engine):
            model, full = tiny_model_and_reference()
        for prompt in PROMPTS:
            text = full.greedy(prompt, 20)
            brought = {*prompt, *text[:8]}
            vocabulary = Vocabulary.from_ids(token for token in text if token not in brought)
            drafting = Drafting(SkipMask(LAYERS), 4, reading=Reading(vocabulary=vocabulary))
            result = drafting.decoder(model).generate((*prompt, *text[:8]), 12)
            assert result.tokens == text[8:]
            assert result.stats.accepted == result.stats.drafted > 0, (engine, prompt)
            total += result.stats
    return total
