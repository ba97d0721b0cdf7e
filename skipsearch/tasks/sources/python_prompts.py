"""Cut Python source into prompts that a model can continue naturally. Lengths count characters."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_CODE_CHARS = 650  # of a code prompt: about 200 tokens of a small vocabulary
MIN_CODE_CHARS = 350
MIN_LINES_AFTER_CUT = 6  # lines of the function after the cut, for the model to write
MAX_DOCSTRING_CHARS = 600
MAX_DOCSTRING_FRACTION = 0.6  # the largest part of a docstring that a prompt has
# Fraction of letters and spaces in a docstring; below that it is a table or a listing.
MIN_LETTER_FRACTION = 0.75


def iter_code_prompts(source: str) -> Iterator[tuple[str, str]]:
    """Yield (function name, prompt) for each function that is long enough.

    The prompt starts at the function or in the source above it. It ends in the function: after the
    signature and docstring, or after one of the first three statements. Prompts end without a line
    break, because tokenizers join one with the indentation that follows it.
    """
    text = normalise_whitespace(source)
    lines = text.split("\n")
    for name, node in _walk_definitions(parse_source(text), ""):
        if not isinstance(node, Function):
            continue
        cuts = _find_cuts(node, lines)
        if cuts:
            cut = cuts[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(cuts)]
            start = _find_first_line(lines, cut)
            prompt = "\n".join(lines[start:cut]).strip("\n")
            if start < node.lineno and len(prompt) >= MIN_CODE_CHARS:
                yield name, prompt


def iter_docstring_prompts(source: str, min_chars: int) -> Iterator[tuple[str, str]]:
    """Yield (name, prompt) for each docstring of `min_chars` characters or more that is prose.

    The prompt is its first part, cut between two words.
    """
    for name, node in _walk_definitions(parse_source(normalise_whitespace(source)), ""):
        doc = ast.get_docstring(node) or ""
        budget = min(MAX_DOCSTRING_CHARS, int(MAX_DOCSTRING_FRACTION * len(doc)))
        prompt = doc[:budget].rsplit(None, 1)[0] if len(doc) >= min_chars else ""
        if (
            prompt
            and ">>>" not in prompt
            and sum(c.isalpha() or c.isspace() for c in prompt) >= MIN_LETTER_FRACTION * len(prompt)
        ):
            yield name, prompt


def normalise_whitespace(source: str) -> str:
    """Return the source with spaces for tabs, no spaces at line ends, and one kind of line break.

    So prompts do not depend on the settings of an editor.
    """
    return "\n".join(
        line.rstrip() for line in source.replace("\r\n", "\n").expandtabs(4).split("\n")
    )


def parse_source(text: str) -> ast.Module:
    """Parse Python source. A template, or a file for another version, gives an empty module."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _walk_definitions(
    node: ast.Module | ast.ClassDef | Function, prefix: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | Function]]:
    """Yield the module (named ""), its classes and its functions in order, nested ones included, by
    dotted name.
    """
    yield prefix, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | Function):
            yield from _walk_definitions(child, f"{prefix}.{child.name}" if prefix else child.name)


def _find_cuts(node: Function, lines: list[str]) -> list[int]:
    """Return the numbers of lines of the file after which a prompt may end."""
    has_docstring = ast.get_docstring(node) is not None
    statements = node.body[has_docstring:]
    if not statements or node.body[0].lineno <= node.lineno:
        return []
    header = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
    ends = [header, *(statement.end_lineno for statement in statements[:3])]
    n_lines_after = {
        end: sum(bool(line.strip()) for line in lines[end : node.end_lineno]) for end in ends if end
    }
    return [end for end, count in n_lines_after.items() if count >= MIN_LINES_AFTER_CUT]


def _find_first_line(lines: list[str], cut: int) -> int:
    """Return the line at which a prompt starts.

    A prompt is at most MAX_CODE_CHARS long. It starts at the first paragraph that begins within
    this length, unless it would then be too short. Otherwise, it has the full length.
    """
    start, size = cut, 0
    while start > 0 and size + len(lines[start - 1]) + 1 <= MAX_CODE_CHARS:
        start -= 1
        size += len(lines[start]) + 1
    for line in range(start, cut):
        if size < MIN_CODE_CHARS + 50:
            break
        if lines[line].strip() and (line == 0 or not lines[line - 1].strip()):
            return line
        size -= len(lines[line]) + 1
    return start
