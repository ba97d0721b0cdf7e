"""The acceptance of drafts by match length (lookup) or by confidence (skip).

Both are known before the full model verifies the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skipsearch.core.recipe import Recipe
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.replay.lookup_replay import LookupReplay
from skipsearch.replay.replay import PromptReplay, Replay

# A bin includes its lower edge and excludes its upper edge; the last bin includes both.
MATCH_LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 17)  # tokens
CONFIDENCE_EDGES = tuple(k / 10 for k in range(11))  # top probabilities


@dataclass(frozen=True)
class ReliabilityBin:
    """The positions of the calibration text at which a drafter is about equally confident.

    Its confidence is a match length or a top probability. Positions at which it drafts nothing are
    in no bin.
    """

    drafter: int  # index in the recipe
    by: str  # "match length" or "confidence"
    low: float
    high: float
    positions: int
    right: int  # positions where it predicts the next token


def compute_reliability(
    recipe: Recipe, replay: Replay, lookups: LookupReplay | None
) -> list[ReliabilityBin]:
    """Return the bins of each drafter, from the positions at which no earlier drafter proposes.

    Returns [] if the text was sampled.
    """
    prompts = [i for i, text in enumerate(replay.continuations) if len(text) > 1]
    if not replay.sampling.is_greedy or not prompts:
        return []
    remaining = np.ones(sum(len(replay.continuations[p]) - 1 for p in prompts), dtype=bool)
    bins: list[ReliabilityBin] = []
    for k, drafter in enumerate(recipe.drafters):
        if isinstance(drafter, Lookup) and lookups is not None:
            proposals, matched = lookups(drafter, prompts), lookups.match_lengths(prompts)
            drafts = remaining & (proposals.n_proposed > 0)
            bins += _count_bins(
                k,
                "match length",
                MATCH_LENGTH_EDGES,
                matched[drafts],
                proposals.accepted_len[drafts] > 0,
            )
            remaining &= ~drafts
        elif isinstance(drafter, Skip):
            replayed: Sequence[PromptReplay] = replay(drafter.mask(replay.model.spec.n_layers))
            confidence, is_right = (
                np.concatenate([getattr(r, name) for r in replayed])
                for name in ("confidence", "acceptance")
            )
            bins += _count_bins(
                k, "confidence", CONFIDENCE_EDGES, confidence[remaining], is_right[remaining]
            )
    return bins


def _count_bins(
    drafter: int, by: str, edges: Sequence[float], values: np.ndarray, correct: np.ndarray
) -> Iterator[ReliabilityBin]:
    for low, high in pairwise(edges):
        in_bin = (values >= low) & ((values < high) | (high == edges[-1]))
        if in_bin.any():
            yield ReliabilityBin(
                drafter, by, low, high, int(in_bin.sum()), int(correct[in_bin].sum())
            )
