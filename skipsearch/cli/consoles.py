"""The consoles that every command prints through, and one way to print JSON.

Progress and remarks go to stderr (`err`). Results go to stdout (`out`); with `--json` stdout has
data only. Exit status: 0 done, 1 the work failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any, TextIO

from skipsearch.cli.streams import is_unicode
from skipsearch.cli.terminal import Terminal, escape_json_controls

PIPE_COLUMNS = 140  # of a table that does not go to a terminal, unless COLUMNS says otherwise


def _console_width(stream: TextIO | None) -> int | None:
    """Return the width of a console; None lets rich find out."""
    return (
        None
        if (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
        else PIPE_COLUMNS
    )


out = Terminal(width=_console_width(sys.stdout))
err = Terminal(stderr=True, width=_console_width(sys.stderr))


def program_name() -> str:
    """Return the name of this program, for commands that a user can copy.

    The name is `skipsearch` or, if the shell does not find that, the path of the program.
    """
    program = sys.argv[0]
    if os.path.basename(program) != "skipsearch" or shutil.which("skipsearch"):
        return "skipsearch"
    relative = os.path.relpath(program)
    return program if relative.startswith(os.pardir) else relative


def print_json(data: Any) -> None:
    """Print one JSON object on one line of stdout.

    The line is flushed, so that the reader of a pipe need not wait.
    """
    print(
        escape_json_controls(
            json.dumps(data, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False)
        ),
        flush=True,
    )
