"""A search small enough to run whole in a test: a tiny model that can be told from others, a task
of a few words, fixed costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.tiny import LAYERS, VOCAB, tiny_llama
from replay.fabricated import sample

from skipsearch.core.cost_model import Costs
from skipsearch.core.recipe import Recipe
from skipsearch.models import ModelAdapter, adapt
from skipsearch.tasks import Prompt, Task, TaskSampling
from skipsearch.timing.interleaved import TimedGeneration

COSTS = Costs((1e-3, 0.8e-3) * LAYERS, 1e-3, tuple(0.01 + 0.0003 * rows for rows in range(9)))


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(t + 32) for t in tokens)


def small_model(fuse: bool = True) -> ModelAdapter:
    """fuse: run in the engine lean, which is faster than the model's own modules."""
    return copy(_small_model(fuse))


@cache
def _small_model(fuse: bool) -> ModelAdapter:
    model = adapt(tiny_llama(), Letters(), fuse)
    model.spec = replace(model.spec, id="tiny", config_sha256="c" * 64, weights_sha256="e" * 64)
    return model


def small_task(**changes: Any) -> Task:
    words = tuple(
        Prompt(f"word/{i}", word)
        for i, word in enumerate(("skip", "draft", "verify", "commit", "round", "token", "mask"))
    )
    task = Task(
        "words", 1, "a few words", TaskSampling(), 14, 32, 6, 0, False, (), words[:4], words[4:]
    )
    return replace(task, **changes)


def made_up_times(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[Recipe], float]) -> None:
    """Let races and measurements take made-up times: plain decoding takes a second a prompt, and
    a recipe as long as is said of it.
    """

    def time_prompt(
        decoders: Sequence[Any], workload: Any, prompt: int, seed: int, first: int, *_: Any
    ) -> list[TimedGeneration]:
        return [
            sample(prompt, seconds_of(decoder.recipe), rounds=4, drafted=8, accepted=6)
            if decoder.recipe.drafters
            else sample(prompt, 1.0)
            for decoder in decoders
        ]

    for module in ("interleaved", "elimination"):
        monkeypatch.setattr(f"skipsearch.timing.{module}.time_prompt", time_prompt)
