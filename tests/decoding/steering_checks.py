"""What processed requests promise: each processor sees the emitted text, one token longer at each call, and decides every token."""

from __future__ import annotations

import torch
from helpers.tiny import LAYERS, small_world

from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats

PROMPT = (5, 17, 40, 3)
RECIPE = Recipe((Lookup(min_match=1, draft_length=4), Skip.of(SkipMask(LAYERS, (1, 3), (2,)), 4, make_exit("fixed"))))


def check_steering(limit: int = 40) -> DecodeStats:
    """A ban that depends on the text so far, on drafted and plain decoding, against the rule applied to the full model's own logits."""
    model, full = small_world()
    expected = list(PROMPT)
    for _ in range(limit):
        logits = full.next_logits(expected)
        logits[expected[-1] % 3::3] = -float("inf")   # which is what full model and draft alike would often take
        expected.append(int(logits.argmax()))
    total = DecodeStats()
    for recipe in (Recipe(), RECIPE):
        seen: list[list[int]] = []

        def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(ids[0].tolist())   # noqa: B023
            scores[0, int(ids[0, -1]) % 3::3] = -torch.inf
            return scores

        result = Decoder(model, recipe).generate(PROMPT, limit, processors=(ban,))
        assert result.tokens == expected[len(PROMPT):]
        assert seen == [expected[:len(PROMPT) + i] for i in range(limit)]
        total += result.stats
    return total
