"""The documents: links lead somewhere, tables are those of the code, and pictures exist in light
and dark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from skipsearch.bench.method_table import PROGRAM_TITLES

from . import results
from .tables import BLOCK, PAGES, PICTURES, ROOT, TABLES, filled

FOLDERS = ("profiles", "calibration_data", "docs", "tests", "skipsearch")
EVERY = sorted(
    {
        *PAGES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
    }
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page is written with, by the rule of GitHub."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_code(page: Path) -> None:
    assert filled(page.read_text("utf-8")) == page.read_text("utf-8"), "make tables rewrites them"


def test_each_table_stands_somewhere() -> None:
    assert {
        block["name"] for page in PAGES for block in BLOCK.finditer(page.read_text("utf-8"))
    } == set(TABLES)


def test_every_page_is_linked_from_the_index_and_says_what_it_is_for() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index
        assert len(page.read_text("utf-8").split("\n\n")[1]) > 40, (
            f"{page.name} opens without a sentence"
        )


@pytest.mark.parametrize(
    "path",
    [
        "CITATION.cff",
        *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "idea", "measurement")),
    ],
)
def test_what_github_reads_is_yaml_with_a_title(path: str) -> None:
    found = yaml.safe_load((ROOT / path).read_text("utf-8"))
    assert found.get("title") or (found["name"] and found["description"] and found["body"])


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_shows_the_figures_of_its_file_in_light_and_dark(file: str) -> None:
    drawn = (results.PICTURES / file).read_text("utf-8")
    shown = {
        "whole-answers.svg": [
            f"{row['speedup']['mean']:.2f}×"
            for task in results.PICTURED
            for row in results.whole_answers(task)
        ],
        "head-training.svg": [f"step {step}" for step in (1, 2, 3)],
    }[file]
    for text in shown:
        assert f">{text}<" in drawn
    assert "prefers-color-scheme: dark" in drawn
    assert "#1f2328" not in drawn.partition("</style>")[2], "every colour follows the scheme"


def test_the_results_are_of_texts_that_no_draft_changed() -> None:
    greedy = [path for path in results.METHODS if path.stem not in results.SAMPLED]
    rows = [row for path in greedy for row in json.loads(path.read_text("utf-8"))["rows"]]
    ours = [row for row in rows if row["method"] not in PROGRAM_TITLES.values()]
    assert len(ours) > 10
    assert all(row["identical"] == row["prompts"] > 0 for row in ours)
