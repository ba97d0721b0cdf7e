"""How often a draft's next token is right, by what a drafter knows beforehand: lookup how much of the text matched, skip how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.evaluation.lookups import Lookups
from skipsearch.evaluation.replay import Replay, Replayed
from skipsearch.recipe import Recipe

MATCHES = (1, 2, 3, 4, 6, 8, 17)                  # tokens that matched: from each of these to below the next
CONFIDENCES = tuple(k / 10 for k in range(11))    # the same of top probabilities; the last one is included


@dataclass(frozen=True)
class Group:
    """Positions of the calibration text at which one drafter would draft, alike in what it knows. drafter: its place in the recipe, from 0.
    by: "match length" or "confidence", from `low` up to `high`. right: positions whose next token it names."""

    drafter: int
    by: str
    low: float
    high: float
    positions: int
    right: int


def brought(recipe: Recipe, replay: Replay, lookups: Lookups | None) -> list[Group]:
    """Groups of each drafter, at the positions that those before it leave over; none of a text that was sampled."""
    prompts = [i for i, text in enumerate(replay.tokens) if len(text) > 1]
    if not replay.sampling.greedy or not prompts:
        return []
    left = np.ones(sum(len(replay.tokens[p]) - 1 for p in prompts), dtype=bool)
    found: list[Group] = []
    for k, drafter in enumerate(recipe.drafters):
        if isinstance(drafter, Lookup) and lookups is not None:
            copied, matched = lookups(drafter, prompts), lookups.matched(prompts)
            asked = left & (copied.offered > 0)
            found += _groups(k, "match length", MATCHES, matched[asked], copied.right[asked] > 0)
            left &= ~asked
        elif isinstance(drafter, Skip):
            replayed: Sequence[Replayed] = replay(drafter.mask(replay.model.spec.n_layers))
            sure, right = (np.concatenate([getattr(r, name) for r in replayed]) for name in ("confidence", "agrees"))
            found += _groups(k, "confidence", CONFIDENCES, sure[left], right[left])
    return found


def _groups(drafter: int, by: str, edges: Sequence[float], known: np.ndarray, right: np.ndarray) -> Iterator[Group]:
    for low, high in pairwise(edges):
        these = (known >= low) & ((known < high) | (high == edges[-1]))
        if these.any():
            yield Group(drafter, by, low, high, int(these.sum()), int(right[these].sum()))
