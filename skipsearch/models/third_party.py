"""Handle the errors and warnings of the libraries that read a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error's message, as a phrase."""
    return " ".join(str(error).split())[:200].rstrip(".: ") or type(error).__name__


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of tokenizers, which `except Exception` misses, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise ValueError(first_line_of(error)) from None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and warnings. Our own code reports what matters."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
