"""Bugs of drafts that the engine native draws in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.models.adapter import DraftScores

from ..sampling_checks import check_sampling_in_one_call
from .register import caught_by, planted


def with_scores(change: Callable[[DraftScores], DraftScores]) -> AbstractContextManager[Any]:
    """Change the scores of each draft."""
    real = NativeAdapter._run_sampled_chain
    return patch.object(
        NativeAdapter, "_run_sampled_chain", lambda self, *arguments: change(real(self, *arguments))
    )


@caught_by(check_sampling_in_one_call)
def the_engines_draft_is_the_likeliest_token() -> Iterator[None]:
    def change(scores: DraftScores) -> DraftScores:
        assert scores.probs is not None
        return replace(scores, choice=scores.probs.argmax(dim=-1, keepdim=True))

    with with_scores(change):
        yield


@caught_by(check_sampling_in_one_call)
def the_engines_distributions_are_of_the_steps_before() -> Iterator[None]:
    def change(scores: DraftScores) -> DraftScores:
        assert scores.probs is not None
        return replace(scores, probs=scores.probs.roll(1, 0))

    with with_scores(change):
        yield


@planted(check_sampling_in_one_call, NativeLibrary, "run_draft_chain")
def the_engines_draws_take_a_part_of_the_interval(real, self, model, args, *rest):
    uniforms = ctypes.cast(args.sampling.contents.uniforms, ctypes.POINTER(ctypes.c_double))
    uniforms[0] = uniforms[0] * 0.5
    return real(self, model, args, *rest)
