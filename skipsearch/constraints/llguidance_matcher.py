"""Constraints by llguidance (Microsoft, MIT): masks, roll-back and forced tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer

from skipsearch.constraints.after_thinking import begin_after_thinking
from skipsearch.core.closed_schema import close_objects
from skipsearch.core.constraint import JSON_STYLE, Constraint, ConstraintAfterThinking
from skipsearch.errors import DecodeError

# These limits end what takes more than about a second or 100 MB: states take 1 to 2 kB each.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
MAX_ERROR_CHARACTERS = 200
MAX_COMPILED = 64  # constraints of a tokenizer whose compiled form is remembered
_REASONS = {"NoExtensionBias": "no text continues it"}  # the library's word, for clients
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], _PreparedTokenizer]] = (
    WeakKeyDictionary()
)
_lock = Lock()


class _PreparedTokenizer:
    """The library's form of a tokenizer, and the constraints that were compiled for it last.

    A server compiles a constraint when it checks a request, and needs it again in the thread that
    decodes, where compiling would let other requests wait.
    """

    def __init__(self, tokenizer: LLTokenizer):
        self.tokenizer = tokenizer
        self.compiled: dict[Constraint, LLGuidanceConstraint] = {}  # the latest one last

    def remember(self, compiled: LLGuidanceConstraint) -> None:
        with _lock:
            self.compiled[compiled.constraint] = compiled
            while len(self.compiled) > MAX_COMPILED:
                del self.compiled[next(iter(self.compiled))]


def compile_with_llguidance(
    constraint: Constraint, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]
) -> LLGuidanceConstraint:
    """Compile a constraint. Arguments and errors are those of `compile_constraint`."""
    prepared = _prepare_tokenizer(tokenizer, vocab_size, eos_ids)
    if (known := prepared.compiled.get(constraint)) is not None:
        return known
    try:
        if constraint.json_schema is not None:
            own_style = "x-guidance" in constraint.json_schema
            grammar = LLMatcher.grammar_from_json_schema(
                close_objects(constraint.json_schema),
                defaults=None if own_style else JSON_STYLE,  # type: ignore[arg-type]
            )
        elif constraint.regex is not None:
            grammar = LLMatcher.grammar_from_regex(constraint.regex)
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(constraint.text))
        if isinstance(constraint, ConstraintAfterThinking):
            grammar = begin_after_thinking(
                grammar, constraint, tokenizer, prepared.tokenizer, eos_ids
            )
    except Exception as error:  # the library's converters raise errors of many classes
        raise _not_supported(constraint, str(error)) from None
    matcher = LLMatcher(prepared.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _not_supported(constraint, matcher.get_error())
    compiled = LLGuidanceConstraint(constraint, prepared.tokenizer, matcher, vocab_size, eos_ids)
    # A constraint that no token satisfies must be refused before the prefill.
    compiled.new_matcher().fill_mask(np.empty(vocab_size, dtype=bool))
    prepared.remember(compiled)
    return compiled


def _prepare_tokenizer(
    tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]
) -> _PreparedTokenizer:
    """Return the library's form of a tokenizer, which all constraints share."""
    with _lock:
        prepared = _tokenizers.setdefault(tokenizer, {})
        key = vocab_size, eos_ids
        if key not in prepared:
            try:
                prepared[key] = _PreparedTokenizer(
                    from_tokenizer(getattr(tokenizer, "full", tokenizer), vocab_size, list(eos_ids))
                )
            except (ValueError, RuntimeError) as error:
                raise DecodeError(
                    f"constraints need a fast tokenizer, and this model's "
                    f"{type(tokenizer).__name__} cannot be read: {_first_line(str(error))}"
                ) from None
        return prepared[key]


def _not_supported(constraint: Constraint, reason: str) -> DecodeError:
    return DecodeError(
        f"the constraint ({constraint}) cannot be used: {_first_line(reason)}; change it, or leave "
        "it out"
    )


def _first_line(text: str) -> str:
    """Return the first line of a library's message, printable and short: it may quote a user."""
    line = text.strip().split("\n")[0][:MAX_ERROR_CHARACTERS].rstrip(" .;:")
    return "".join(c if c.isprintable() else "?" for c in line) or "no reason is given"


class LLGuidanceConstraint:
    """A compiled constraint."""

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: LLTokenizer,
        start: LLMatcher,
        vocab_size: int,
        eos_ids: tuple[int, ...],
    ):
        self.constraint, self._tokenizer, self._start = constraint, tokenizer, start
        self.vocab_size, self.eos_ids = vocab_size, eos_ids

    def new_matcher(self, text_before: str = "") -> LLGuidanceMatcher:
        matcher = LLGuidanceMatcher(self, self._start.deep_copy())
        tokens = self._tokenizer.tokenize_str(text_before)
        if matcher.count_legal(tokens) < len(tokens):
            raise DecodeError(
                f"the answer is to continue {json.dumps(text_before[:60], ensure_ascii=False)}, "
                f"with which no text of its constraint ({self.constraint}) begins: change one of "
                "them, or leave it out"
            )
        matcher.advance(tokens)
        return matcher


class LLGuidanceMatcher:
    """The state of a constraint after the tokens of one answer.

    The library does not count end-of-sequence tokens, so this class counts them.
    """

    def __init__(self, compiled: LLGuidanceConstraint, matcher: LLMatcher):
        self._compiled, self._matcher = compiled, matcher
        self.has_ended = False
        self._words = np.zeros((compiled.vocab_size + 31) // 32, dtype=np.int32)
        self._eos = np.array(compiled.eos_ids)

    def fill_mask(self, mask: np.ndarray) -> None:
        if self.has_ended:
            raise self._error("no token is legal after the end of the answer")
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        # After an error the library allows the end of the answer, which may be incomplete.
        if self._matcher.is_error():
            raise self._error(self._matcher.get_error())
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=len(mask))
        mask[:] = bits.view(bool)
        mask[self._eos] = self._matcher.is_accepting()
        if not mask.any():
            raise self._error("no token of this model may follow")

    def count_legal(self, tokens: Sequence[int]) -> int:
        if self.has_ended:
            return 0
        end = next((i for i, token in enumerate(tokens) if token in self._compiled.eos_ids), None)
        n_legal = self._matcher.validate_tokens(list(tokens[:end]))
        if end is None or n_legal < end:
            return n_legal
        self._matcher.consume_tokens(list(tokens[:end]))
        is_accepting = self._matcher.is_accepting()
        self._matcher.rollback(end)
        return end + is_accepting

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._compiled.eos_ids and self._matcher.is_accepting():
                self.has_ended = True
            elif self.has_ended or not self._matcher.consume_token(token):
                reason = self._matcher.get_error() if self._matcher.is_error() else ""
                raise self._error(reason or f"token {token} is not legal")

    def roll_back(self, n_tokens: int) -> None:
        if n_tokens and self.has_ended:
            self.has_ended, n_tokens = False, n_tokens - 1
        if n_tokens:
            self._matcher.rollback(n_tokens)

    def forced_tokens(self) -> list[int]:
        if self.has_ended:
            return []
        if self.is_complete:
            return [self._compiled.eos_ids[0]] if len(self._compiled.eos_ids) == 1 else []
        return self._matcher.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        return not self.has_ended and self._matcher.is_stopped() and self._matcher.is_accepting()

    def _error(self, reason: str) -> DecodeError:
        line = _first_line(reason)
        return DecodeError(
            f"the constraint ({self._compiled.constraint}) cannot be followed further: "
            f"{_REASONS.get(line, line)}; change it, or leave it out"
        )
