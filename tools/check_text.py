"""Check the layout of texts: one sentence a line in Markdown, at most 100 columns in code.

One sentence a line keeps a diff of prose as small as the change.
Headings, tables and code blocks are exempt; an item of a list follows the rule.

    python tools/check_text.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT_FOLDERS = ("calibration_data", "docs", "notebooks", "profiles", "skipsearch", "tests")
CODE_FOLDERS = ("skipsearch", "tests", "tools")
MAX_COLUMNS = 100

CLOSING = r"[)\]\"”’*_]*"
ABBREVIATION = r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bvs)"
SENTENCE_END = re.compile(rf"{ABBREVIATION}[.!?]{CLOSING}\s+(?=[\"“(\[*_]*[^\W\d_a-z])")
LINE_END = re.compile(rf"[.!?:;…—]{CLOSING}$")
ITEM = re.compile(r"^(?:[-*+]|\d+\.) +")
LABEL = re.compile(r"^\*{1,2}[^*]+\.\*{1,2} +")  # **Draft.** or *Draft.* before a sentence
FENCE = re.compile(r"\s*```")
PRAGMA = re.compile(r"\s+# (?:type: ignore|noqa).*")  # must stay on its line; Ruff ignores it too


def strip_markup(line: str) -> str:
    """Replace code spans by `X` and links by their text; drop an item's mark and its label."""
    line = re.sub(r"``.+?``|`[^`]+`", "X", line)
    line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", line)
    return LABEL.sub("", ITEM.sub("", line.strip()))


def prose_blocks(lines: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines of each paragraph and list item as (number from 1, line).

    Headings, tables, comments and code are skipped.
    """
    block: list[tuple[int, str]] = []
    in_fence = in_list = False
    after_blank = True
    for number, line in enumerate([*lines, ""], 1):
        text = line.strip()
        is_fence, is_item = bool(FENCE.match(line)), not in_fence and bool(ITEM.match(text))
        in_fence ^= is_fence
        in_list = is_item or (in_list and (not text or line.startswith(" ")))
        is_code = in_fence or is_fence or (after_blank and not in_list and line.startswith("    "))
        is_prose = bool(text) and not is_code and not text.startswith(("#", "|", "<!--"))
        if block and (is_item or not is_prose):
            yield block
            block = []
        if is_prose:
            block.append((number, line))
        after_blank = not is_prose


def markdown_problems(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number, problem) for lines of two sentences and for wrapped sentences."""
    for block in prose_blocks(lines):
        for index, (number, line) in enumerate(block):
            text = strip_markup(line)
            if SENTENCE_END.search(text):
                yield number, "two sentences on one line: start each sentence on a line of its own"
            if index + 1 < len(block) and not LINE_END.search(text):
                yield number, "a sentence continues on the next line: write it on one line"


def code_problems(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number, problem) for lines of more than MAX_COLUMNS columns, without a pragma."""
    for number, line in enumerate(lines, 1):
        columns = len(PRAGMA.sub("", line))
        if columns > MAX_COLUMNS:
            yield number, f"{columns} columns: break the line at {MAX_COLUMNS}"


def find_problems(path: Path) -> Iterator[str]:
    """Yield each problem of a Markdown file, a notebook or a source file as one line of text."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        for number, cell in enumerate(cells, 1):
            for line, problem in markdown_problems("".join(cell["source"]).splitlines()):
                yield f"{path}, markdown cell {number}, line {line}: {problem}"
        return
    check = markdown_problems if path.suffix == ".md" else code_problems
    for line, problem in check(text.splitlines()):
        yield f"{path}:{line}: {problem}"


def find_files() -> Iterator[Path]:
    """Yield the files to check; golden files are what a program writes."""
    yield from sorted(ROOT.glob("*.md"))
    suffixes = [(folder, (".md", ".ipynb")) for folder in TEXT_FOLDERS]
    suffixes += [(folder, (".py", ".cpp", ".h")) for folder in CODE_FOLDERS]
    for folder, endings in suffixes:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings and "golden" not in path.parts:
                yield path


if __name__ == "__main__":
    problems = [problem for path in find_files() for problem in find_problems(path)]
    print("\n".join(problems) or "texts: one sentence a line")
    sys.exit(bool(problems))
