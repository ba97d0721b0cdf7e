"""A workload: tokenised prompts and how to generate from them. What is measured and what is replayed are the same request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skipsearch.decoding import Decoder, Generation
from skipsearch.decoding.sampling import Sampling
from skipsearch.errors import TaskError
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.models.text import as_request, chat_template, token_ids
from skipsearch.tasks.values import Prompt, Task


@dataclass(frozen=True)
class Workload:
    """prompts: token ids, already cut to what model and task allow."""

    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    end_on_repeat: int | None
    sampling: Sampling

    def generate(self, decoder: Decoder, prompt: int, seed: int, limit: int | None = None) -> Generation:
        return decoder.generate(self.prompts[prompt], min(self.max_new_tokens, limit or self.max_new_tokens),
                                temperature=self.sampling.temperature, top_p=self.sampling.top_p, top_k=self.sampling.top_k,
                                seed=seed, end_on_repeat=self.end_on_repeat)

    def first(self, count: int) -> Workload:
        return replace(self, ids=self.ids[:count], prompts=self.prompts[:count])


def workload(model: ModelAdapter, task: Task, prompts: Sequence[Prompt]) -> Workload:
    """Tokenises prompts; one that is too long loses its beginning, as the task's manifest says.

    Raises: TaskError if the model has no tokenizer, or one that makes no tokens of these prompts.
    """
    if model.tokenizer is None:
        raise TaskError(f"{model.spec.id} has no tokenizer, so the text of task {task.name} cannot be given to it: put its tokenizer files "
                        "beside its weights")
    most, new = lengths(task, model.spec.context)
    chat = template_of(task, model.tokenizer) is not None
    rows = [tuple(token_ids(model.tokenizer, p.text, chat=chat, most=most)) for p in prompts]
    kept = [(p.id, row) for p, row in zip(prompts, rows, strict=True) if row]
    if not kept:
        raise TaskError(f"task {task.name} has no prompt that this tokenizer turns into tokens")
    sampling = Sampling(task.sampling.temperature, task.sampling.top_p, task.sampling.top_k)
    return Workload(tuple(i for i, _ in kept), tuple(r for _, r in kept), new, task.end_on_repeat, sampling)


def lengths(task: Task, context: int | None) -> tuple[int, int]:
    """(tokens of a prompt, tokens to generate), at most. Of too small a context the answer gets half, or what a short prompt leaves."""
    if context is None:
        return task.max_prompt_tokens, task.max_new_tokens
    new = min(task.max_new_tokens, max(context // 2, context - task.max_prompt_tokens))
    return min(task.max_prompt_tokens, context - new), new


def shortened(task: Task, spec: ModelSpec) -> list[str]:
    """What a reader of a measurement should know where the model's context is too small for the task's own generations."""
    most, new = lengths(task, spec.context)
    if new == task.max_new_tokens:
        return []
    return [f"task {task.name} generates up to {task.max_new_tokens} tokens and {spec.id} was made for {spec.context}, the prompt "
            f"included: here up to {new}, behind prompts of up to {most}"]


def as_given(task: Task, tokenizer: object, text: str) -> str:
    """A prompt's text as the model reads it: in its chat template, if the task asks for that and the model has one."""
    return text if template_of(task, tokenizer) is None else as_request(tokenizer, text)


def template_of(task: Task, tokenizer: object) -> str | None:
    """The chat template that the task's prompts are put into: requests go through the one that a chat model has."""
    return chat_template(tokenizer) if task.chat else None


def template_sha256(task: Task, tokenizer: object) -> str | None:
    """Hash of that template, for profile and study: with another one, or none, the same text is another prompt."""
    template = template_of(task, tokenizer)
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()
