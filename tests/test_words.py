"""`tools/check_words.py` reports an old word and a name that exists twice, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_words import find_problems, word_problems

GOOD = '''"""Run the system."""


class Run:
    def start(self, system: str) -> str:
        return system  # `peer` in backticks is a name
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of one package with one file that has nothing to report."""
    for folder in ("skipsearch/bench", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "glossary.md").write_text("| word | meaning |\n|---|---|\n| a | b |\n")
    (tmp_path / "skipsearch" / "bench" / "run.py").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize(
    ("good", "bad", "line", "word"),
    [
        ("system: str", "peer: str", 5, "peer"),
        ("# `peer`", "# a peer", 6, "peer"),
        ("the system.", "what stands behind it.", 1, "behind"),
        ("def start", "def start_fault", 5, "start_fault"),
        ("return system", "return [found for found in system]", 6, "found"),
    ],
)
def test_a_planted_word_is_reported(
    checkout: Path, good: str, bad: str, line: int, word: str
) -> None:
    assert list(find_problems(checkout)) == []
    file = checkout / "skipsearch" / "bench" / "run.py"
    file.write_text(GOOD.replace(good, bad))
    assert any(
        problem.startswith(f"{file}:{line}: {word} -> use ") for problem in find_problems(checkout)
    )


def test_told_is_a_word_of_searchers(tmp_path: Path) -> None:
    file = tmp_path / "tpe.py"
    file.write_text('"""Learn from trials that were told."""\n')
    assert list(word_problems(file, "searchers")) == []
    assert list(word_problems(file, "serve")) == [f"{file}:1: told -> use reported"]


def test_a_second_class_of_one_name_is_reported(checkout: Path) -> None:
    second = checkout / "skipsearch" / "serve" / "run.py"
    second.parent.mkdir()
    second.write_text(GOOD)
    (problem,) = find_problems(checkout)
    assert problem.startswith(f"{second}:4: class Run -> use another name")


def test_a_long_glossary_is_reported(checkout: Path) -> None:
    glossary = checkout / "docs" / "glossary.md"
    glossary.write_text(glossary.read_text() + "| a | b |\n" * 80)
    assert list(find_problems(checkout)) == [f"{glossary}:1: 81 words -> use at most 80"]
