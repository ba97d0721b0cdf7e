"""From a parsed request to the deltas of its answers: what all routes share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pydantic import ValidationError

from skipsearch.constraints import compile_constraint
from skipsearch.core.constraint import Constraint
from skipsearch.decoding import FORCED_KIND, Decoder, Request
from skipsearch.errors import ModelError, SkipSearchError
from skipsearch.models.chat.call_reader import CallReader, SchemaCallReader, has_own_reader
from skipsearch.models.chat.chat_text import encode_prompt, find_continued_text, get_chat_template
from skipsearch.models.chat.formats import HERMES, ToolFormat
from skipsearch.models.chat.thinking import ThinkingReader, ThinkingStart, detect_thinking
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import Limits
from skipsearch.serve.metrics import Metrics
from skipsearch.serve.prompt_log import PromptLog
from skipsearch.serve.protocol import BaseRequest, ChatCompletionRequest, CompletionRequest
from skipsearch.serve.responses import Choice, ChoiceDelta, ResponseBuilder
from skipsearch.serve.scheduler import Job, RoundOutput, Scheduler
from skipsearch.serve.tools import ToolUse, render_prompt_ids

DEFAULT_MAX_TOKENS = 16  # of a completion: OpenAI's default; a chat's answer may fill the context
DEFAULT_CHAT_TOKENS = 4096  # for a model that names no context


@dataclass
class TokenizedPrompt:
    """A prompt as token ids.

    echo: text that the answer begins with if the request sets `echo`.
    tool_format: the form of the calls in the answer.
    thinking: how thinking begins in the answer; None if the model does not think.
    constraint: the shape of the answer; it was compiled.
    before: the end of the prompt that the answer continues; the constraint is of both together.
    """

    ids: list[int]
    echo: str = ""
    tool_format: ToolFormat = HERMES
    thinking: ThinkingStart | None = None
    constraint: Constraint | None = None
    before: str = ""


class ActiveRequest:
    """An HTTP request in progress: its choices, their jobs, and the queue on which the scheduler
    thread delivers round outputs.
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
        kinds = [*(spec.kind for spec in service.scheduler.decoder.recipe.drafters), FORCED_KIND]
        self.choices: list[Choice] = []
        self.jobs: list[Job] = []
        scored, top = _logprob_options(http_request)
        echo_only = isinstance(http_request, CompletionRequest) and http_request.max_tokens == 0
        use = http_request.tool_use if isinstance(http_request, ChatCompletionRequest) else None
        for prompt in prompts:
            max_new_tokens = service.answer_limit(http_request, len(prompt.ids))
            for number in range(http_request.n_answers):
                choice = Choice(
                    len(self.choices),
                    service.tokenizer,
                    kinds,
                    prompt.echo,
                    hide_tokens=echo_only,
                    thinking=None if prompt.thinking is None else ThinkingReader(prompt.thinking),
                    calls=None
                    if use is None and not prompt.tool_format.dropped
                    else service.make_call_reader(use, prompt.tool_format),
                )
                request = Request(
                    prompt.ids,
                    max_new_tokens,
                    seed=http_request.seed_for(number),
                    **http_request.sampling_options,
                    processors=http_request.processors(
                        len(prompt.ids), service.model.spec.vocab_size
                    ),
                    constraint=prompt.constraint,
                    constrained_before=prompt.before,
                    max_draft_tokens=http_request.max_draft_tokens,
                    kept_special=service.kept_special(use, prompt),
                )
                self.choices.append(choice)
                self.jobs.append(
                    Job(
                        request,
                        prompt.ids,
                        tenant,
                        self._make_deliver(choice),
                        plain=http_request.is_plain,
                        n_top=top if scored else None,
                        echo=bool(prompt.echo),
                    )
                )

    def _make_deliver(self, choice: Choice) -> Any:
        """Return the function by which the scheduler thread delivers the rounds of a choice."""

        def deliver(output: RoundOutput | APIError | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, output))

        return deliver

    def submit(self) -> None:
        """Queue the jobs. Raises: APIError if the queue is full."""
        self.service.scheduler.submit(self.jobs)

    async def deltas(self, keep_alive_s: float | None = None) -> AsyncIterator[ChoiceDelta | None]:
        """Yield what each round adds to any of the choices, until all are finished.

        Yields None after `keep_alive_s` seconds without a round.

        Raises: APIError.
        """
        n_unfinished, first = len(self.jobs), True
        while n_unfinished:
            try:
                choice, output = await asyncio.wait_for(self._queue.get(), keep_alive_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(output, APIError):
                raise output
            if output is None:
                n_unfinished -= 1
                self.service.metrics.record_end(
                    choice.finish_reason or "abort", monotonic() - self.started_at, choice.stats
                )
                continue
            if first:
                self.service.metrics.record_first_token(monotonic() - self.started_at)
                first = False
            chunk = output.chunk
            if chunk is not None:
                proposal = chunk.proposal
                drafted, accepted = (
                    (0, 0)
                    if proposal is None
                    else (len(proposal.tokens), proposal.count_accepted(chunk.tokens))
                )
                self.service.metrics.record_round(drafted, accepted, len(chunk.tokens))
            yield choice.add_round(output)

    def cancel(self) -> None:
        """Cancel what is not finished: the client has disconnected, or the request failed.

        The scheduler frees its resources within a round.
        """
        for job, choice in zip(self.jobs, self.choices, strict=True):
            self.service.scheduler.cancel(job)
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self.service.metrics.record_end("abort", monotonic() - self.started_at, None)


class Service:
    """A decoder with all that serving it needs.

    served_model_name: the name that clients use for the model. alias: another such name.
    context: tokens of a prompt and its answer. sampling_defaults: values of fields that a request
    does not name. prompt_log: keeps the prompt of each request; None: prompts are not kept.
    """

    def __init__(
        self,
        decoder: Decoder,
        keys: APIKeys,
        limits: Limits,
        served_model_name: str | None = None,
        alias: str | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        prompt_log: PromptLog | None = None,
    ):
        model = decoder.model
        if model.tokenizer is None:
            raise ModelError(
                f"{model.spec.id} has no tokenizer, so it cannot be served: put its tokenizer "
                "files beside its weights"
            )
        self.model, self.tokenizer, self.keys, self.limits = model, model.tokenizer, keys, limits
        self.sampling_defaults, self.prompt_log = dict(sampling_defaults or {}), prompt_log
        _check_sampling_defaults(self.sampling_defaults)
        self.name = served_model_name or model.spec.id
        self._names = {self.name, alias}
        self.context = limits.context_of(model.spec)
        self.is_chat = get_chat_template(self.tokenizer) is not None
        self.scheduler = Scheduler(decoder, limits)
        self.metrics = Metrics(self.name, lambda: self.scheduler.queue_sizes)

    def check_name(self, model_name: str) -> None:
        """Raise APIError if a client names another model."""
        if model_name not in self._names:
            raise APIError(
                404,
                f"there is no model {model_name[:80]!r} here; this server has {self.name!r}",
                "model",
                "model_not_found",
            )

    async def submit(self, request: BaseRequest, tenant: str) -> ActiveRequest:
        """Check a request and queue its jobs. Raises: APIError."""
        prompts = await self.tokenize_prompts(request)
        request = request.with_defaults(self.sampling_defaults)
        try:
            active = ActiveRequest(self, request, prompts, tenant)
            await asyncio.to_thread(
                lambda: [job.request.prepare(self.model) for job in active.jobs]
            )
        except SkipSearchError as error:
            raise _prompt_error(request, error) from None
        if self.prompt_log is not None:
            await asyncio.to_thread(self.prompt_log.write, [prompt.ids for prompt in prompts])
        active.submit()
        return active

    async def tokenize_prompts(self, request: BaseRequest) -> list[TokenizedPrompt]:
        """Check a request and return its prompts as token ids. Raises: APIError."""
        if request.model is not None:
            self.check_name(request.model)
        try:
            return await asyncio.to_thread(self._tokenize_prompts, request)
        except SkipSearchError as error:
            raise _prompt_error(request, error) from None

    def answer_limit(self, request: BaseRequest, prompt_tokens: int) -> int:
        """Return the most tokens of an answer: those wanted, cut to what the context has left.

        Raises: APIError 400 for a prompt that leaves nothing.
        """
        is_chat, spec = isinstance(request, ChatCompletionRequest), self.model.spec
        remaining = self.context - prompt_tokens
        if remaining < 1:
            noun = "messages" if is_chat else "prompt"
            way_out = (
                "" if self.context == spec.context_length else ", or raise the server's --context"
            )
            # The first sentences are OpenAI's: agents read them, and make the conversation shorter.
            raise APIError(
                400,
                f"This model's maximum context length is {self.context} tokens. However, your "
                f"{noun} resulted in {prompt_tokens} tokens, and an answer needs one more. Please "
                f"reduce the length of the {noun}{way_out}.",
                noun,
                "context_length_exceeded",
            )
        if isinstance(request, ChatCompletionRequest):
            wanted = request.max_completion_tokens or request.max_tokens
            default = spec.context_length or DEFAULT_CHAT_TOKENS
        else:
            assert isinstance(request, CompletionRequest)
            wanted = None if request.max_tokens is None else max(1, request.max_tokens)
            default = DEFAULT_MAX_TOKENS
        return min(wanted or default, remaining)

    def _make_constraint(
        self,
        request: BaseRequest,
        use: ToolUse | None,
        form: ToolFormat,
        thinking: ThinkingStart | None,
    ) -> Constraint | None:
        """Return the constraint of the answers to a request, after it was compiled.

        Raises: APIError 400 if the model cannot follow it.
        """
        wanted = request.constraint
        if use is None:
            return self._compile(wanted, "response_format", thinking)
        if wanted is not None and wanted.json_schema is None and not use.required:
            raise APIError(
                400,
                f"response_format is {wanted} and the answer may also call tools, for which it is "
                'JSON: take a json_schema, or tool_choice "none"',
                "response_format",
            )
        schema = None if wanted is None else wanted.json_schema
        marks = form.find_marks(self.tokenizer)
        try:
            exact = use.constrain(form, marks, schema, relaxed=False)
            return self._compile(exact, "tools", thinking)
        except APIError:
            relaxed = use.constrain(form, marks, schema, relaxed=True)
            if all(tool["function"].get("strict") for tool in use.called_tools):
                raise
            return self._compile(relaxed, "tools", thinking)

    def _compile(
        self, constraint: Constraint | None, field: str, thinking: ThinkingStart | None = None
    ) -> Constraint | None:
        """Compile a constraint, which begins after the thinking."""
        if constraint is not None:
            spec = self.model.spec
            if thinking is not None:
                constraint = thinking.delay(constraint, may_call=field == "tools")
            try:
                compile_constraint(constraint, self.tokenizer, spec.vocab_size, spec.eos_token_ids)
            except SkipSearchError as error:
                raise APIError(400, str(error), field) from None
        return constraint

    def make_call_reader(
        self, use: ToolUse | None, form: ToolFormat
    ) -> CallReader | SchemaCallReader:
        """Return the reader of the calls in one answer; without tools it drops them."""
        if use is None:
            return CallReader(form, max_calls=0)
        max_calls = None if use.parallel else 1
        if has_own_reader(self.tokenizer):
            return SchemaCallReader(self.tokenizer, max_calls, use.called_tools)
        return CallReader(form, max_calls, use.called_tools)

    def kept_special(self, use: ToolUse | None, prompt: TokenizedPrompt) -> tuple[str, ...]:
        """Return the special tokens that the readers of thinking and of calls must see."""
        if use is not None and has_own_reader(self.tokenizer):
            return tuple(token.content for token in self.tokenizer.added_tokens_decoder.values())
        marks = () if prompt.thinking is None else prompt.thinking.form.marks
        form = prompt.tool_format
        has_reader = use is not None or form.dropped
        return (*marks, *(form.find_marks(self.tokenizer) if has_reader else ()))

    def _tokenize_prompts(self, request: BaseRequest) -> list[TokenizedPrompt]:
        """Return the prompts of a request as token ids. Raises: APIError 400."""
        if isinstance(request, ChatCompletionRequest):
            if not self.is_chat:
                raise APIError(
                    400,
                    f"{self.name} has no chat template, so nothing says how it reads a "
                    "conversation: use /v1/completions",
                    "messages",
                    "no_chat_template",
                )
            use = request.tool_use
            ids, tool_format = render_prompt_ids(
                self.tokenizer,
                request.turns,
                [] if use is None else use.in_prompt,
                request.template_variables | request.ending_variables,
            )
            thinking = None
            if use is None or not has_own_reader(self.tokenizer):
                template = get_chat_template(self.tokenizer) or ""
                thinking = detect_thinking(self.tokenizer, template, ids, request.continued_text)
            constraint = self._make_constraint(request, use, tool_format, thinking)
            before = find_continued_text(self.tokenizer, ids, request.continued_text or "")
            if thinking is not None:  # the constraint begins after it
                answer = before.rpartition(thinking.form.end)[2]
                before = "" if thinking.is_open else answer.lstrip()
            if use is not None and use.required and before.strip():
                raise APIError(
                    400,
                    "tool_choice asks for a call, and the last message is a text of the "
                    "assistant, which the answer continues: end the conversation with another "
                    "role, or set add_generation_prompt to true",
                    "tool_choice",
                )
            return [TokenizedPrompt(ids, "", tool_format, thinking, constraint, before)]
        assert isinstance(request, CompletionRequest)
        prompts, constraint = [], self._compile(request.constraint, "response_format")
        for given in request.prompts:
            ids = encode_prompt(self.tokenizer, given) if isinstance(given, str) else list(given)
            text = ""
            if request.echo:
                text = given if isinstance(given, str) else str(self.tokenizer.decode(ids))
            prompts.append(TokenizedPrompt(ids, text, constraint=constraint))
        return prompts


def _prompt_error(request: BaseRequest, error: SkipSearchError) -> APIError:
    """Return the error for a prompt that cannot be decoded."""
    is_chat = isinstance(request, ChatCompletionRequest)
    name = str(error).partition(" ")[0]  # an error about a setting begins with its name
    name = "stop" if "stop string" in str(error) else name
    if name not in type(request).model_fields:
        name = "messages" if is_chat else "prompt"
    return APIError(400, str(error), name)


def _check_sampling_defaults(defaults: Mapping[str, Any]) -> None:
    """Raise ModelError for a value that a request may not have."""
    try:
        BaseRequest.model_validate(dict(defaults))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ModelError(
            f"the model's generation config has the {name} {defaults[name]!r} ({first['msg']}): "
            "mend it, or start the server with --generation-config none"
        ) from None


def _logprob_options(request: BaseRequest) -> tuple[bool, int]:
    """Return (whether log-probabilities are wanted, number of most likely tokens to list)."""
    if isinstance(request, ChatCompletionRequest):
        return bool(request.logprobs), request.top_logprobs or 0
    assert isinstance(request, CompletionRequest)
    return request.logprobs is not None, request.logprobs or 0
