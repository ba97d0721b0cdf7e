"""Many draft policies over the same rounds at once: the same counts as `simulate`, policy for policy.

What a policy does at an anchor depends on the anchor alone for `fixed` and `confidence`, so every round is worked out once and only the
walk from anchor to anchor is left, all prompts and policies in step. `adaptive` carries its threshold from round to round and from prompt
to prompt, so there only the policies go in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from skipsearch.evaluation.rounds import Rounds
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.searchers.base import Costs


def sweep(rounds: Rounds, mask: SkipMask, policies: Sequence[DraftPolicy], costs: Costs) -> np.ndarray:
    """Predicted decode seconds [policies, prompts]. Kinds: fixed, confidence, adaptive.

    Raises: ValueError for another kind: `simulate` walks any.
    """
    unknown = {p.kind for p in policies} - {"fixed", "confidence", "adaptive"}
    if unknown:
        raise ValueError(f"a sweep knows no exit policy {sorted(unknown)[0]!r}; simulate walks any")
    learning = np.array([p.kind == "adaptive" for p in policies], dtype=bool)
    price = np.array(costs.rounds(mask, rounds.longest))
    seconds = np.empty((len(policies), len(rounds.first)))
    for chosen, walk in ((learning, _adaptive), (~learning, _memoryless)):
        if chosen.any():
            seconds[chosen] = walk(rounds, [p for p, c in zip(policies, chosen, strict=True) if c], price)
    return seconds


def _memoryless(rounds: Rounds, policies: Sequence[DraftPolicy], price: np.ndarray) -> np.ndarray:
    """price [K + 1]: seconds of a round with so many drafted tokens."""
    thresholds = [p.parameters["threshold"] if p.kind == "confidence" else 0.0 for p in policies]
    stops = {t: _first_under(rounds.confidence, t) for t in set(thresholds)}
    most = np.minimum([[min(p.draft_length, rounds.longest)] for p in policies], rounds.room)   # [P, A]
    drafted = np.minimum(np.stack([stops[t] for t in thresholds]), most)
    accepted = np.minimum(rounds.right, drafted)
    n_policies, n_anchors = drafted.shape
    end = np.repeat(rounds.first + rounds.lengths, rounds.lengths)
    following = np.arange(n_anchors) + accepted + 1
    # Behind the last anchor stands one more, where every walk comes to rest for nothing.
    following = np.pad(np.where(following < end, following, n_anchors), ((0, 0), (0, 1)), constant_values=n_anchors).ravel()
    spent = np.pad(price[drafted], ((0, 0), (0, 1))).ravel()
    row = (np.arange(n_policies) * (n_anchors + 1))[:, None]
    at = np.broadcast_to(rounds.first, (n_policies, len(rounds.first)))
    seconds = np.zeros(at.shape)
    while (at < n_anchors).any():
        seconds += spent[row + at]
        at = following[row + at]
    return seconds


def _adaptive(rounds: Rounds, policies: Sequence[DraftPolicy], price: np.ndarray) -> np.ndarray:
    defaults = [p.make().parameters() for p in policies]
    threshold, target, step, beta1, beta2 = (np.array([d[name] for d in defaults]) for name in
                                             ("threshold", "target_acceptance", "step", "beta1", "beta2"))
    length = np.array([min(p.draft_length, rounds.longest) for p in policies])
    rate = np.full(len(policies), np.nan)   # none yet
    end = np.repeat(rounds.first + rounds.lengths, rounds.lengths)
    prompt = np.repeat(np.arange(len(rounds.first)), rounds.lengths)
    at, walking = np.zeros(len(policies), dtype=int), np.arange(len(policies))
    seconds = np.zeros((len(policies), len(rounds.first)))
    while len(walking):
        a = at[walking]
        most = np.minimum(length[walking], rounds.room[a])
        drafted = np.minimum(_first_under(rounds.confidence[a], threshold[walking, None]), most)
        accepted = np.minimum(rounds.right[a], drafted)
        seconds[walking, prompt[a]] += price[drafted]
        at[walking] = np.minimum(a + accepted + 1, end[a])
        told = walking[drafted > 0]   # a round without room drafts nothing, and says nothing
        share = (accepted / np.maximum(drafted, 1))[drafted > 0]
        rate[told] = np.where(np.isnan(rate[told]), share, beta1[told] * rate[told] + (1 - beta1[told]) * share)
        wanted = threshold[told] + np.where(rate[told] <= target[told], step[told], -step[told])
        threshold[told] = np.clip(beta2[told] * threshold[told] + (1 - beta2[told]) * wanted, 0.0, 1.0)
        walking = walking[at[walking] < len(prompt)]
    return seconds


def _first_under(confidence: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """[A]: tokens drafted until one is less sure than the threshold, itself included; K if none is."""
    under = confidence < threshold
    return np.where(under.any(axis=1), under.argmax(axis=1) + 1, confidence.shape[1])


def exploring(max_draft: int) -> list[DraftPolicy]:
    """The policies that a mask is judged by while masks are searched: fixed lengths and confidence thresholds."""
    fixed = [DraftPolicy(length) for length in range(1, max_draft + 1)]
    lengths = [length for length in (2, 3, 4, 6, 8, 12, 16) if length <= max_draft]
    return fixed + [DraftPolicy(length, "confidence", {"threshold": t / 10}) for length, t in product(lengths, range(1, 10))]


def every(max_draft: int) -> list[DraftPolicy]:
    """The policies that the best masks are given: all lengths, fine thresholds, and Draft & Verify's adaptive rule."""
    fixed = [DraftPolicy(length) for length in range(1, max_draft + 1)]
    confident = [DraftPolicy(length, "confidence", {"threshold": round(t / 20, 2)})
                 for length, t in product(range(2, max_draft + 1), range(1, 20))]
    adaptive = [DraftPolicy(length, "adaptive", {"threshold": threshold, "target_acceptance": target, "step": step, "beta1": 0.5,
                                                 "beta2": beta2})
                for length, threshold, target, (step, beta2) in
                product(sorted({min(n, max_draft) for n in (4, 8, 12)}), (0.3, 0.45, 0.6),
                        (0.6, 0.7, 0.8, 0.9), ((0.01, 0.9), (0.05, 0.5)))]
    return fixed + confident + adaptive
