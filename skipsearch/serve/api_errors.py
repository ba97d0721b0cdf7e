"""What a request is answered where it cannot be carried out: a status, and a body in the shape of
OpenAI's errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class APIError(Exception):
    """status: of HTTP. message: one sentence. param: which field of the request is meant. code: for
    programs. headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            dict(headers or {}),
        )

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }
