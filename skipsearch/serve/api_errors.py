"""The error response to a request: an HTTP status and a body in the form of OpenAI's errors."""

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
    """A request that is answered with an error.

    status: the HTTP status.
    message: one sentence.
    param: the field of the request that is wrong.
    code: an error code for programs.
    headers: of the response.
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
        """The response body, in the form of OpenAI's errors."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }
