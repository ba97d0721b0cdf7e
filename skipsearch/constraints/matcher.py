"""The port to a library that knows which tokens a constraint allows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from skipsearch.core.constraint import Constraint
from skipsearch.errors import DecodeError


class Matcher(Protocol):
    """The state of a constraint after the tokens of one answer.

    Tokens are the model's ids. An end-of-sequence token is legal if the text so far is a complete
    answer; no token is legal after it.
    """

    def fill_mask(self, mask: np.ndarray) -> None:
        """Set `mask`, bool [V], to whether each token is legal next.

        Raises: DecodeError if no token is, or if the constraint takes too much time or memory.
        """

    def count_legal(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens, in order, are legal. The state does not change."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Read tokens that are legal. Raises: DecodeError if one is not."""

    def roll_back(self, n_tokens: int) -> None:
        """Return to the state before the last `n_tokens` tokens."""

    def forced_tokens(self) -> list[int]:
        """Return the next tokens if the constraint leaves no choice; else [].

        The text is forced, not its tokens: the tokens are those that the tokenizer would make of
        the text. Another tokenisation of the same text is legal, too.
        """

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token is legal."""

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token ended the answer. No token is legal after it."""


class CompiledConstraint(Protocol):
    """A constraint that was checked and prepared for one tokenizer."""

    def new_matcher(self, text_before: str = "") -> Matcher:
        """Return the state at the start of an answer, or after its beginning `text_before`.

        Raises: DecodeError if no text of the constraint begins so.
        """


def compile_constraint(
    constraint: Constraint, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]
) -> CompiledConstraint:
    """Check a constraint, and prepare it for a model's tokens.

    vocab_size: of the model; it may be larger than the tokenizer's. eos_ids: the tokens that end an
    answer. Takes half a second for the first constraint of a tokenizer, and milliseconds later.

    Raises: DecodeError if the constraint is not valid or not supported, if no answer can have its
    shape, if the model has no tokenizer or no end-of-sequence token, and if the library is missing.
    """
    if tokenizer is None:
        raise DecodeError(
            "a constraint needs the model's tokenizer and this model has none: put its tokenizer "
            "files beside its weights"
        )
    if not eos_ids:
        raise DecodeError(
            "a constraint ends an answer by an end-of-sequence token and this model names none: "
            "leave the constraint out"
        )
    try:
        implementation = import_module("skipsearch.constraints.llguidance_matcher")
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise DecodeError(
            "a constraint needs the package llguidance: pip install 'skipsearch[constraints]'"
        ) from None
    compiled: CompiledConstraint = implementation.compile_with_llguidance(
        constraint, tokenizer, vocab_size, tuple(eos_ids)
    )
    return compiled
