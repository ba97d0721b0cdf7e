"""Checks of processed requests.

A processor sees the emitted text, one token longer at each call, and decides every token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny import LAYERS, tiny_model_and_reference, with_eos, with_tokenizer

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip

PROMPT = (5, 17, 40, 3)
RECIPE = Recipe(
    (
        Lookup(min_match=1, draft_length=4),
        Skip.from_mask(SkipMask(LAYERS, (1, 3), (2,)), 4, make_exit("fixed")),
    )
)


def check_steering(limit: int = 40) -> DecodeStats:
    """Check a ban that depends on the text, on drafted and plain decoding.

    The expected tokens follow from the rule applied to the full model's own logits.
    """
    model, full = tiny_model_and_reference()
    expected = list(PROMPT)
    for _ in range(limit):
        logits = full.next_logits(expected)
        logits[expected[-1] % 3 :: 3] = -float(
            "inf"
        )  # which is what full model and draft alike would often take
        expected.append(int(logits.argmax()))
    total = DecodeStats()
    for recipe in (Recipe(), RECIPE):
        seen: list[list[int]] = []

        def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(ids[0].tolist())  # noqa: B023
            scores[0, int(ids[0, -1]) % 3 :: 3] = -torch.inf
            return scores

        result = Decoder(model, recipe).generate(PROMPT, limit, processors=(ban,))
        assert result.tokens == expected[len(PROMPT) :]
        assert seen == [expected[: len(PROMPT) + i] for i in range(limit)]
        total += result.stats
    return total


class Grammar:
    """A processor with a final state. It counts its calls, and fails at one more than allowed."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self.left, f"called for a token behind the end of the text, {ids.tolist()}"
        self.left -= 1
        return scores


def check_steering_ends() -> DecodeStats:
    """Check that no processor is called after the last token of a text.

    Texts end for every reason, also within a draft, alone and in a batch.
    """
    model, full = tiny_model_and_reference()
    tokenizer, tokens = byte_tokenizer(), full.greedy(PROMPT, 30)
    total = DecodeStats()
    for at in (0, 2, 4, 7, 10):
        text = tokenizer.decode(tokens[: at + 1])
        ends: list[tuple[str, dict[str, Any], int | None]] = [
            ("length", {"max_new_tokens": at + 1}, None),
            ("eos", {}, tokens[at]),
        ]
        if not text.endswith("\ufffd"):
            ends.append(("stop", {"stop": text[-3:]}, None))
        for reason, asked, eos in ends:
            ready = with_tokenizer(model if eos is None else with_eos(model, eos), tokenizer)
            request = Request(PROMPT, **{"max_new_tokens": 30, **asked})
            expected = Decoder(ready).generate(request)
            assert expected.finish_reason == reason
            for recipe in (
                Recipe(),
                RECIPE,
                Recipe((Skip.from_mask(SkipMask(LAYERS), 12, make_exit("fixed")),)),
            ):
                decoder = Decoder(ready, recipe)
                processed = [
                    replace(request, processors=(Grammar(len(expected.tokens)),)) for _ in range(3)
                ]
                for result in (
                    decoder.generate(processed[0]),
                    *decoder.generate_batch(processed[1:], max_requests=2),
                ):
                    assert (result.tokens, result.finish_reason, result.text) == (
                        expected.tokens,
                        reason,
                        expected.text,
                    )
                    total += result.stats
    return total
