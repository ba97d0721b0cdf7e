"""What every command shares: two consoles, one way to print data, one way to fail.

Progress and tables for people go to stderr (`err`) or, where they are the answer, to stdout
(`out`); `--json` prints data alone on stdout. Exit status: 0 done, 1 the work failed, 2 usage, 130
interrupted."""

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
    return (
        None
        if (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
        else PIPE_COLUMNS
    )


out = Terminal(width=_console_width(sys.stdout))
err = Terminal(stderr=True, width=_console_width(sys.stderr))


def program_name() -> str:
    """How to call this command from here, for lines to copy: `skipsearch`, or its path where no
    shell finds it by name.
    """
    program = sys.argv[0]
    if os.path.basename(program) != "skipsearch" or shutil.which("skipsearch"):
        return "skipsearch"
    here = os.path.relpath(program)
    return program if here.startswith(os.pardir) else here


def print_json(data: Any) -> None:
    """Print one JSON object on one line of stdout, as soon as it exists (a pipe reader need not
    wait).
    """
    print(
        escape_json_controls(
            json.dumps(data, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False)
        ),
        flush=True,
    )
