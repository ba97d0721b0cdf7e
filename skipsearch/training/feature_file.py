"""A file of texts with what the full model computed at each of their tokens.

A draft head is trained on these features. They are on disk in 16 bits and mapped into memory, so
memory does not grow with the text. Texts are appended one by one, and a killed training loses at
most the text that it was writing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.files import hash_facts, make_private_dir
from skipsearch.errors import ModuleError
from skipsearch.training.distill_batch import TeacherTargets

FEATURES, TEXTS = "features.bin", "features.jsonl"
NO_ROW = -1  # in a window, after its last text
NO_TEXT = -1  # the number of the text of NO_ROW


@dataclass(frozen=True)
class StoredText:
    """A text, whose tokens have consecutive rows of the file."""

    tokens: list[int]
    n_prompt: int  # tokens of the prompt; drafts propose none of them
    seconds: float  # that it took to write the text and to compute its features
    wave: int  # number of the group of texts that were written together


@dataclass(frozen=True)
class Features:
    """What the full model computed at R tokens."""

    hidden: Tensor  # [R, H], output of the last layer
    last_input: Tensor  # [R, H], input of the last layer
    targets: TeacherTargets  # [R, K]


@dataclass(frozen=True)
class RowTexts:
    """What is known of R rows from their texts, [R] each."""

    tokens: Tensor
    text_numbers: Tensor  # NO_TEXT for NO_ROW
    # Whether a round of drafts may start: the row's next token is the answer's first or later.
    starts_round: Tensor


class FeatureFile:
    """The features of the texts of one training, in a folder.

    facts: what the features depend on. Raises: ModuleError if the folder holds the features of a
    training with other facts, or cannot be written.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], hidden_size: int, top_k: int):
        self._data, self._index = folder / FEATURES, folder / TEXTS
        self._record = np.dtype(
            [
                ("hidden", "<i2", hidden_size),
                ("last_input", "<i2", hidden_size),
                ("tokens", "<i4", top_k),
                ("probs", "<f2", top_k),
            ]
        )
        self.texts = list[StoredText]()
        self._rows: Any = None  # the file as an array of records; None: it has grown since
        make_private_dir(folder)
        header = hash_facts(facts)
        lines = self._index.read_text().splitlines() if self._index.exists() else []
        if lines and lines[0] != header:
            raise ModuleError(
                f"{self._index} belongs to another training (another model, other text or "
                "settings): give its settings to go on, another --out, or --force to start again"
            )
        for line in lines[1:]:
            with suppress(ValueError, TypeError):  # a line that a kill cut short
                self.texts.append(StoredText(**json.loads(line)))
        n_bytes = self.n_tokens * self._record.itemsize
        if lines and (not self._data.exists() or self._data.stat().st_size < n_bytes):
            raise ModuleError(f"{self._data} is damaged: remove it, or start again with --force")
        self._index.write_text("".join(f"{line}\n" for line in [header, *map(_dump, self.texts)]))
        with self._data.open("ab") as file:
            file.truncate(n_bytes)

    @property
    def n_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def seconds(self) -> float:
        """The time that all texts took."""
        return sum(text.seconds for text in self.texts)

    @property
    def sha256(self) -> str:
        """A hash of the texts, in their order."""
        return hash_facts([[text.tokens, text.n_prompt] for text in self.texts])

    def add(self, text: StoredText, features: Features) -> None:
        """Append a text. Raises: ModuleError if the disk is full."""
        records = np.empty(len(text.tokens), self._record)
        records["hidden"], records["last_input"] = map(
            _to_16_bits, (features.hidden, features.last_input)
        )
        records["tokens"] = features.targets.tokens.cpu().numpy()
        records["probs"] = features.targets.probs.float().cpu().numpy()
        try:
            with self._data.open("ab") as file:
                file.write(records.tobytes())
            with self._index.open("a") as file:
                file.write(f"{_dump(text)}\n")
        except OSError as error:
            raise ModuleError(
                f"cannot write {self._data}: {error.strerror or error}; choose another --out"
            ) from None
        self.texts.append(text)
        self._rows = None

    def read(self, rows: Tensor) -> Features:
        """Return the features of rows [R] on the CPU; those of NO_ROW are another row's."""
        records = self._map()[0][rows.clamp(min=0).numpy()]
        hidden, last_input = (
            torch.from_numpy(records[name].copy()).view(torch.bfloat16)
            for name in ("hidden", "last_input")
        )
        tokens, probs = (torch.from_numpy(records[name].copy()) for name in ("tokens", "probs"))
        return Features(hidden, last_input, TeacherTargets(tokens.long(), probs.float()))

    def list_rows(self, rows: Tensor) -> RowTexts:
        """Return what is known of rows [R] on the CPU from their texts."""
        known, is_row, rows = self._map()[1], rows != NO_ROW, rows.long().clamp(min=0)
        return RowTexts(
            known.tokens[rows],
            known.text_numbers[rows].where(is_row, torch.tensor(NO_TEXT)),
            known.starts_round[rows] & is_row,
        )

    def _map(self) -> tuple[Any, RowTexts]:
        """Return the records of the file and what is known of all rows."""
        if self._rows is None:
            numbered = [
                (token, number, i + 1 >= text.n_prompt)
                for number, text in enumerate(self.texts)
                for i, token in enumerate(text.tokens)
            ]
            columns = (torch.tensor(column) for column in zip(*numbered, strict=True))
            self._rows = np.memmap(self._data, self._record, mode="r"), RowTexts(*columns)
        records, known = self._rows
        return records, known

    def pack_windows(self, chosen: Sequence[int], length: int) -> Tensor:
        """Return windows of rows [N, length] int32 that hold these texts.

        A window holds as many whole texts as fit, and NO_ROW after them. Of a longer text it holds
        the end. chosen: indices of texts.
        """
        starts = np.cumsum([0, *(len(text.tokens) for text in self.texts)])
        windows, free = list[list[int]](), list[int]()
        for i in sorted(chosen, key=lambda i: (-len(self.texts[i].tokens), i)):
            rows = list(range(starts[i], starts[i + 1]))[-length:]
            place = next((w for w, n in enumerate(free) if n >= len(rows)), len(windows))
            if place == len(windows):
                windows.append([])
                free.append(length)
            windows[place] += rows
            free[place] -= len(rows)
        padded = [[*window, *[NO_ROW] * (length - len(window))] for window in windows]
        return torch.tensor(padded, dtype=torch.int32).view(len(padded), length)


def remove_features(folder: Path) -> None:
    """Delete the features in a folder, of whatever training."""
    for name in (FEATURES, TEXTS):
        (folder / name).unlink(missing_ok=True)


def _dump(text: StoredText) -> str:
    return json.dumps(asdict(text))


def _to_16_bits(values: Tensor) -> Any:
    return values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
