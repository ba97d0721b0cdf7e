"""Text to train drafts on: from files, from a task, or written by the model itself.

It comes as windows of one length, [N, T] token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.engine import forward, no_grad
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.workload import make_workload
from skipsearch.tasks.task import Task
from skipsearch.tuning.events import StageProgress, StageStarted

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
MAX_CHARACTERS = 400_000_000
GENERATE_BATCH = {"cpu": 64, "cuda": 512}  # texts that the model writes at once
WINDOW_TOKENS = 256  # tokens of a window, or half of the model's context if that is less
VALIDATION_ONE_IN = 16  # one window in so many is never trained on
MAX_VALIDATION_WINDOWS = 64
SELF_GENERATED_TOKENS = 400_000


@dataclass(frozen=True)
class Corpus:
    """Text to train on, as windows of token ids."""

    windows: Tensor  # [N, T] to train on
    validation: Tensor  # [M, T], never trained on
    description: str  # for the card
    licence: str  # for the card


def read_corpus(
    model: ModelAdapter,
    data: list[Path],
    task: Task | None,
    self_generated: bool,
    seed: int,
    on_event: Callable[[StageStarted | StageProgress], None],
    n_tokens: int = SELF_GENERATED_TOKENS,
    temperature: float = 1.0,
    licence: str = "not stated",
) -> Corpus:
    """Return windows of text from files, from a task, or written by the model.

    self_generated: the model continues the beginnings of the data's or the task's texts, or writes
    from nothing. A task gives its calibration prompts alone, and data that contain one of its
    hold-out prompts are refused. Raises: ModuleError, TaskError."""
    spec = model.spec
    length = min(WINDOW_TOKENS, (spec.context_length or 2 * WINDOW_TOKENS) // 2)
    sources = []
    if data:
        on_event(StageStarted("reading text"))
        texts = [text for path in data for text in read_documents(path)]
        if task is not None:
            _refuse_holdout(task, texts)
        windows = token_windows(model.tokenizer, texts, length, spec.eos_token_ids)
        sources.append(", ".join(path.name for path in data))
    elif task is not None:
        prompts = make_workload(model, task, task.calibration).prompt_ids
        start = min(length // 2, max(map(len, prompts)))
        windows = torch.tensor(
            [prompt[-start:] for prompt in prompts if len(prompt) >= start], dtype=torch.int32
        )
        sources.append(f"calibration prompts of task {task.name}")
    else:
        first = spec.eos_token_ids[0] if spec.eos_token_ids else 0
        windows = torch.full((max(1, n_tokens // length), 1), first, dtype=torch.int32)
    if self_generated or not data:
        on_event(StageStarted("the model writes text for itself"))
        n_texts = max(1, n_tokens // length)
        beginnings = windows[:, : length // 2]
        n_repeats = max(1, -(-n_tokens // (length * len(beginnings))))
        beginnings = _shuffle(beginnings.repeat(n_repeats, 1)[:n_texts], seed)
        written = generate_corpus(
            model,
            beginnings,
            length,
            temperature,
            seed,
            lambda done, total: on_event(StageProgress(done, total)),
        )
        sources.append(f"continued by {spec.id} itself at temperature {temperature:g}")
        windows = torch.cat([windows, written]) if data else written
    if len(windows) < 2:
        raise ModuleError(
            f"the text fills {len(windows)} window of {length} tokens, and one is kept aside: give "
            "more of it"
        )
    windows = _shuffle(windows, seed)
    n_validation = min(MAX_VALIDATION_WINDOWS, max(1, len(windows) // VALIDATION_ONE_IN))
    return Corpus(windows[n_validation:], windows[:n_validation], "; ".join(sources), licence)


def _shuffle(windows: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return windows[torch.randperm(len(windows), generator=generator)]


def _refuse_holdout(task: Task, texts: list[str]) -> None:
    """Raise ModuleError if a hold-out prompt occurs in the text: figures measured on it later would
    mean nothing.
    """
    text = "\n".join(texts)
    for prompt in task.holdout:
        if prompt.text.strip() and prompt.text.strip() in text:
            raise ModuleError(
                f"hold-out prompt {prompt.id} of task {task.name} stands in this text, so what is "
                "measured there later would mean nothing: take other text"
            )


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of a file, or of every text file of a folder.

    A line of a .jsonl file gives its `text` or `prompt`. Raises: ModuleError for a path that does
    not exist or is no text, and for more than `MAX_CHARACTERS`."""
    if not path.exists():
        raise ModuleError(f"--data {path}: there is no such file or folder")
    files = (
        sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if path.is_dir()
        else [path]
    )
    if not files:
        raise ModuleError(f"--data {path}: this folder holds no text ({', '.join(TEXT_SUFFIXES)})")
    total = 0
    for file in files:
        for text in _read_texts(file):
            total += len(text)
            if total > MAX_CHARACTERS:
                raise ModuleError(
                    f"--data {path} holds more than {MAX_CHARACTERS:,} characters, which no "
                    "training here reads: give less"
                )
            yield text


def _read_texts(file: Path) -> Iterator[str]:
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModuleError(
            f"--data {file}: it cannot be read as UTF-8 text "
            f"({getattr(error, 'strerror', None) or error.__class__.__name__})"
        ) from None
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            text = row.get("text", row.get("prompt"))
        except (ValueError, AttributeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ModuleError(
                f"--data {file}:{number}: a line is a JSON object with its text under `text` or "
                "`prompt`"
            )
        yield text


def token_windows(
    tokenizer: Any, texts: Iterable[str], length: int, eos_ids: Sequence[int] = ()
) -> Tensor:
    """Return windows [N, length] of the texts in a row, with an end-of-sequence token after each.

    An incomplete last window is dropped. eos_ids: the model's end-of-sequence tokens. Raises:
    ModuleError without a tokenizer, or if the text fills no window."""
    if tokenizer is None:
        raise ModuleError(
            "this model has no tokenizer, so no text can be given to it: put its tokenizer files "
            "beside its weights, or "
            "train with --self-generated"
        )
    stream: list[Tensor] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        stream.append(torch.tensor([*ids, *eos_ids[:1]], dtype=torch.int32))
    tokens = torch.cat(stream) if stream else torch.empty(0, dtype=torch.int32)
    count = len(tokens) // length
    if not count:
        raise ModuleError(
            f"the text has {len(tokens)} tokens, fewer than one window of {length}: give more of it"
        )
    return tokens[: count * length].view(count, length)


@no_grad
def generate_corpus(
    model: ModelAdapter,
    prompts: Tensor,
    length: int,
    temperature: float,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Return the model's continuations [N, length] of prompts [N, P], P < length.

    They are drawn at a temperature; 0 is greedy."""
    random, texts = torch.Generator(model.spec.device).manual_seed(seed), list[Tensor]()
    for part in prompts.split(GENERATE_BATCH.get(model.spec.device.type, GENERATE_BATCH["cpu"])):
        batch, start = part.shape
        cache, planner = model.new_cache(batch, length), Planner(length, model.spec.device)
        rows = part.long().to(model.spec.device)
        logits = forward(model, rows, cache, planner.plan_chain(0, start, batch), last_only=True)
        for at in range(start, length):
            token = _sample_token(logits[:, -1], temperature, random)
            rows = torch.cat([rows, token], dim=1)
            if at + 1 < length:
                logits = forward(model, token, cache, planner.plan_chain(at, 1, batch))
        texts.append(rows.to("cpu", torch.int32))
        progress(sum(map(len, texts)), len(prompts))
    return torch.cat(texts)


def _sample_token(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """Return tokens [B, 1] drawn from logits [B, V]."""
    if not temperature:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1, generator=random)
