"""The linter of texts notices what it is there for, and nothing else."""

from __future__ import annotations

import pytest
from check_text import MAX_COLUMNS, code_problems, markdown_problems


@pytest.mark.parametrize(
    "text",
    [
        "It drafts. It verifies.",
        "It drafts (in C++). **Then** it verifies.",
        "Call `draft()`. `verify()` follows.",
        "It is 1.5. α is 2.",
        "- It drafts. It verifies.",
        "- It drafts.\n  It verifies. It commits.",
        "1. It drafts. It verifies.",
        "**Draft.** It drafts. It verifies.",
        "A sentence that\ngoes on.",
        "- An item that\n  goes on.",
        "```\nA. B.\n```\nIt drafts. It verifies.",
        "See [a page](a.md). It is short.",
    ],
)
def test_two_sentences_on_a_line_and_wrapped_sentences_are_problems(text: str) -> None:
    assert list(markdown_problems(text.split("\n")))


@pytest.mark.parametrize(
    "text",
    [
        "It drafts.\nIt verifies.",
        "Zhang et al. 2023, e.g. Draft & Verify, i.e. `skip`.",
        "Version 1.5 of vLLM.",
        "- one\n- two",
        "- **Draft.** It drafts.",
        "# A. B.",
        "| A. B. | C |",
        "```\nA. B.\nwrapped code\n```",
        "Run:\n\n    make A. B.\n    make C",
        "`A. B.` is code.",
        "<!-- A. B. -->",
        "1. one\n2. two",
    ],
)
def test_lines_of_one_sentence_tables_headings_and_code_are_none(text: str) -> None:
    assert not list(markdown_problems(text.split("\n")))


def test_a_problem_names_its_line() -> None:
    lines = ["One.", "", "Two. Three.", "```", "A. B.", "```", "- Four. Five."]
    assert [line for line, _ in markdown_problems(lines)] == [3, 7]


def test_code_lines_have_a_limit() -> None:
    assert [line for line, _ in code_problems(["x" * MAX_COLUMNS, "x" * (MAX_COLUMNS + 1)])] == [2]


def test_a_pragma_at_the_end_of_a_line_does_not_count() -> None:
    code = "x" * MAX_COLUMNS
    lines = [f"{code}  # type: ignore[arg-type]", f"{code}  # noqa: SIM118", f"{code}  # why"]
    assert [line for line, _ in code_problems(lines)] == [3]
