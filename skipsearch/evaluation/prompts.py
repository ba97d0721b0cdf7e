"""A workload: tokenised prompts and how to generate from them. What is measured and what is replayed are the same request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.decoding import Decoder, Generation
from skipsearch.decoding.sampling import Sampling
from skipsearch.errors import TaskError
from skipsearch.models.spec import ModelAdapter
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
        return Workload(self.ids[:count], self.prompts[:count], self.max_new_tokens, self.end_on_repeat, self.sampling)


def workload(model: ModelAdapter, task: Task, prompts: Sequence[Prompt]) -> Workload:
    """Tokenises prompts; one that is too long loses its beginning, as the task's manifest says.

    Raises: TaskError if the model has no tokenizer, or its context leaves no room to generate.
    """
    if model.tokenizer is None:
        raise TaskError(f"{model.spec.id} has no tokenizer, so the text of task {task.name} cannot be given to it: put its tokenizer files "
                        "beside its weights")
    room = task.max_prompt_tokens
    if model.spec.context is not None:
        room = min(room, model.spec.context - task.max_new_tokens)
    if room < 1:
        raise TaskError(f"task {task.name} generates {task.max_new_tokens} tokens and {model.spec.id} was made for {model.spec.context}: "
                        "no room is left for a prompt")
    rows = [tuple(render(model, task, p.text)[-room:]) for p in prompts]
    kept = [(p.id, row) for p, row in zip(prompts, rows, strict=True) if row]
    if not kept:
        raise TaskError(f"task {task.name} has no prompt that this tokenizer turns into tokens")
    sampling = Sampling(task.sampling.temperature, task.sampling.top_p, task.sampling.top_k)
    return Workload(tuple(i for i, _ in kept), tuple(r for _, r in kept), task.max_new_tokens, task.end_on_repeat, sampling)


def render(model: ModelAdapter, task: Task, text: str) -> list[int]:
    """Token ids of a prompt; a request goes through the chat template of a model that has one."""
    if task.chat and getattr(model.tokenizer, "chat_template", None):
        return list(model.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
                                                        return_dict=False))
    return list(model.tokenizer(text, verbose=False)["input_ids"])
