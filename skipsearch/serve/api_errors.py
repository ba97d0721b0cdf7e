"""The error response to a request: an HTTP status and a body in the form of OpenAI's errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from skipsearch.errors import SkipSearchError

log = logging.getLogger("skipsearch.serve")

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


def to_api_error(error: Exception) -> APIError:
    """Return the error that a client gets.

    For an unexpected error the log records its type and place in one line, and the traceback too
    if it records details. The line omits the message, which may quote the request.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, SkipSearchError):
        return APIError(400, str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    location = (
        f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "nowhere"
    )
    log.error(
        "a request ended in %s at %s",
        type(error).__name__,
        location,
        exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
    )
    return APIError(
        500,
        "the server failed at this request, which is its own fault: try another, and report it",
        code="internal",
    )
