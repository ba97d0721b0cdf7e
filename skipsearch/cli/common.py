"""What every command shares: two consoles, one way to print data, one way to fail.

Progress and tables for people go to stderr (`err`) or, where they are the answer, to stdout (`out`); `--json` prints data
alone on stdout. Exit status: 0 done, 1 the work failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any, TextIO

from skipsearch.cli.outside import Terminal, visible_json

PIPE_COLUMNS = 140  # of a table that does not go to a terminal, unless COLUMNS says otherwise


def _width(stream: TextIO) -> int | None:
    return None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS


out = Terminal(width=_width(sys.stdout))
err = Terminal(stderr=True, width=_width(sys.stderr))


def called() -> str:
    """How to call this command from here, for lines to copy: `skipsearch`, or its path where no shell finds it by name."""
    program = sys.argv[0]
    if os.path.basename(program) != "skipsearch" or shutil.which("skipsearch"):
        return "skipsearch"
    here = os.path.relpath(program)
    return program if here.startswith(os.pardir) else here


def print_json(data: Any) -> None:
    """One JSON object on one line of stdout, as soon as it exists (a pipe reader need not wait)."""
    print(visible_json(json.dumps(data, ensure_ascii=False, allow_nan=False)), flush=True)
