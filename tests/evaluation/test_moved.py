"""How masks moved over a generation is what the drafter's session did, round by round."""

from __future__ import annotations

from helpers.tiny import LAYERS, small_world

from skipsearch.decoding import Decoder
from skipsearch.decoding.sampling import Sampling
from skipsearch.drafters.clasp import CLaSp
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.evaluation.moved import moved
from skipsearch.evaluation.prompts import Workload
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe

FIXED = make_exit("fixed")
PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7))
WORK = Workload(("a", "b", "c"), PROMPTS, 30, None, Sampling())
CLASP = CLaSp(skip=2, interval=1, draft_length=3, exit=FIXED)


def test_rounds_and_masks_are_those_of_one_generation() -> None:
    model, _ = small_world()
    found = moved(model, Recipe((Lookup(min_match=1, draft_length=2), CLASP)), WORK)
    assert found is not None
    assert found.drafter == 1
    totals = [Decoder(model, Recipe((Lookup(min_match=1, draft_length=2), CLASP))).generate(prompt, 30).stats for prompt in PROMPTS]
    counted = [[(d.rounds, d.drafted, d.accepted) for d in stats.by_drafter] for stats in totals]
    mine = [[r for r in found.rounds if r[0] == by] for by in (0, 1)]
    assert [(len(r), sum(d for _, d, _ in r), sum(a for _, _, a in r)) for r in mine] in counted
    starts = [at for at, _ in found.masks]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] < len(found.rounds)
    assert len(found.masks) > 2
    assert all(len(bits) == 2 * LAYERS and sum(bits) == 4 for _, bits in found.masks)


def test_a_mask_that_stays_has_nothing_to_show() -> None:
    model, _ = small_world()
    assert moved(model, Recipe((Skip.of(SkipMask(LAYERS, (1,), (2,)), 3, FIXED),)), WORK) is None
    assert moved(model, Recipe(()), WORK) is None
