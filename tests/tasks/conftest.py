from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

MANIFEST = """\
name: small
version: 1
description: a task for tests
source: {kind: jsonl, path: rows.jsonl}
template: "Q: {question}\\nA:"
max_new_tokens: 16
max_prompt_tokens: 64
sampling: {temperature: 0.0, top_p: 1.0, top_k: 0}
calibration: 4
holdout: 2
seed: 0
end_on_repeat: 6
"""


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as a .jsonl file and returns its path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8"
        )
        return path

    return write


@pytest.fixture
def task_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a task.yaml, the small one with some lines replaced and some added, and returns its
    folder.
    """

    def write(more: str = "", **replaced: str) -> Path:
        lines = [
            next(
                (
                    f"{key}: {value}"
                    for key, value in replaced.items()
                    if line.startswith(f"{key}:")
                ),
                line,
            )
            for line in MANIFEST.splitlines()
        ]
        (tmp_path / "task.yaml").write_text("\n".join(lines) + "\n" + more, "utf-8")
        return tmp_path

    return write
