"""`Request`: everything that one generation is asked for, in one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from skipsearch.decoding.arguments import shown, token_ids
from skipsearch.decoding.sampling import Sampling, is_whole
from skipsearch.decoding.steering import Processor, Steering
from skipsearch.decoding.stopping import Stopper
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter


class Settings(TypedDict, total=False):
    """What a `Request` has beside its prompt and limit, for callers that pass it by keyword."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str] | None
    end_on_repeat: int | None
    ignore_eos: bool
    processors: tuple[Processor, ...]


@dataclass(frozen=True)
class Request:
    """input_ids: a list, or a tensor [T] or [1, T]. max_new_tokens: exact limit, cut down to what the model's context leaves.

    temperature 0 is greedy; top_k 0 and top_p 1 are off. A seed repeats a sample with one profile; across profiles samples differ while
    their distribution does not. stop: strings that end the text, left out of it. end_on_repeat: end at the first n-gram of this length that
    the generation has already written. ignore_eos: an end-of-sequence token ends nothing. processors: called before temperature, top-k and
    top-p, once for each emitted token and in order, with the tokens so far [1, T] and logits [1, V], whose place their answer takes.
    """

    input_ids: Sequence[int] | Tensor
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: str | Sequence[str] | None = None
    end_on_repeat: int | None = None
    ignore_eos: bool = False
    processors: tuple[Processor, ...] = ()

    def ready(self, model: ModelAdapter) -> ReadyRequest:
        """Looked at, and set against the model. Raises: DecodeError for what makes no sense, or does not fit it."""
        ids, room = self._fitting(model)
        sampling = Sampling(self.temperature, self.top_p, self.top_k)
        if not is_whole(self.seed) or not -2**63 <= self.seed < 2**64:
            raise DecodeError(f"seed is {self.seed!r}; a seed is a whole number of at most 64 bits")
        eos = () if self.ignore_eos else model.spec.eos_token_ids
        steering = None
        if self.processors:
            if not all(callable(processor) for processor in self.processors):
                raise DecodeError(f"processors is {shown(self.processors)}; give functions of (token ids [1, T], logits [1, V])")
            prompt = torch.tensor([ids], device=model.spec.device)
            steering = Steering([*self.processors, *sampling.warpers()], prompt, room, not sampling.greedy)
        return ReadyRequest(ids, sampling, Stopper(room, eos, self.stop, model.tokenizer, self.end_on_repeat), int(self.seed), steering)

    def _fitting(self, model: ModelAdapter) -> tuple[list[int], int]:
        """(token ids, tokens that may be generated)"""
        ids, spec, most = token_ids(self.input_ids), model.spec, self.max_new_tokens
        if not ids:
            raise DecodeError("the prompt is empty: give at least one token to go on from")
        outside = next((t for t in ids if not 0 <= t < spec.vocab), None)
        if outside is not None:
            raise DecodeError(f"token id {outside} is outside 0..{spec.vocab - 1}, the vocabulary of {spec.id}; "
                              "was it made by another tokenizer?")
        if not is_whole(most) or most < 1:
            raise DecodeError(f"max_new_tokens is {most!r}; ask for a whole number of tokens, at least 1")
        if spec.context is not None:
            if len(ids) >= spec.context:
                raise DecodeError(f"the prompt has {len(ids)} tokens and {spec.id} was made for {spec.context}, the answer included: "
                                  "shorten it")
            most = min(int(most), spec.context - len(ids))
        return ids, int(most)


@dataclass
class ReadyRequest:
    """A request as the loop takes it. stopper and steering judge the generation token by token, so they serve one."""

    prompt: list[int]
    sampling: Sampling
    stopper: Stopper
    seed: int = 0
    steering: Steering | None = None
