"""How the libraries that read a model fail and warn, made fit to be told in a sentence of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def in_short(error: BaseException) -> str:
    """What an error says, as a part of a sentence."""
    return " ".join(str(error).split())[:200].rstrip(".: ") or type(error).__name__


@contextmanager
def no_panic() -> Iterator[None]:
    """The tokenizers library gives up on some files in a way that no `except Exception` sees. Raises: ValueError in its place."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it has no name that can be imported
            raise
        raise ValueError(in_short(error)) from None


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' own progress bars and warnings: what matters of them is raised or printed by us."""
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
