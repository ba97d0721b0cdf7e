"""From a request to the pieces of its answers: what the routes of the server share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from skipsearch.decoding import Decoder, Request
from skipsearch.errors import ModelError, SkipSearchError
from skipsearch.models.text import chat_template, token_ids
from skipsearch.serve.answers import Added, Choice, Envelope
from skipsearch.serve.asked import Asked, ChatAsked, CompletionAsked
from skipsearch.serve.desk import Desk, Job, Piece
from skipsearch.serve.faults import Fault
from skipsearch.serve.keys import Keys
from skipsearch.serve.limits import Limits
from skipsearch.serve.metrics import Metrics
from skipsearch.serve.tools import prompt_ids

DEFAULT_TOKENS = 16   # of a completion, as OpenAI has it; a chat's answer may fill the context


@dataclass
class Prompt:
    """ids: its tokens. echo: what a completion with echo begins with."""

    ids: list[int]
    echo: str = ""


class Asking:
    """One request under way: its answers, their jobs, and the queue that the worker's pieces come through."""

    def __init__(self, service: Service, asked: Asked, prompts: list[Prompt], key: str):
        chat = isinstance(asked, ChatAsked)
        self.service, self.asked = service, asked
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.envelope = Envelope(f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", service.name, chat)
        self.began = monotonic()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Choice, Piece | Fault | None]] = asyncio.Queue()
        kinds = [spec.kind for spec in service.desk.decoder.recipe.drafters]
        self.choices: list[Choice] = []
        self.jobs: list[Job] = []
        scored, top = _logprobs(asked)
        most, nothing = service.room(asked)
        for prompt in prompts:
            for number in range(asked.count):
                choice = Choice(len(self.choices), service.tokenizer, kinds, prompt.echo, drops_all=nothing)
                request = Request(prompt.ids, most, seed=asked.seed_of(number), **asked.sampling,
                                  processors=asked.processors(len(prompt.ids), service.model.spec.vocab))
                self.choices.append(choice)
                self.jobs.append(Job(request, prompt.ids, key, self._deliver_to(choice), plain=asked.skipsearch.profile == "none",
                                     top=top if scored else None, echo=bool(prompt.echo)))

    def _deliver_to(self, choice: Choice) -> Any:
        def deliver(piece: Piece | Fault | None) -> None:
            with suppress(RuntimeError):   # the server has ended, and nobody reads any more
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, piece))

        return deliver

    def submit(self) -> None:
        """Raises: Fault where the queue is full."""
        self.service.desk.submit(self.jobs)

    async def added(self, patience: float | None = None) -> AsyncIterator[Added | None]:
        """What each round adds to any of the answers, until all are whole; None where nothing came for `patience` seconds.

        Raises: Fault.
        """
        left, first = len(self.jobs), True
        while left:
            try:
                choice, piece = await asyncio.wait_for(self._queue.get(), patience)
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, Fault):
                raise piece
            if piece is None:
                left -= 1
                self.service.metrics.ended(choice.finish or "abort", monotonic() - self.began, choice.stats)
                continue
            if first:
                self.service.metrics.first_token(monotonic() - self.began)
                first = False
            chunk = piece.chunk
            if chunk is not None:
                proposal = chunk.proposal
                drafted, accepted = (0, 0) if proposal is None else (len(proposal.tokens), proposal.accepted(chunk.tokens))
                self.service.metrics.round(drafted, accepted, len(chunk.tokens))
            yield choice.add(piece)

    def abandon(self) -> None:
        """The client is gone, or the request failed: what it occupied is free within a round."""
        for job, choice in zip(self.jobs, self.choices, strict=True):
            self.service.desk.forget(job)
            if choice.finish is None:
                choice.finish = "abort"
                self.service.metrics.ended("abort", monotonic() - self.began, None)


class Service:
    """A decoder and all that belongs to serving it. name: what clients call the model."""

    def __init__(self, decoder: Decoder, keys: Keys, limits: Limits, name: str | None = None):
        model = decoder.model
        if model.tokenizer is None:
            raise ModelError(f"{model.spec.id} has no tokenizer, so it cannot be served: put its tokenizer files beside its weights")
        self.model, self.tokenizer, self.keys, self.limits = model, model.tokenizer, keys, limits
        self.name = name or model.spec.id
        self.is_chat = chat_template(self.tokenizer) is not None
        self.desk = Desk(decoder, limits)
        self.metrics = Metrics(self.name, lambda: self.desk.counts)

    async def ask(self, asked: Asked, key: str) -> Asking:
        """The request, looked at and queued. Raises: Fault."""
        if asked.model is not None and asked.model != self.name:
            raise Fault(404, f"there is no model {asked.model[:80]!r} here; this server has {self.name!r}", "model", "model_not_found")
        try:
            prompts = await asyncio.to_thread(self._prompts, asked)
            asking = Asking(self, asked, prompts, key)
            for job in asking.jobs:
                job.request.ready(self.model)
        except SkipSearchError as error:
            raise Fault(400, str(error), "messages" if isinstance(asked, ChatAsked) else "prompt") from None
        asking.submit()
        return asking

    def room(self, asked: Asked) -> tuple[int, bool]:
        """(most tokens of an answer, whether none of them is wanted)"""
        if isinstance(asked, ChatAsked):
            most = asked.max_completion_tokens or asked.max_tokens
            return most or self.model.spec.context or 4096, False
        assert isinstance(asked, CompletionAsked)
        most = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
        return max(1, most), most == 0

    def _prompts(self, asked: Asked) -> list[Prompt]:
        if isinstance(asked, ChatAsked):
            if not self.is_chat:
                raise Fault(400, f"{self.name} has no chat template, so nothing says how it reads a conversation: use /v1/completions",
                            "messages", "no_chat_template")
            return [Prompt(prompt_ids(self.tokenizer, asked.turns, asked.offered))]
        assert isinstance(asked, CompletionAsked)
        prompts = []
        for given in asked.prompts:
            ids = token_ids(self.tokenizer, given) if isinstance(given, str) else list(given)
            text = ""
            if asked.echo:
                text = given if isinstance(given, str) else str(self.tokenizer.decode(ids))
            prompts.append(Prompt(ids, text))
        return prompts


def _logprobs(asked: Asked) -> tuple[bool, int]:
    """(whether log-probabilities are asked for, how many of the likeliest tokens beside each)"""
    if isinstance(asked, ChatAsked):
        return bool(asked.logprobs), asked.top_logprobs or 0
    assert isinstance(asked, CompletionAsked)
    return asked.logprobs is not None, asked.logprobs or 0
