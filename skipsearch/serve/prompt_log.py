"""A file of the prompts that a server was sent, in the form that `tune --task FILE` reads."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from skipsearch.errors import SkipSearchError
from skipsearch.models.chat.chat_text import encode_prompt
from skipsearch.tasks.prompt_rows import SERVED_COLUMN


class PromptLog:
    """Appends each prompt to a .jsonl that this user alone can read.

    A prompt is written as the model reads it, chat template and tools included, so that a search on
    the file decodes what the server decodes.
    """

    def __init__(self, path: Path, tokenizer: Any, warn: Callable[[str], None]):
        """Open the file, or create it. warn: called once, if the file cannot be written any more.

        Raises: SkipSearchError if the path cannot be written, or others can read the file.
        """
        self.path, self.tokenizer, self.warn = path, tokenizer, warn
        self._lock = Lock()
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            self._file: int | None = os.open(path, flags, 0o600)
        except OSError as error:
            raise SkipSearchError(
                f"--log-prompts {path}: cannot be written ({error.strerror}); name a file in a "
                "folder of yours"
            ) from None
        mode, reason = os.fstat(self._file).st_mode, ""
        if not stat.S_ISREG(mode):
            reason = "is no regular file, so prompts cannot be kept in it"
        elif mode & 0o077:
            reason = (
                f"others may open this file (mode {mode & 0o777:o}), and prompts are private: "
                "chmod 600 it, or name a new file"
            )
        if reason:
            os.close(self._file)
            raise SkipSearchError(f"--log-prompts {path}: {reason}")

    def write(self, prompts: Sequence[Sequence[int]]) -> None:
        """Append prompts, given as token ids. If the disk is full, warn once and write no more."""
        rows = ({"prompt": self._to_text(ids), SERVED_COLUMN: True} for ids in prompts)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        with self._lock:
            if self._file is None:
                return
            try:
                os.write(self._file, lines.encode())
            except OSError as error:
                os.close(self._file)
                self._file = None
                self.warn(
                    f"no more prompts are kept in {self.path}: it cannot be written "
                    f"({error.strerror}); requests are served as before"
                )

    def _to_text(self, ids: Sequence[int]) -> str:
        """Return the text that `tune` turns into these tokens."""
        text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        bos = self.tokenizer.bos_token
        # `tune` puts the first token before every text itself.
        if bos and text.startswith(bos) and encode_prompt(self.tokenizer, text) != list(ids):
            text = text.removeprefix(bos)
        return text
