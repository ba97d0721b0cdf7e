"""What every command shares: two consoles, one way to print data, one way to fail.

Progress and tables for people go to stderr (`err`) or, where they are the answer, to stdout (`out`); `--json` prints data
alone on stdout. Exit status: 0 done, 1 the work failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(data: Any) -> None:
    """One JSON object on one line of stdout, as soon as it exists (a pipe reader need not wait)."""
    print(json.dumps(data, ensure_ascii=False, allow_nan=False), flush=True)
