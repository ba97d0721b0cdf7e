"""What a task is once it is loaded: frozen values, no files and no network behind them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.core.schema_types import FrozenModel, Temperature, TopK, TopP


class TaskSampling(FrozenModel):
    """How a token is drawn. temperature 0 is greedy; top_p 1 and top_k 0 keep the whole
    distribution.
    """

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to continue; id says where it came from and is unique within its task's half.
    category: the source's own, if it has any.
    """

    id: str
    text: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to search on (`calibration`), prompts to report on (`holdout`), and how to generate
    from them.

    The two halves share no text. max_prompt_tokens: the caller cuts a longer prompt from the left
    and keeps its end. end_on_repeat: generation ends at its first repeated n-gram of this n; None
    never does (see `skipsearch.decoding.repetition`). chat: the prompts are requests, for a chat
    model's own template; a base model gets them as they are. notes: what a reader of a measurement
    should know, one sentence each (fewer prompts than asked for, say)."""

    name: str
    version: int
    description: str
    sampling: TaskSampling
    max_new_tokens: int
    max_prompt_tokens: int
    end_on_repeat: int | None
    seed: int
    chat: bool
    notes: tuple[str, ...]
    calibration: tuple[Prompt, ...]
    holdout: tuple[Prompt, ...]

    @property
    def calibration_sha256(self) -> str:
        """Goes into the profile: the same task on another Python or data set revision may have
        other text.
        """
        return text_sha256(self.calibration)

    @property
    def holdout_sha256(self) -> str:
        return text_sha256(self.holdout)


def text_sha256(prompts: Sequence[Prompt]) -> str:
    """Hash of the texts in order, as a JSON list so that no two different lists look alike."""
    listed = json.dumps([prompt.text for prompt in prompts], ensure_ascii=False)
    return hashlib.sha256(listed.encode()).hexdigest()
