"""Turn the errors and warnings of the libraries that read a model into sentences of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def first_line_of(error: BaseException) -> str:
    """Return the message of an error as a part of a sentence."""
    return " ".join(str(error).split())[:200].rstrip(".: ") or type(error).__name__


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a ValueError instead of the tokenizers library's panic, which no `except Exception`
    catches.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it has no name that can be imported
            raise
        raise ValueError(first_line_of(error)) from None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and warnings. What matters is raised or printed by us."""
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
