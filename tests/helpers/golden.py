"""Golden files: what a format or a command's text is, written again only when
SKIPSEARCH_REGENERATE_GOLDEN=1 asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

REGENERATE = os.environ.get("SKIPSEARCH_REGENERATE_GOLDEN") == "1"


def check_golden(path: Path, text: str) -> None:
    if REGENERATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        f"{path.name} differs; SKIPSEARCH_REGENERATE_GOLDEN=1 rewrites it"
    )
