"""The page at `/`: a single file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi.responses import Response

PAGE = Path(__file__).with_name("page.html")


def page_response() -> Response:
    """Return the page with the headers of its content policy."""
    content, policy = _load_page()
    return Response(
        content,
        media_type="text/html; charset=utf-8",
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


@cache
def _load_page() -> tuple[bytes, str]:
    """Return (page, content security policy).

    The policy allows its style and script by their hashes and requests to this server, and nothing
    else.
    """
    text = PAGE.read_text("utf-8")
    allowed = {
        tag: " ".join(
            f"'sha256-{_csp_hash(part)}'"
            for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        )
        for tag in ("style", "script")
    }
    policy = (
        f"default-src 'none'; style-src {allowed['style']}; script-src {allowed['script']}; "
        "connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode("utf-8"), policy


def _csp_hash(text: str) -> str:
    """Return the hash of a style or script as a content security policy writes it."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
