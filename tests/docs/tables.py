"""The tables of the documents that are made from the code.

A document marks the place of a table with `<!-- name -->` and `<!-- /name -->`. Run as a program, this rewrites them all:

    PYTHONPATH=tests python -m docs.tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skipsearch.bench.methods import MethodRow, as_markdown
from skipsearch.cli.catalogue import rows

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TASKS = ("pycode", "prose")   # of the tables of methods
BLOCK = re.compile(r"<!-- (?P<name>[a-z-]+) -->\n(?P<text>.*?)<!-- /(?P=name) -->", re.DOTALL)


def listed(what: str) -> Callable[[], str]:
    """As `skipsearch list` prints it."""
    return lambda: table(what.removesuffix("s"), "what it does", rows(what))


def commands() -> str:
    """The commands and the first sentence that each says of itself."""
    from typer.main import get_command

    from skipsearch.cli.main import app, register

    if not app.registered_commands:
        register()
    found = {f"skipsearch {name}": command.get_short_help_str(200).removesuffix(".")
             for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]
    return table("command", "what it does", found)


def measured(task: str) -> Callable[[], str]:
    """What `bench --methods --json` gave, kept in `docs/measured/`."""
    return lambda: as_markdown([MethodRow.from_dict(row) for row in methods_of(task)["rows"]])


def methods_of(task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/measured" / f"methods-{task}.json").read_text("utf-8"))
    return found


def table(first: str, second: str, entries: Mapping[str, str]) -> str:
    """Two columns, the first of them as code."""
    lines = [f"| {first} | {second} |", "|---|---|"]
    lines += [f"| `{name}` | {note.replace('|', chr(92) + '|')} |" for name, note in entries.items()]
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"drafters": listed("drafters"), "exits": listed("exits"), "searchers": listed("searchers"),
                                        "engines": listed("engines"), "commands": commands, **{f"methods-{task}": measured(task) for task in TASKS}}


def filled(text: str) -> str:
    """A page with its tables as the code has them now. Raises: KeyError for a table that nothing here makes."""
    return BLOCK.sub(lambda block: f"<!-- {block['name']} -->\n{TABLES[block['name']]()}<!-- /{block['name']} -->", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")
