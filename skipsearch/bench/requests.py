"""What is asked of the peers: a task's hold-out prompts, or tokens drawn at random for a model that reads no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipsearch.decoding import Decoder
from skipsearch.evaluation.prompts import Workload
from skipsearch.models.spec import ModelAdapter
from skipsearch.tasks import Prompt

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
RANDOM_PROMPT, RANDOM_NEW = 128, 64  # tokens


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens every peer writes behind it. group: the column of Spec-Bench's table that it counts for, or nothing."""

    prompt: tuple[int, ...]
    new_tokens: int
    group: str = ""


def task_requests(model: ModelAdapter, workload: Workload, prompts: Sequence[Prompt]) -> list[Request]:
    """As long as the task lets each generation run: the full model decides, once. prompts: what the workload was made of."""
    plain, categories = Decoder(model), {p.id: p.category for p in prompts}
    return [Request(tuple(prompt), max(2, len(workload.generate(plain, i, 0).tokens)), column(categories[workload.ids[i]]))
            for i, prompt in enumerate(workload.prompts)]


def column(category: str) -> str:
    """Spec-Bench counts the eight categories of MT-bench as one. Source: Xia et al. 2024, table 2."""
    return "conversation" if category in MT_BENCH else category


def random_requests(model: ModelAdapter, count: int, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(model.spec.vocab, (count, RANDOM_PROMPT), generator=generator)
    return [Request(tuple(row.tolist()), RANDOM_NEW) for row in rows]
