"""What is asked of the peers: a task's hold-out prompts, or tokens drawn at random for a model that reads no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipsearch.decoding import Decoder
from skipsearch.evaluation.prompts import Workload
from skipsearch.models.spec import ModelAdapter

RANDOM_PROMPT, RANDOM_NEW = 128, 64  # tokens


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens every peer writes behind it. group: Spec-Bench's category, or nothing."""

    prompt: tuple[int, ...]
    new_tokens: int
    group: str = ""


def task_requests(model: ModelAdapter, workload: Workload, groups: Sequence[str] = ()) -> list[Request]:
    """As long as the task lets each generation run: the full model decides, once."""
    plain = Decoder(model)
    return [Request(tuple(prompt), max(2, len(workload.generate(plain, p, 0).tokens)), groups[p] if groups else "")
            for p, prompt in enumerate(workload.prompts)]


def random_requests(model: ModelAdapter, count: int, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(model.spec.vocab, (count, RANDOM_PROMPT), generator=generator)
    return [Request(tuple(row.tolist()), RANDOM_NEW) for row in rows]
