"""Text to train drafts on: from files, or written by the model itself. It comes as windows of one length, [N, T] token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import Planner
from skipsearch.engine import forward, inference
from skipsearch.errors import ModuleError
from skipsearch.models.spec import ModelAdapter

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
MOST_CHARACTERS = 400_000_000
TOGETHER = {"cpu": 64, "cuda": 512}   # texts that the model writes at once


def documents(path: Path) -> Iterator[str]:
    """The texts of a file, or of every text file of a folder. A .jsonl gives those of its lines' `text` or `prompt`.

    Raises: ModuleError for what is not there, is no text, or is more than `MOST_CHARACTERS`.
    """
    if not path.exists():
        raise ModuleError(f"--data {path}: there is no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
    if not files:
        raise ModuleError(f"--data {path}: this folder holds no text ({', '.join(SUFFIXES)})")
    total = 0
    for file in files:
        for text in _texts(file):
            total += len(text)
            if total > MOST_CHARACTERS:
                raise ModuleError(f"--data {path} holds more than {MOST_CHARACTERS:,} characters, which no training here reads: give less")
            yield text


def _texts(file: Path) -> Iterator[str]:
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModuleError(f"--data {file}: it cannot be read as UTF-8 text ({getattr(error, 'strerror', None) or error.__class__.__name__})"
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
            raise ModuleError(f"--data {file}:{number}: a line is a JSON object with its text under `text` or `prompt`")
        yield text


def windows(tokenizer: Any, texts: Iterable[str], length: int, end: Sequence[int] = ()) -> Tensor:
    """[N, length]: texts one behind the other, an end-of-sequence token between them, cut into pieces; what is left over is dropped.

    end: the model's end-of-sequence tokens. Raises: ModuleError without a tokenizer, or where the text fills no window.
    """
    if tokenizer is None:
        raise ModuleError("this model has no tokenizer, so no text can be given to it: put its tokenizer files beside its weights, or "
                          "train with --self")
    stream: list[Tensor] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        stream.append(torch.tensor([*ids, *end[:1]], dtype=torch.int32))
    whole = torch.cat(stream) if stream else torch.empty(0, dtype=torch.int32)
    count = len(whole) // length
    if not count:
        raise ModuleError(f"the text has {len(whole)} tokens, fewer than one window of {length}: give more of it")
    return whole[:count * length].view(count, length)


@inference
def written(model: ModelAdapter, prompts: Tensor, length: int, temperature: float, seed: int,
            progress: Callable[[int, int], None] = lambda done, total: None) -> Tensor:
    """[N, length]: the model's own continuations of prompts [N, P], P < length, drawn at a temperature (0: greedy)."""
    random, found = torch.Generator(model.spec.device).manual_seed(seed), []
    for some in prompts.split(TOGETHER.get(model.spec.device.type, TOGETHER["cpu"])):
        batch, start = some.shape
        cache, planner = model.new_cache(batch, length), Planner(length, model.spec.device)
        rows = some.long().to(model.spec.device)
        logits = forward(model, rows, cache, planner.chain(0, start, batch), last_only=True)
        for at in range(start, length):
            token = _drawn(logits[:, -1], temperature, random)
            rows = torch.cat([rows, token], dim=1)
            if at + 1 < length:
                logits = forward(model, token, cache, planner.chain(at, 1, batch))
        found.append(rows.to("cpu", torch.int32))
        progress(sum(map(len, found)), len(prompts))
    return torch.cat(found)


def _drawn(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """[B, V] -> [B, 1]"""
    if not temperature:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1, generator=random)
