"""Checks of decoding under a constraint. The expected text is that of a loop without skipsearch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from helpers.drafting import wrap_drafters
from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference, with_eos
from helpers.toy_constraint import Rule, constrained_by, make_rule
from numpy.typing import NDArray
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Generation, Request
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import DecodeError
from skipsearch.models import adapt

from .checks import (
    DRAFTINGS,
    FEW_TOKENS,
    MASKS,
    PROMPTS,
    REQUESTS,
    Drafting,
    assert_partly_accepted,
)
from .count_checks import Recorder
from .enumeration_checks import Law, check_law
from .sampling_checks import Warp

EOS = 63
FEW = 6  # tokens of the model whose texts are enumerated


def masked_logits(
    full: FullModel, prompt: Sequence[int], rule: Rule, text: Sequence[int]
) -> NDArray[np.float64]:
    """Return the logits of the next token; -inf for what the rule forbids."""
    logits = full.next_logits([*prompt, *text])
    masked = np.full_like(logits, -np.inf)
    legal = list(rule(tuple(text))[0])
    masked[legal] = logits[legal]
    return masked


def masked_greedy(
    full: FullModel, prompt: Sequence[int], rule: Rule, n: int, eos: int
) -> list[int]:
    """Return the greedy text of the masked model, up to its end or `n` tokens."""
    text: list[int] = []
    while len(text) < n and eos not in text:
        text.append(int(masked_logits(full, prompt, rule, text).argmax()))
    return text


def keep_scores(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that changes nothing."""
    return scores


def check_constrained_greedy(
    draftings: Sequence[Drafting | None] = (None, *DRAFTINGS),
    seeds: Sequence[int] = (0, 1),
    requests: Sequence[tuple[tuple[int, ...], int]] = REQUESTS,
    batch: bool = False,
) -> DecodeStats:
    """Check greedy texts: plain and drafted, with processors and without, alone or in a batch."""
    model, full = tiny_model_and_reference()
    model = with_eos(model, EOS)
    total = DecodeStats()
    for seed in seeds:
        rule = make_rule(seed, VOCAB, EOS)
        texts = {prompt: masked_greedy(full, prompt, rule, n, EOS) for prompt, n in requests}
        with constrained_by(rule, EOS):
            for drafting in draftings:
                decoder = Decoder(model) if drafting is None else drafting.decoder(model)
                asked = [
                    (Request(prompt, n, processors=processors), prompt)
                    for prompt, n in requests
                    for processors in ((), (keep_scores,))
                ]
                only = [request for request, _ in asked]
                try:
                    results: list[Generation] = (
                        decoder.generate_batch(only) if batch else [*map(decoder.generate, only)]
                    )
                except DecodeError as error:  # an illegal token was emitted
                    raise AssertionError(drafting, seed) from error
                for result, (_, prompt) in zip(results, asked, strict=True):
                    expected = texts[prompt]
                    assert result.tokens == expected, (drafting, seed, prompt)
                    assert result.finish_reason == ("eos" if EOS in expected else "length")
                    total += result.stats
    assert_partly_accepted(total)
    return total


def check_constrained_counts() -> DecodeStats:
    """Check what rounds accept of trees whose main path may be illegal, and what a drafter learns.

    The nodes that it is told are the accepted tokens, in its own draft.
    """
    model, _ = tiny_model_and_reference()
    model = with_eos(model, EOS)
    drafting = Drafting(MASKS[0], 5, siblings=Siblings(below=1.0, most=3))
    total, n_siblings = DecodeStats(), 0
    for seed, prompt in product(range(4), PROMPTS):
        decoder = wrap_drafters(drafting.decoder(model), Recorder)
        [(_, recorder)] = decoder.loop.drafters
        assert isinstance(recorder, Recorder)
        with constrained_by(make_rule(seed, VOCAB, EOS), EOS):
            result = decoder.generate(prompt, 20)
        text, stats = [*prompt, *result.tokens], result.stats.by_drafter[0]
        for history, draft, trunk, nodes in zip(
            recorder.histories, recorder.drafts, recorder.trunks, recorder.verified, strict=True
        ):
            emitted = text[len(history) :][: len(nodes)]  # the end of the text may cut the accepted
            assert [draft[node - 1] for node in nodes][: len(emitted)] == emitted
            n_siblings += sum(node > trunk for node in nodes)
        assert all(rate <= 1 for rate in stats.acceptance_by_position)
        total += result.stats
    assert_partly_accepted(total)
    assert n_siblings > 0
    return total


def check_constrained_law(
    siblings: Siblings | None = None, lookup: bool = False, few_tokens: bool = False
) -> Law:
    """Check that every sampled text has the masked model's probability."""
    hf = tiny_llama(layers=2, vocab=FEW, hidden=16)
    full, prompt, rule = FullModel(hf), (1, 4, 1), make_rule(5, FEW, -1)
    reading = Reading(vocabulary=FEW_TOKENS.from_ids((1, 4, 5))) if few_tokens else Reading()
    skip = Skip.from_mask(SkipMask(2, (0,)), 2, make_exit("fixed"), siblings, reading)
    recipe = Recipe((*([Lookup(min_match=1, draft_length=2)] if lookup else []), skip))

    class Masked(FullModel):
        def next_logits(self, history: Sequence[int]) -> NDArray[np.float64]:
            return masked_logits(full, prompt, rule, history[len(prompt) :])

    with constrained_by(rule, -1):
        return check_law(Decoder(adapt(hf), recipe), Masked(hf), prompt, 3, Warp(1.2))
