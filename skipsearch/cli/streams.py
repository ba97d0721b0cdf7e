"""Repair standard input, output and error.

A shell can start a command with any of the three closed, and a locale can name an encoding that
lacks most characters. A command then prints an error or escapes instead of a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import typer


class ClosedInput(io.TextIOBase):
    """A standard input that was closed when the command began: it has no lines, and reading its
    bytes raises OSError.
    """

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """Return the end of input."""
        return ""

    @property
    def buffer(self) -> BinaryIO:
        """Raise OSError, as a read of any closed file does."""
        raise OSError(
            errno.EBADF,
            "standard input is closed, so there is no prompt to read: give one by a pipe or a file",
        )


class ClosedOutput(io.TextIOBase):
    """A standard output that was closed when the command began. Writing to it raises OSError."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Raise OSError, as a write to any closed file does."""
        raise OSError(
            errno.EBADF,
            "standard output is closed, so the result cannot be printed: send it to a file, or to "
            "/dev/null",
        )


def prepare_streams() -> None:
    """Make the standard streams usable. Call it before anything is read, printed or opened.

    A closed stream gets the null device as its descriptor. Otherwise the next opened file would
    take its number, and the output of a library would go into that file. If standard error is
    closed, its output is dropped.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = cast(TextIO, ClosedInput())
    if sys.stdout is None:
        sys.stdout = cast(TextIO, ClosedOutput())
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    # Bytes that are not text are read as escapes, as in arguments. Code that uses the text rejects
    # them.
    _set(
        sys.stdin, errors="surrogateescape", **({} if is_unicode(sys.stdin) else _wider(sys.stdin))
    )
    for stream in (sys.stdout, sys.stderr):
        _set(stream, errors="backslashreplace")


def is_unicode(stream: TextIO) -> bool:
    """Return whether the stream's encoding can write every character."""
    encoding = getattr(stream, "encoding", None)  # None for a stream of text, such as StringIO
    return encoding is None or encoding.lower().replace("_", "-").startswith("utf")


def decode_argument(text: str) -> str:
    """Return an argument as text. In a locale without Unicode, UTF-8 arrives as escaped bytes.

    Raises: BadParameter for bytes that are not UTF-8.
    """
    try:
        return text if text.isascii() else os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise typer.BadParameter(
            f"it has the byte 0x{byte:02x}, which is not UTF-8: write the text in UTF-8"
        ) from None
    except UnicodeEncodeError:  # not from a command line
        return text


def _wider(stream: TextIO) -> dict[str, str]:
    """Return the settings with which a stream in ASCII becomes one in UTF-8.

    ASCII is part of UTF-8, so text that was readable stays the same.
    """
    return (
        {"encoding": "utf-8"}
        if stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
        else {}
    )


def _set(stream: TextIO, **settings: Any) -> None:
    if isinstance(stream, io.TextIOWrapper):  # tests and notebooks replace the streams
        stream.reconfigure(**settings)
