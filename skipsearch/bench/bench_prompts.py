"""The requests that every system decodes.

They are a task's hold-out prompts or, for a model without a tokenizer, random token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipsearch.decoding import Decoder
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload
from skipsearch.tasks import Prompt

MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
RANDOM_PROMPT_TOKENS, RANDOM_NEW_TOKENS = 128, 64  # tokens


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and the number of tokens that every system generates after it.

    category: the column of Spec-Bench's table that the prompt belongs to; "" if none.
    """

    prompt_ids: tuple[int, ...]
    new_tokens: int
    category: str = ""


def make_task_requests(
    model: ModelAdapter, workload: Workload, prompts: Sequence[Prompt]
) -> list[BenchRequest]:
    """Return one request for each prompt of a workload.

    Plain decoding runs once, to find how many tokens an answer has: up to its end or the task's
    limit. prompts: the prompts that the workload was made from.
    """
    plain, categories = Decoder(model), {p.id: p.category for p in prompts}
    return [
        BenchRequest(
            tuple(prompt),
            max(2, len(workload.generate(plain, i, 0).tokens)),
            spec_bench_category(categories[workload.prompt_names[i]]),
        )
        for i, prompt in enumerate(workload.prompt_ids)
    ]


def spec_bench_category(category: str) -> str:
    """Return the column of Spec-Bench's table for a category.

    The eight categories of MT-bench share one column, "conversation". Source: Xia et al. 2024,
    table 2.
    """
    return "conversation" if category in MT_BENCH else category


def make_random_requests(model: ModelAdapter, count: int, seed: int = 0) -> list[BenchRequest]:
    """Return `count` requests of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(model.spec.vocab_size, (count, RANDOM_PROMPT_TOKENS), generator=generator)
    return [BenchRequest(tuple(row.tolist()), RANDOM_NEW_TOKENS) for row in rows]
