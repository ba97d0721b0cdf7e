"""Checks that sampling has the full model's distribution, by enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from helpers.drafting import wrap_drafters
from helpers.table_model import TABLE_LAYERS, TableModel
from helpers.tiny import FullModel, model_and_reference, tiny_llama, use_engine
from numpy.typing import NDArray
from scipy.stats import chisquare

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import Drafter
from skipsearch.drafters.exits import Exit, make_exit
from skipsearch.engine.native import NativeAdapter
from skipsearch.models.adapter import DraftScores, ModelAdapter


@dataclass(frozen=True)
class Warp:
    """The sampling settings of a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def probabilities(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return probabilities after temperature, top_k and top_p, in this order.

        top_p keeps the fewest tokens with that much probability; the rest is normalised.
        """
        scores = logits / self.temperature
        order = np.argsort(-scores)
        p = np.exp(scores - scores.max())
        p[order[self.top_k or len(p) :]] = 0
        p /= p.sum()
        mass_before = np.cumsum(p[order]) - p[order]
        p[order[mass_before >= self.top_p]] = 0
        return p / p.sum()


def exact_distribution(
    next_logits: Callable[[Sequence[int]], NDArray[np.float64]],
    prompt: tuple[int, ...],
    length: int,
    warp: Warp,
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens under the full model."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*tail, token): mass * float(p)
            for tail, mass in found.items()
            for token, p in enumerate(warp.probabilities(next_logits([*prompt, *tail])))
            if p > 0
        }
    return found


def surprise(drawn: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of a chi-square test of the draws.

    Outcomes expected fewer than five times count as one. 0: an impossible draw.
    """
    n = drawn.total()
    if any(outcome not in expected for outcome in drawn):
        return 0.0
    observed: list[float] = []
    wanted: list[float] = []
    rest = [0.0, 0.0]
    for outcome, p in expected.items():
        if n * p >= 5:
            observed.append(drawn[outcome])
            wanted.append(n * p)
        else:
            rest[0] += drawn[outcome]
            rest[1] += n * p
    if rest[1] >= 5:
        observed.append(rest[0])
        wanted.append(rest[1])
    wanted_array = np.array(wanted)
    return float(chisquare(observed, wanted_array * (sum(observed) / wanted_array.sum())).pvalue)


@cache
def native_model() -> tuple[ModelAdapter, FullModel]:
    with use_engine("native"):
        return model_and_reference(lambda: tiny_llama(layers=2, vocab=5, hidden=16, context=16))


TABLE_MASK = SkipMask(TABLE_LAYERS, (0,), (1,))
FALSE_ALARM = 1e-4


def check_sampling(
    warp: Warp = Warp(0.5),
    samples: int = 800,
    draft_length: int = 2,
    model: Any = None,
    mask: SkipMask = TABLE_MASK,
    drafter: Callable[[Drafter], Drafter] | None = None,
    exit_policy: Exit | None = None,
    length: int = 4,
    prompt: tuple[int, ...] = (2, 0),
    recipe: Recipe | None = None,
    modules: Sequence[Path] = (),
    next_logits: Callable[[Sequence[int]], NDArray[np.float64]] | None = None,
) -> DecodeStats:
    """Check that samples of `length` tokens have the full model's distribution.

    Rounds draft up to draft_length tokens.
    """
    model = model or TableModel()
    decoder = (
        Decoder(model, recipe, module_folders=modules)
        if recipe
        else Decoder(
            model, mask, draft_length=draft_length, exit_policy=exit_policy or make_exit("fixed")
        )
    )
    if drafter is not None:
        wrap_drafters(decoder, drafter)
    expected = exact_distribution(next_logits or model.next_logits, prompt, length, warp)
    assert abs(sum(expected.values()) - 1) < 1e-9
    drawn, stats = Counter[tuple[int, ...]](), DecodeStats()
    for seed in range(samples):
        result = decoder.generate(
            prompt,
            length,
            temperature=warp.temperature,
            top_p=warp.top_p,
            top_k=warp.top_k,
            seed=seed,
        )
        drawn[tuple(result.tokens)] += 1
        stats += result.stats
        if seed + 1 in (samples // 4, samples // 2, samples):  # most planted bugs show early
            assert surprise(drawn, expected) > FALSE_ALARM, warp
    return stats


def check_sampling_in_one_call() -> DecodeStats:
    """Check the distribution of samples whose drafts the engine native draws in one call each."""
    model, full = native_model()
    lengths, real = list[int](), NativeAdapter._run_sampled_chain

    def draft(self: NativeAdapter, *arguments: Any) -> DraftScores:
        scores = real(self, *arguments)
        assert scores.confidence is not None
        lengths.append(len(scores.confidence))
        return scores

    with patch.object(NativeAdapter, "_run_sampled_chain", draft):
        stats = check_sampling(
            Warp(2.0, top_p=0.95),
            model=model,
            mask=SkipMask(2, (1,), (0,)),
            next_logits=full.next_logits,
        )
    assert sum(lengths) == stats.drafted
    assert max(lengths) > 1
    return stats
