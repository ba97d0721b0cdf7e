"""Check that the package uses one word for one thing: the words of docs/glossary.md.

The tool reads names that the code defines, docstrings and comments of `skipsearch/`. It reports old
words, with the word to use. It also reports class names that exist twice, and a glossary that is
too long to read.

    python tools/check_words.py
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_GLOSSARY_ROWS = 80
NOUN = "a noun that says what it is"

# A whole name of a function, argument, variable or field -> what to use.
NAMES = {
    "asked": "request",
    "behind": "after",
    "beside": "siblings",
    "found": NOUN,
    "its": NOUN,
    "kept": NOUN,
    "said": NOUN,
    "there": NOUN,
    "those": NOUN,
    "told": "reported",
}
# A part of any name, as `room` in `room_for` -> what to use.
NAME_PARTS = {
    "desk": "scheduler",
    "eights": "int8",
    "fault": "error",
    "ledger": "study",
    "peer": "system",
    "peers": "systems",
    "piece": "chunk or part",
    "pieces": "chunks or parts",
    "programme": "program",
    "room": "capacity, cache lease or package",
    "rooms": "batch cache",
    "steering": "acceptance",
}
# Words of docstrings and comments, as a regular expression -> what to use.
PROSE = {
    "(?:calibration|hold-out|both) hal(?:f|ves)": "split",
    "anew": "again",
    "behind": "after",
    "beside": "next to, besides or with",
    "carr(?:y|ies|ied) out": "supports, run",
    "clever": "the name of the feature",
    "desk": "scheduler",
    "go(?:es)? on": "continue",
    "ledger": "study",
    "let go": "release",
    "likeliest": "most likely",
    "peers?": "system",
    "pieces?": "chunk or part",
    "programmes?": "program",
    "rooms?": "capacity, memory or package",
    "(?:stands?|stood)(?! for)": "is, or is accepted",
    "told": "reported",
    "trained parts?": "module",
    "whosever": "of any owner",
}
# Packages in which a word is the field's own.
FIELD_WORDS = {
    "told": ("searchers",),  # Optuna: ask and tell
    "with_pieces": ("serve",),  # a field of llama.cpp's server
}

DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NAME_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
CODE_SPAN = re.compile(r"``.+?``|`[^`]*`")


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each function, class, argument, variable and attribute."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITION):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def name_problems(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, name, what to use) of names with an old word."""
    for line, name in defined_names(tree):
        parts = [part.lower() for part in NAME_PART.findall(name)]
        use = NAMES.get(name.strip("_").lower()) or next(
            (NAME_PARTS[part] for part in parts if part in NAME_PARTS), None
        )
        if use is not None:
            yield line, name, use


def prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each line of a docstring and of each comment."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, *DEFINITION)) or not ast.get_docstring(node):
            continue
        docstring = node.body[0]
        yield from enumerate(
            source.splitlines()[docstring.lineno - 1 : docstring.end_lineno], docstring.lineno
        )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose_problems(source: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, what to use) of old words in docstrings and comments."""
    for line, text in prose(source, tree):
        for pattern, use in PROSE.items():
            # A name in backticks is checked where it is defined.
            for match in re.finditer(rf"\b{pattern}\b", CODE_SPAN.sub("", text), re.IGNORECASE):
                yield line, match[0], use


def word_problems(path: Path, package: str = "") -> Iterator[str]:
    """Yield each old word of a source file as one line of text.

    package: the folder below `skipsearch/` that the file is in.
    """
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    for line, word, use in sorted({*name_problems(tree), *prose_problems(source, tree)}):
        if package not in FIELD_WORDS.get(word.lower(), ()):
            yield f"{path}:{line}: {word} -> use {use}"


def repeated_names(paths: Iterable[Path]) -> Iterator[str]:
    """Yield each name of several classes as one line of text."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name}"].append(f"{path}:{node.lineno}")
    for name, (first, *others) in places.items():
        for other in others:
            yield f"{other}: {name} -> use another name, which {first} has already"


def glossary_problems(path: Path) -> Iterator[str]:
    """Yield one line of text if the glossary is too long."""
    rows = [line for line in path.read_text("utf-8").splitlines() if line.startswith("| ")]
    n_words = sum(not row.startswith("| word |") for row in rows)
    if n_words > MAX_GLOSSARY_ROWS:
        yield f"{path}:1: {n_words} words -> use at most {MAX_GLOSSARY_ROWS}"


def find_problems(root: Path = ROOT) -> Iterator[str]:
    """Yield each problem of a checkout as one line of text."""
    package = root / "skipsearch"
    paths = sorted(package.rglob("*.py"))
    for path in paths:
        yield from word_problems(path, path.relative_to(package).parts[0])
    yield from repeated_names(paths)
    yield from glossary_problems(root / "docs" / "glossary.md")


if __name__ == "__main__":
    problems = list(find_problems())
    print("\n".join(problems) or "words: those of the glossary")
    sys.exit(bool(problems))
