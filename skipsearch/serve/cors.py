"""The option `--cors`: the sites whose pages may call the server from a browser (CORS)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skipsearch.errors import SkipSearchError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+")  # SCHEME://HOST[:PORT]


def read_origins(words: Sequence[str]) -> list[str]:
    """Return the origins of `--cors`: each word has one, or several separated by commas.

    Raises: SkipSearchError for a word that is no origin.
    """
    origins = [
        origin.strip().lower() for word in words for origin in word.split(",") if origin.strip()
    ]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SkipSearchError(
                f"--cors is {origin[:80]!r}; give an origin as browsers send it, such as "
                "http://localhost:3000 (no path, no slash at its end), or * for all pages"
            )
    return origins
