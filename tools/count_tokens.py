"""Count the code below folders, whatever its layout: tokens of Python, words of C++.

Comments and the layout of lines count nothing. A docstring is one token.

    python tools/count_tokens.py skipsearch tests
"""

from __future__ import annotations

import sys
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def count_python_tokens(folder: Path) -> int:
    """Count names, numbers, strings and operators in the folder's Python files."""
    total = 0
    for path in folder.rglob("*.py"):
        with path.open("rb") as file:
            total += sum(token.type not in LAYOUT for token in tokenize.tokenize(file.readline))
    return total


def count_cpp_words(folder: Path) -> int:
    """Count the words, comments included, in the folder's C++ files."""
    files = [*folder.rglob("*.cpp"), *folder.rglob("*.h")]
    return sum(len(path.read_text("utf-8").split()) for path in files)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name folders to count, such as: python tools/count_tokens.py skipsearch tests")
    for name in sys.argv[1:]:
        folder = Path(name)
        print(
            f"{name}: {count_python_tokens(folder):,} tokens of Python, "
            f"{count_cpp_words(folder):,} words of C++"
        )
