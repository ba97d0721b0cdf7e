"""A search small enough to run whole in a test: a tiny model that can be told from others, a task
of a few words, fixed costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helpers.tiny import LAYERS, VOCAB, tiny_llama
from replay.fabricated import drafting, plain

from skipsearch.core.cost_model import Costs
from skipsearch.models import ModelAdapter, adapt
from skipsearch.tasks import Prompt, Task, TaskSampling
from skipsearch.timing.interleaved import Timings

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


def small_model() -> ModelAdapter:
    model = adapt(tiny_llama(), Letters())
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


def made_up_race(seconds: float) -> Any:
    """Stands for `race`: plain decoding takes a second a prompt and whoever drafts takes
    `seconds`.
    """

    def race(
        decoders: Sequence[Any],
        workload: Any,
        repeats: int = 1,
        seed: int = 0,
        progress: Any = None,
        prompt_indices: Sequence[int] | None = None,
        may_be_empty: bool = False,
    ) -> list[Timings]:
        n = len(workload.prompt_ids if prompt_indices is None else prompt_indices)
        return [plain([1.0] * n), *(drafting([seconds] * n) for _ in decoders[1:])]

    return race
