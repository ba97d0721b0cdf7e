"""A loaded task: frozen values, without files or network access."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from skipsearch.core.constraint import Constraint
from skipsearch.core.schema_types import FrozenModel, Temperature, TopK, TopP

MAX_UNSEEN, MIN_UNSEEN = 32, 8  # calibration prompts that no training reads


class TaskSampling(FrozenModel):
    """How tokens are sampled.

    temperature: 0 is greedy.
    top_p, top_k: 1 and 0 keep the whole distribution.
    """

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to continue.

    id: where it came from; unique within its split.
    category: that of the source, if it has any.
    turns, tools: a conversation and the tools of its request, for the chat template of a model that
        has one; others get `text`. Empty: the prompt is `text` alone.
    """

    id: str
    text: str
    category: str = ""
    turns: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to search on (`calibration`), prompts to report on (`holdout`), and how to generate
    from them.

    The two splits share no text.
    max_prompt_tokens: the caller truncates a longer prompt on the left, so that its end stays.
    end_on_repeat: "loop": an answer that loops ends there, and measurements count the text before
        the loop; n: generation ends at the first repeated n-gram; None: never (see
        `skipsearch.decoding.repetition`).
    chat: render the prompts with the chat template of a chat model; a base model gets them as they
        are.
    notes: what a reader of a measurement should know, one sentence each, such as a shortage of
        prompts.
    constraint: the shape of every answer; None: any text.
    """

    name: str
    version: int
    description: str
    sampling: TaskSampling
    max_new_tokens: int
    max_prompt_tokens: int
    end_on_repeat: int | Literal["loop"] | None
    seed: int
    chat: bool
    notes: tuple[str, ...]
    calibration: tuple[Prompt, ...]
    holdout: tuple[Prompt, ...]
    constraint: Constraint | None = None

    @property
    def unseen(self) -> tuple[Prompt, ...]:
        """The calibration prompts that no training reads, so that trained drafts are judged on text
        that is new to them: the first third, at most MAX_UNSEEN. () if these are too few.
        """
        n_unseen = min(MAX_UNSEEN, len(self.calibration) // 3)
        return self.calibration[:n_unseen] if n_unseen >= MIN_UNSEEN else ()

    @property
    def trainable(self) -> tuple[Prompt, ...]:
        """The calibration prompts that a training may read."""
        return self.calibration[len(self.unseen) :]

    def keep_unseen(self) -> Task:
        """Return the task without the calibration prompts that a training may read.

        It is the task itself if no prompt is left out of trainings.
        """
        return replace(self, calibration=self.unseen or self.calibration)

    @property
    def calibration_sha256(self) -> str:
        """Hash of the calibration texts and the constraint, which a profile stores.

        The same task may have other text on another Python version or dataset revision.
        """
        return text_sha256(self.calibration, self.constraint)

    @property
    def holdout_sha256(self) -> str:
        """Hash of the hold-out texts."""
        return text_sha256(self.holdout, self.constraint)


def text_sha256(prompts: Sequence[Prompt], constraint: Constraint | None = None) -> str:
    """Return a hash of the texts in order, and of the constraint of their answers.

    They are hashed as a JSON list, so that different lists have different text.
    """
    listed = json.dumps([prompt.text for prompt in prompts], ensure_ascii=False)
    if constraint is not None:
        listed += json.dumps([constraint.kind, constraint.text])
    return hashlib.sha256(listed.encode()).hexdigest()
