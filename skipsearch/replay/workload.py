"""Tokenised prompts with their generation settings, used by measurement and replay alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from skipsearch.core.constraint import Constraint
from skipsearch.decoding import Decoder, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.decoding.repetition import EndOnRepeat, find_loop_start
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import TaskError
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.chat.chat_text import (
    encode_chat,
    encode_prompt,
    get_chat_template,
    render_chat,
    render_user_turn,
)
from skipsearch.tasks.task import Prompt, Task


@dataclass(frozen=True)
class Workload:
    """The prompts of a task, tokenised for one model."""

    prompt_names: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...]  # cut to the limits of model and task
    max_new_tokens: int
    end_on_repeat: EndOnRepeat  # of the task
    sampling: SamplingParams
    constraint: Constraint | None = None  # the shape of every answer; None: any text
    # Tokens before the loop of each greedy answer that is known to loop.
    _n_before_loop: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def generate(
        self,
        decoder: Decoder,
        prompt_index: int,
        seed: int,
        max_tokens: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> Generation:
        """Decode the answer to a prompt. prefix_cache: as for `Decoder.stream`.

        An answer that loops is decoded again up to its loop, because every draft of looping text is
        accepted: only the text before the loop counts. Its finish reason is still "loop". The next
        decoder of a greedy answer decodes it up to the loop at once.
        """
        limit = min(self.max_new_tokens, max_tokens or self.max_new_tokens)
        n_before = self._n_before_loop.get(prompt_index)
        if n_before is None:
            answer = self._decode(decoder, prompt_index, seed, limit, prefix_cache)
            if answer.finish_reason != "loop":
                return answer
            n_before = find_loop_start(answer.tokens)
            assert n_before is not None
            n_before = max(1, n_before)
            if self.sampling.is_greedy:
                self._n_before_loop[prompt_index] = n_before
        answer = self._decode(decoder, prompt_index, seed, min(limit, n_before), prefix_cache)
        return replace(answer, finish_reason="loop") if n_before <= limit else answer

    def _decode(
        self,
        decoder: Decoder,
        prompt_index: int,
        seed: int,
        max_tokens: int,
        prefix_cache: PrefixCache | None,
    ) -> Generation:
        return decoder.generate(
            self.prompt_ids[prompt_index],
            max_tokens,
            prefix_cache=prefix_cache,
            **self.request_options(seed),
        )

    def request_options(self, seed: int) -> dict[str, Any]:
        """Return the options of a request but its length, as for `Decoder.stream`."""
        return asdict(self.sampling) | {
            "seed": seed,
            "end_on_repeat": self.end_on_repeat,
            "constraint": self.constraint,
        }

    def head(self, count: int) -> Workload:
        return replace(
            self, prompt_names=self.prompt_names[:count], prompt_ids=self.prompt_ids[:count]
        )


def make_workload(model: ModelAdapter, task: Task, prompts: Sequence[Prompt]) -> Workload:
    """Tokenise prompts. A prompt that is too long loses its beginning.

    Raises: TaskError if the model has no tokenizer, or if no prompt has tokens.
    """
    if model.tokenizer is None:
        raise TaskError(
            f"{model.spec.id} has no tokenizer, so the text of task {task.name} cannot be given to "
            "it: put its tokenizer files "
            "beside its weights"
        )
    max_prompt, max_new = token_limits(task, model.spec.context_length)
    rows = [tuple(encode_task_prompt(task, model.tokenizer, p, max_prompt)) for p in prompts]
    nonempty = [(p.id, row) for p, row in zip(prompts, rows, strict=True) if row]
    if not nonempty:
        raise TaskError(f"task {task.name} has no prompt that this tokenizer turns into tokens")
    sampling = SamplingParams(**task.sampling.model_dump())
    return Workload(
        tuple(i for i, _ in nonempty),
        tuple(r for _, r in nonempty),
        max_new,
        task.end_on_repeat,
        sampling,
        task.constraint,
    )


def token_limits(task: Task, context: int | None) -> tuple[int, int]:
    """Return the limits (tokens of a prompt, tokens to generate).

    If the context is too small for both, the answer gets half of the context. It gets more if the
    limit of the prompt is less than the other half.
    """
    if context is None:
        return task.max_prompt_tokens, task.max_new_tokens
    new = min(task.max_new_tokens, max(context // 2, context - task.max_prompt_tokens))
    return min(task.max_prompt_tokens, context - new), new


def task_warnings(task: Task, model: ModelAdapter, is_file: bool = False) -> list[str]:
    """Return what a task means for a model: limits that cut it, and a missing chat template.

    is_file: the prompts are a file of the user's own. They may be requests, too, if the model has a
    template.
    """
    return [
        *_context_warnings(task, model.spec),
        *_length_warnings(task, model),
        *_template_warnings(task, model, is_file),
    ]


def _context_warnings(task: Task, spec: ModelSpec) -> list[str]:
    """Return a warning if the model's context is too small for the task's generations."""
    most, new = token_limits(task, spec.context_length)
    if new == task.max_new_tokens:
        return []
    return [
        f"task {task.name} generates up to {task.max_new_tokens} tokens and {spec.id} was made for "
        f"{spec.context_length}, the prompt "
        f"included: here up to {new}, behind prompts of up to {most}"
    ]


def _length_warnings(task: Task, model: ModelAdapter) -> list[str]:
    """Return a warning if prompts of the task are cut."""
    if model.tokenizer is None:
        return []
    limit, _ = token_limits(task, model.spec.context_length)
    prompts = task.calibration + task.holdout
    lengths = [len(encode_task_prompt(task, model.tokenizer, prompt)) for prompt in prompts]
    n_cut = sum(length > limit for length in lengths)
    if not n_cut:
        return []
    return [
        f"{n_cut} of the {len(prompts)} prompts of {task.name} are longer than {limit:,} tokens, "
        f"the longest has {max(lengths):,}: they lose their beginning here; a task.yaml of your "
        "own sets another max_prompt_tokens"
    ]


def _template_warnings(task: Task, model: ModelAdapter, is_file: bool) -> list[str]:
    """Return a warning if the task's prompts are requests and the model has no chat template."""
    if is_file and not task.chat and get_chat_template(model.tokenizer) is not None:
        special = getattr(model.tokenizer, "all_special_tokens", ())
        if any(token in prompt.text for prompt in task.calibration for token in special):
            return []  # the prompts are in a template already, as `serve --log-prompts` keeps them
        return [
            f"{model.spec.id} has a chat template, and the prompts of {task.name} go in without "
            "it, as text to continue: give --chat if they are requests"
        ]
    if (
        not task.chat
        or model.tokenizer is None
        or task_chat_template(task, model.tokenizer) is not None
    ):
        return []
    return [
        f"the prompts of task {task.name} are requests to a chat model, and {model.spec.id} has no "
        "chat template: it gets them unchanged, as text to continue"
    ]


def render_prompt(task: Task, tokenizer: object, prompt: Prompt) -> str:
    """Return a prompt in the chat template, if the task asks for one and the tokenizer has one."""
    if task_chat_template(task, tokenizer) is None:
        return prompt.text
    if prompt.turns:
        return render_chat(tokenizer, prompt.turns, tools=prompt.tools or None)
    return render_user_turn(tokenizer, prompt.text)


def encode_task_prompt(
    task: Task, tokenizer: object, prompt: Prompt, max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a prompt, as `render_prompt` renders it. max_tokens, errors: as for
    `encode_request`.
    """
    chat = task_chat_template(task, tokenizer) is not None
    return encode_request(tokenizer, prompt, chat, max_tokens)


def encode_request(
    tokenizer: object, prompt: Prompt, chat: bool, max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a prompt. chat: render it in the chat template.

    max_tokens: a longer prompt loses its beginning. Raises: ModelError, also if a conversation is
    to be rendered and there is no template.
    """
    if not (chat and prompt.turns):
        return encode_prompt(tokenizer, prompt.text, chat=chat, max_tokens=max_tokens)
    ids = encode_chat(tokenizer, prompt.turns, tools=prompt.tools or None)
    return ids if max_tokens is None else ids[-max_tokens:]


def task_chat_template(task: Task, tokenizer: object) -> str | None:
    """Return the chat template for the task's prompts; None: the prompts are used as they are."""
    return get_chat_template(tokenizer) if task.chat else None


def template_sha256(task: Task, tokenizer: object) -> str | None:
    """Return the SHA-256 of the chat template for the task's prompts; None without a template.

    It identifies prompts: the same text in another template is another prompt.
    """
    template = task_chat_template(task, tokenizer)
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()
