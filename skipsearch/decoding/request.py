"""`Request`: the prompt and all options of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from skipsearch.constraints import Matcher, compile_constraint
from skipsearch.core.constraint import Constraint
from skipsearch.decoding.processed import ConstraintProcessor, ProcessedAcceptance, Processor
from skipsearch.decoding.repetition import EndOnRepeat
from skipsearch.decoding.stopping import StopCondition
from skipsearch.decoding.validation import as_token_ids, short_repr
from skipsearch.engine.sampler import SamplingParams, is_integral
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter


class RequestOptions(TypedDict, total=False):
    """The fields of a `Request` except its prompt and limit, for callers that pass keywords."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str] | None
    end_on_repeat: EndOnRepeat
    ignore_eos: bool
    processors: tuple[Processor, ...]
    max_seconds: float | None
    constraint: Constraint | None
    constrained_before: str
    max_draft_tokens: int | None
    kept_special: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """The prompt and all options of one generation."""

    input_ids: Sequence[int] | Tensor  # the prompt: a list, or a tensor [T] or [1, T]
    max_new_tokens: int = 128  # exact limit, reduced if the model's context is shorter
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    # The same seed and profile give the same sample. Another profile gives another sample from the
    # same distribution.
    seed: int = 0
    # Strings that end the text and are not part of it: at most 16 (MAX_STOP_STRINGS), each of at
    # most 1,024 characters (MAX_STOP_CHARACTERS).
    stop: str | Sequence[str] | None = None
    # End at the first repeated n-gram of this length, or at a "loop".
    end_on_repeat: EndOnRepeat = None
    ignore_eos: bool = False  # an end-of-sequence token does not end the text
    # Functions (tokens so far [1, T], logits [1, V]) -> logits [1, V] that run before temperature,
    # top-k and top-p: once for each emitted token, in order, and never after the last.
    processors: tuple[Processor, ...] = ()
    max_seconds: float | None = None  # end the text with the first token after this time
    # The shape of the text. Tokens that it forbids are ruled out before temperature, top-k and
    # top-p, and after the processors. It needs `pip install 'skipsearch[constraints]'`.
    constraint: Constraint | None = None
    # The end of the prompt that the text continues: the constraint is of both together.
    constrained_before: str = ""
    max_draft_tokens: int | None = None  # of a round; None: as many as the recipe allows
    # Special tokens that are part of the text, such as marks of calls. Others have no text.
    kept_special: tuple[str, ...] = ()

    def prepare(self, model: ModelAdapter) -> PreparedRequest:
        """Check the request, and return it in the form that the loop needs.

        Raises: DecodeError if a value is not allowed or does not fit the model.
        """
        ids, max_tokens = self._fit_to_model(model)
        sampling = SamplingParams(self.temperature, self.top_p, self.top_k)
        if not is_integral(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise DecodeError(f"seed is {self.seed!r}; a seed is a whole number of at most 64 bits")
        limit = self.max_draft_tokens
        if limit is not None and (not is_integral(limit) or limit < 0):
            raise DecodeError(
                f"max_draft_tokens is {short_repr(limit)}; give a whole number from 0 (no drafts) "
                "on, or None"
            )
        eos = () if self.ignore_eos else model.spec.eos_token_ids
        matcher = self.new_matcher(model)
        constraint = None if matcher is None else ConstraintProcessor(matcher, len(ids))
        processed_acceptance = None
        if self.processors:
            if not all(callable(processor) for processor in self.processors):
                raise DecodeError(
                    f"processors is {short_repr(self.processors)}; give functions of (token ids "
                    "[1, T], logits [1, V])"
                )
            prompt = torch.tensor([ids], device=model.spec.device)
            processed_acceptance = ProcessedAcceptance(
                [
                    *self.processors,
                    *([constraint] if constraint is not None else []),
                    *sampling.build_warpers(),
                ],
                prompt,
                max_tokens,
                not sampling.is_greedy,
            )
        stop_condition = StopCondition(
            max_tokens,
            eos,
            self.stop,
            model.tokenizer,
            self.end_on_repeat,
            self.max_seconds,
            self.kept_special,
        )
        return PreparedRequest(
            ids, sampling, stop_condition, int(self.seed), processed_acceptance, constraint, limit
        )

    def new_matcher(self, model: ModelAdapter) -> Matcher | None:
        """Return the state of the constraint at the start of the answer; None without a constraint.

        Raises: DecodeError if the constraint cannot be used with this model.
        """
        if self.constraint is None:
            return None
        if not isinstance(self.constraint, Constraint):
            raise DecodeError(
                f"constraint is {short_repr(self.constraint)}; give skipsearch.Constraint"
                "(json_schema={…}), or its regex or grammar"
            )
        if self.ignore_eos:
            raise DecodeError(
                "ignore_eos is true and a constraint ends the text by an end-of-sequence token: "
                "leave one of them out"
            )
        spec = model.spec
        compiled = compile_constraint(
            self.constraint, model.tokenizer, spec.vocab_size, spec.eos_token_ids
        )
        return compiled.new_matcher(self.constrained_before)

    def _fit_to_model(self, model: ModelAdapter) -> tuple[list[int], int]:
        """Return (token ids, number of tokens that may be generated)."""
        ids, spec, max_tokens = as_token_ids(self.input_ids), model.spec, self.max_new_tokens
        if not ids:
            raise DecodeError("the prompt is empty: give at least one token to go on from")
        outside = next((t for t in ids if not 0 <= t < spec.vocab_size), None)
        if outside is not None:
            raise DecodeError(
                f"token id {outside} is outside 0..{spec.vocab_size - 1}, the vocabulary of "
                f"{spec.id}; was it made by another tokenizer?"
            )
        if not is_integral(max_tokens) or max_tokens < 1:
            raise DecodeError(
                f"max_new_tokens is {max_tokens!r}; ask for a whole number of tokens, at least 1"
            )
        if spec.context_length is not None:
            if len(ids) >= spec.context_length:
                raise DecodeError(
                    f"the prompt has {len(ids)} tokens and {spec.id} was made for "
                    f"{spec.context_length}, the answer included: shorten it"
                )
            max_tokens = min(int(max_tokens), spec.context_length - len(ids))
        return ids, int(max_tokens)


@dataclass
class PreparedRequest:
    """A checked request for the loop. It has a state, so it serves only one generation."""

    prompt_ids: list[int]
    sampling: SamplingParams
    stop_condition: StopCondition
    seed: int = 0
    processed_acceptance: ProcessedAcceptance | None = None  # None: the request has no processors
    constraint: ConstraintProcessor | None = None  # None: the request has no constraint
    max_draft_tokens: int | None = None
