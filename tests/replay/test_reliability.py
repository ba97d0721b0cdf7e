"""How often drafts are right, by match length and by confidence, counted again by hand."""

from __future__ import annotations

import numpy as np
from helpers.tiny import LAYERS, tiny_model_and_reference

from replay.test_replay_exact import PROMPTS
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.sampler import SamplingParams
from skipsearch.replay.lookup_replay import LookupReplay
from skipsearch.replay.reliability import compute_reliability
from skipsearch.replay.replay import Replay

MASK = SkipMask(LAYERS, (1,), (2, 3))
SKIP = Skip.from_mask(MASK, 4, make_exit("fixed"))


def test_every_position_is_counted_once_at_the_first_drafter_that_would_draft_there() -> None:
    replay = Replay(tiny_model_and_reference()[0], PROMPTS, 24, end_on_repeat=None)
    lookups = LookupReplay(replay.prompt_ids, replay.continuations)
    positions = sum(len(text) - 1 for text in replay.continuations)
    alone, behind = (
        compute_reliability(Recipe(recipe), replay, lookups)
        for recipe in ((SKIP,), (Lookup(min_match=1, draft_length=4), SKIP))
    )
    assert sum(g.positions for g in alone) == sum(g.positions for g in behind) == positions
    assert sum(g.right for g in alone) == sum(int(r.acceptance.sum()) for r in replay(MASK))
    assert {(g.drafter, g.by) for g in behind} == {(0, "match length"), (1, "confidence")}
    copied = lookups(Lookup(min_match=1, draft_length=4), range(len(PROMPTS)))
    offered = copied.n_proposed > 0
    assert sum(g.right for g in behind if g.drafter == 0) == int(
        (copied.accepted_len[offered] > 0).sum()
    )
    confidence, agrees = (
        np.concatenate([getattr(r, name) for r in replay(MASK)])
        for name in ("confidence", "acceptance")
    )
    for group in (g for g in behind if g.drafter == 1):
        these = (
            ~offered & (confidence >= group.low) & ((confidence < group.high) | (group.high == 1))
        )
        assert (group.positions, group.right) == (these.sum(), agrees[these].sum())


def test_of_sampled_text_nothing_is_said() -> None:
    replay = Replay(tiny_model_and_reference()[0], PROMPTS, 8, None, sampling=SamplingParams(0.7))
    assert compute_reliability(Recipe((SKIP,)), replay, None) == []
