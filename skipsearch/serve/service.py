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
from skipsearch.models.chat.chat_text import encode_prompt, get_chat_template
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import DEFAULT_CONTEXT, Limits
from skipsearch.serve.metrics import Metrics
from skipsearch.serve.protocol import BaseRequest, ChatCompletionRequest, CompletionRequest
from skipsearch.serve.responses import Choice, ChoiceDelta, ResponseBuilder
from skipsearch.serve.scheduler import Job, RoundOutput, Scheduler
from skipsearch.serve.tools import render_prompt_ids

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it; a chat's answer may fill the context
DEFAULT_CHAT_TOKENS = 4096  # where the model names no context


@dataclass
class TokenizedPrompt:
    """ids: its tokens. echo: what a completion with echo begins with."""

    ids: list[int]
    echo: str = ""


class ActiveRequest:
    """One request under way: its answers, their jobs, and the queue that the worker's pieces come
    through.
    """

    def __init__(
        self,
        service: Service,
        http_request: BaseRequest,
        prompts: list[TokenizedPrompt],
        tenant: str,
    ):
        chat = isinstance(http_request, ChatCompletionRequest)
        self.service, self.request = service, http_request
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.responses = ResponseBuilder(
            f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", service.name, chat
        )
        self.started_at = monotonic()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Choice, RoundOutput | APIError | None]] = asyncio.Queue()
        kinds = [spec.kind for spec in service.scheduler.decoder.recipe.drafters]
        self.choices: list[Choice] = []
        self.jobs: list[Job] = []
        scored, top = _logprob_options(http_request)
        nothing = (
            isinstance(http_request, CompletionRequest) and http_request.max_tokens == 0
        )  # but the echo is wanted
        for prompt in prompts:
            most = service.answer_limit(http_request, len(prompt.ids))
            for number in range(http_request.n_answers):
                choice = Choice(
                    len(self.choices), service.tokenizer, kinds, prompt.echo, hide_tokens=nothing
                )
                request = Request(
                    prompt.ids,
                    most,
                    seed=http_request.seed_for(number),
                    **http_request.sampling_options,
                    processors=http_request.processors(
                        len(prompt.ids), service.model.spec.vocab_size
                    ),
                )
                self.choices.append(choice)
                self.jobs.append(
                    Job(
                        request,
                        prompt.ids,
                        tenant,
                        self._make_deliver(choice),
                        plain=http_request.skipsearch.profile == "none",
                        n_top=top if scored else None,
                        echo=bool(prompt.echo),
                    )
                )

    def _make_deliver(self, choice: Choice) -> Any:
        def deliver(piece: RoundOutput | APIError | None) -> None:
            with suppress(RuntimeError):  # the server has ended, and nobody reads any more
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, piece))

        return deliver

    def submit(self) -> None:
        """Raises: Fault where the queue is full."""
        self.service.scheduler.submit(self.jobs)

    async def deltas(self, keep_alive_s: float | None = None) -> AsyncIterator[ChoiceDelta | None]:
        """What each round adds to any of the answers, until all are whole; None where nothing came
        for `keep_alive_s` seconds.

        Raises: Fault.
        """
        left, first = len(self.jobs), True
        while left:
            try:
                choice, piece = await asyncio.wait_for(self._queue.get(), keep_alive_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, APIError):
                raise piece
            if piece is None:
                left -= 1
                self.service.metrics.record_end(
                    choice.finish_reason or "abort", monotonic() - self.started_at, choice.stats
                )
                continue
            if first:
                self.service.metrics.record_first_token(monotonic() - self.started_at)
                first = False
            chunk = piece.chunk
            if chunk is not None:
                proposal = chunk.proposal
                drafted, accepted = (
                    (0, 0)
                    if proposal is None
                    else (len(proposal.tokens), proposal.count_accepted(chunk.tokens))
                )
                self.service.metrics.record_round(drafted, accepted, len(chunk.tokens))
            yield choice.add_round(piece)

    def cancel(self) -> None:
        """The client is gone, or the request failed: what it occupied is free within a round."""
        for job, choice in zip(self.jobs, self.choices, strict=True):
            self.service.scheduler.cancel(job)
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self.service.metrics.record_end("abort", monotonic() - self.started_at, None)


class Service:
    """A decoder and all that belongs to serving it. served_model_name: what clients call the
    model.
    """

    def __init__(
        self, decoder: Decoder, keys: APIKeys, limits: Limits, served_model_name: str | None = None
    ):
        model = decoder.model
        if model.tokenizer is None:
            raise ModelError(
                f"{model.spec.id} has no tokenizer, so it cannot be served: put its tokenizer "
                "files beside its weights"
            )
        self.model, self.tokenizer, self.keys, self.limits = model, model.tokenizer, keys, limits
        self.name = served_model_name or model.spec.id
        self.context = (
            limits.context or model.spec.context_length or DEFAULT_CONTEXT
        )  # tokens of a prompt and its answer
        self.is_chat = get_chat_template(self.tokenizer) is not None
        self.scheduler = Scheduler(decoder, limits)
        self.metrics = Metrics(self.name, lambda: self.scheduler.queue_sizes)

    async def submit(self, request: BaseRequest, tenant: str) -> ActiveRequest:
        """The request, looked at and queued. Raises: Fault."""
        if request.model is not None and request.model != self.name:
            raise APIError(
                404,
                f"there is no model {request.model[:80]!r} here; this server has {self.name!r}",
                "model",
                "model_not_found",
            )
        try:
            prompts = await asyncio.to_thread(self._tokenize_prompts, request)
            asking = ActiveRequest(self, request, prompts, tenant)
            await asyncio.to_thread(
                lambda: [job.request.prepare(self.model) for job in asking.jobs]
            )
        except SkipSearchError as error:
            raise APIError(
                400,
                str(error),
                "messages" if isinstance(request, ChatCompletionRequest) else "prompt",
            ) from None
        asking.submit()
        return asking

    def answer_limit(self, asked: BaseRequest, prompt_tokens: int) -> int:
        """Return the most tokens of an answer. Where the model's own context is the limit, it cuts
        a larger number down.

        Raises: Fault 400 for a prompt or a number beyond another limit.
        """
        if isinstance(asked, ChatCompletionRequest):
            name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            wanted, default = (
                asked.max_completion_tokens or asked.max_tokens,
                self.model.spec.context_length or DEFAULT_CHAT_TOKENS,
            )
        else:
            assert isinstance(asked, CompletionRequest)
            name, wanted, default = (
                "max_tokens",
                None if asked.max_tokens is None else max(1, asked.max_tokens),
                DEFAULT_MAX_TOKENS,
            )
        if (
            self.model.spec.context_length is not None
            and self.context >= self.model.spec.context_length
        ):
            return wanted or default  # which the decoder sets against the context
        left = self.context - prompt_tokens
        if left < 1:
            raise APIError(
                400,
                f"the prompt has {prompt_tokens} tokens and this server takes {self.context} with "
                "the answer "
                "included: shorten it, or start the server with a larger --context",
                "messages" if isinstance(asked, ChatCompletionRequest) else "prompt",
            )
        if wanted is not None and wanted > left:
            raise APIError(
                400,
                f"{name} is {wanted} and the prompt has {prompt_tokens} tokens; this server takes "
                f"{self.context} in all: ask for at most {left}, or start the server with a larger "
                "--context",
                name,
            )
        return min(wanted or default, left)

    def _tokenize_prompts(self, request: BaseRequest) -> list[TokenizedPrompt]:
        if isinstance(request, ChatCompletionRequest):
            if not self.is_chat:
                raise APIError(
                    400,
                    f"{self.name} has no chat template, so nothing says how it reads a "
                    "conversation: use /v1/completions",
                    "messages",
                    "no_chat_template",
                )
            return [
                TokenizedPrompt(
                    render_prompt_ids(self.tokenizer, request.turns, request.tools_in_prompt)
                )
            ]
        assert isinstance(request, CompletionRequest)
        prompts = []
        for given in request.prompts:
            ids = encode_prompt(self.tokenizer, given) if isinstance(given, str) else list(given)
            text = ""
            if request.echo:
                text = given if isinstance(given, str) else str(self.tokenizer.decode(ids))
            prompts.append(TokenizedPrompt(ids, text))
        return prompts


def _logprob_options(request: BaseRequest) -> tuple[bool, int]:
    """(whether log-probabilities are asked for, how many of the likeliest tokens beside each)"""
    if isinstance(request, ChatCompletionRequest):
        return bool(request.logprobs), request.top_logprobs or 0
    assert isinstance(request, CompletionRequest)
    return request.logprobs is not None, request.logprobs or 0
