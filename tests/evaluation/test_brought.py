"""How often drafts are right, by match length and by confidence, counted again by hand."""

from __future__ import annotations

import numpy as np
from helpers.tiny import LAYERS, small_world

from skipsearch.decoding.sampling import Sampling
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.evaluation.brought import brought
from skipsearch.evaluation.lookups import Lookups
from skipsearch.evaluation.replay import Replay
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe

from .test_replay_exact import PROMPTS

MASK = SkipMask(LAYERS, (1,), (2, 3))
SKIP = Skip.of(MASK, 4, make_exit("fixed"))


def test_every_position_is_counted_once_at_the_first_drafter_that_would_draft_there() -> None:
    replay = Replay(small_world()[0], PROMPTS, 24, end_on_repeat=None)
    lookups = Lookups(replay.prompts, replay.tokens)
    positions = sum(len(text) - 1 for text in replay.tokens)
    alone, behind = (brought(Recipe(recipe), replay, lookups) for recipe in ((SKIP,), (Lookup(min_match=1, draft_length=4), SKIP)))
    assert sum(g.positions for g in alone) == sum(g.positions for g in behind) == positions
    assert sum(g.right for g in alone) == sum(int(r.agrees.sum()) for r in replay(MASK))
    assert {(g.drafter, g.by) for g in behind} == {(0, "match length"), (1, "confidence")}
    copied = lookups(Lookup(min_match=1, draft_length=4), range(len(PROMPTS)))
    offered = copied.offered > 0
    assert sum(g.right for g in behind if g.drafter == 0) == int((copied.right[offered] > 0).sum())
    confidence, agrees = (np.concatenate([getattr(r, name) for r in replay(MASK)]) for name in ("confidence", "agrees"))
    for group in (g for g in behind if g.drafter == 1):
        these = ~offered & (confidence >= group.low) & ((confidence < group.high) | (group.high == 1))
        assert (group.positions, group.right) == (these.sum(), agrees[these].sum())


def test_of_sampled_text_nothing_is_said() -> None:
    replay = Replay(small_world()[0], PROMPTS, 8, None, sampling=Sampling(0.7))
    assert brought(Recipe((SKIP,)), replay, None) == []
