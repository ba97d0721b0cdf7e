"""The requests of OpenAI's protocol, field by field.

A field that would change the answer but is not supported is rejected by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from skipsearch.core.constraint import Constraint
from skipsearch.models.chat.template_sandbox import OWN_VARIABLES
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.messages import FastList, Message, RequestPart, T, Text
from skipsearch.serve.penalties import MinP, Penalties, Processor, repetition_penalty
from skipsearch.serve.response_format import read_response_format
from skipsearch.serve.tools import ToolUse, Turn, read_tools

MAX_ANSWERS = 32  # of one request: prompts times n
MOST_BIASES = 1000
Several = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ANSWERS)]
Token = Annotated[int, Field(strict=True, ge=0)]


def _shape(value: Any) -> str:
    """Return the type that a prompt is meant to be, by its first element.

    It is a string, a list of strings, token ids, or a list of token id lists. Validation then
    reports errors for that type only.
    """
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else 0
    return (
        "<lists>"
        if isinstance(first, list)
        else "<texts>"
        if isinstance(first, str)
        else "<tokens>"
    )


def _few(bias: Any) -> Any:
    """Check the number of biases before their entries are validated. Raises: APIError 400."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASES:  # before its entries are validated
        raise APIError(
            400, f"logit_bias has {len(bias)} tokens; at most {MOST_BIASES} are read", "logit_bias"
        )
    return bias


Stops = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=16), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]
Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Several[Text], Tag("<texts>")]
    | Annotated[FastList[Token], Tag("<tokens>")]
    | Annotated[Several[FastList[Token]], Tag("<lists>")],
    Discriminator(_shape),
]

# Fields that change no token: they are for accounting, caches, routes and the order of requests.
IGNORED_FIELDS = frozenset(
    {
        # OpenAI
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        # Anthropic, OpenRouter
        "cache_control",
        "provider",
        "usage",
        # llama.cpp, vLLM
        "cache_prompt",
        "id_slot",
        "return_progress",
        "timings_per_token",
        "priority",
        "request_id",
    }
)
# Values that have no effect; any other value is rejected.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "documents": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
}


class StreamOptions(RequestPart):
    """The `stream_options` of a request."""

    inside = "stream_options"
    include_usage: bool = False
    # vLLM's option, which guidellm sets: with include_usage, every event has the usage so far.
    continuous_usage_stats: bool = False
    # OpenAI pads events, so that their sizes reveal nothing. This server does not.
    include_obfuscation: bool = False


class SkipsearchOptions(RequestPart):
    """Options that OpenAI's protocol does not have.

    profile: "none" decodes plainly.
    trace: report which drafter proposed each token, and which tokens were rejected.
    """

    inside = "skipsearch"
    profile: Literal["own", "none"] = "own"
    trace: bool = False


class SpeculativeOptions(RequestPart):
    """Limits of a request's drafts, under llama-server's name.

    n_max: the most tokens that are drafted in a round; 0: none; None: as many as the recipe allows.
    """

    inside = "speculative"
    n_max: Annotated[int, Field(strict=True, ge=0, le=64)] | None = None


def _read_speculative(value: Any) -> Any:
    """Return the options that true and false stand for; any other value as it is."""
    return {"n_max": None if value else 0} if isinstance(value, bool) else value


class BaseRequest(RequestPart):
    """The fields that both kinds of request have. None means the default, as in clients."""

    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=100, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, strict=True)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_ANSWERS)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, strict=True)]], BeforeValidator(_few)
        ]
        | None
    ) = None
    response_format: dict[str, Any] | None = None
    speculative: Annotated[SpeculativeOptions, BeforeValidator(_read_speculative)] | None = None
    skipsearch: SkipsearchOptions = SkipsearchOptions()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        """Drop fields that change nothing, and unknown ones that are null, as if left out.

        Raises: APIError 400 for one that is not supported.
        """
        if not isinstance(data, dict):
            raise APIError(400, f"the body is a {type(data).__name__}; a request is a JSON object")
        supported = {}
        for name, value in data.items():
            known = name in cls.model_fields
            if name in IGNORED_FIELDS or (value is None and not known):
                continue
            if name in NEUTRAL_VALUES and not known:
                if not any(value == neutral for neutral in NEUTRAL_VALUES[name]):
                    raise APIError(
                        400,
                        f"{name} is {json.dumps(value)[:60]}, which this server does not carry "
                        "out: leave it out",
                        name,
                    )
                continue
            supported[name] = value
        return supported

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return the request with values for fields that it does not name."""
        return self.model_copy(
            update={name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    @property
    def n_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The sampling and stopping options of a decoding `Request`, without its seed."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": max(0, self.top_k or 0),
            "stop": self.stop or None,
            "ignore_eos": bool(self.ignore_eos),
        }

    def processors(self, prompt_tokens: int, vocab_size: int) -> tuple[Processor, ...]:
        """Return the processors of this request's logits.

        prompt_tokens: number of tokens of the prompt.

        Raises: APIError 400 for a bias of a token that does not exist.
        """
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            if (
                not token.isascii()
                or not token.isdigit()
                or len(token) > 20
                or int(token) >= vocab_size
            ):  # int() refuses very long numbers
                raise APIError(
                    400,
                    f"logit_bias names {token[:20]!r}; its keys are token ids, 0..{vocab_size - 1}",
                    "logit_bias",
                )
            bias[int(token)] = value
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        temperature = self.sampling_options["temperature"]
        chain = list[Processor]()
        if self.repetition_penalty not in (None, 1):
            chain.append(repetition_penalty(self.repetition_penalty))
        if presence or frequency or bias:
            chain.append(Penalties(prompt_tokens, presence, frequency, bias))
        if self.min_p and temperature:
            chain.append(MinP(self.min_p, temperature))
        return tuple(chain)

    @property
    def is_plain(self) -> bool:
        """Whether the answers are decoded without drafting."""
        return self.max_draft_tokens == 0 or self.skipsearch.profile == "none"

    @property
    def max_draft_tokens(self) -> int | None:
        """The most tokens that are drafted in a round; None: as many as the recipe allows."""
        return None if self.speculative is None else self.speculative.n_max

    @property
    def constraint(self) -> Constraint | None:
        """The shape of the answer. Raises: APIError 400."""
        return read_response_format(self.response_format)

    def seed_for(self, answer_index: int) -> int:
        """Return the seed of one of the n answers to a prompt; random without `seed`."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        return (first + answer_index + 2**63) % 2**64 - 2**63

    @property
    def include_usage(self) -> bool:
        """Whether a last event reports the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every event reports the usage so far."""
        return (
            self.include_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(BaseRequest):
    """The body of a request to `/v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    echo: Annotated[bool, Field(strict=True)] | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> CompletionRequest:
        """Raise APIError 400 for fields that contradict each other."""
        _ = self.constraint  # an error in it is raised at once
        if self.best_of is not None and self.best_of != self.n_answers:
            raise APIError(
                400,
                f"best_of is {self.best_of} and n is {self.n_answers}: this server does not choose "
                "among answers, leave best_of "
                "out",
                "best_of",
            )
        if not self.prompts:
            raise APIError(
                400,
                "prompt is an empty list; give a text, token ids, or several of either",
                "prompt",
            )
        if self.max_tokens == 0 and not self.echo:
            raise APIError(
                400, "max_tokens is 0; without echo nothing would be answered", "max_tokens"
            )
        if len(self.prompts) * self.n_answers > MAX_ANSWERS:
            raise APIError(
                400,
                f"{len(self.prompts) * self.n_answers} answers are asked for at once; at most "
                f"{MAX_ANSWERS} are given",
                "prompt",
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each as text or as token ids."""
        several = isinstance(self.prompt, list) and not (
            self.prompt and isinstance(self.prompt[0], int)
        )
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class ChatCompletionRequest(BaseRequest):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Annotated[bool, Field(strict=True)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    # For templates that read them: variables by name, as in vLLM, and OpenAI's reasoning_effort.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    # Whether the answer continues the last message; by default if that is the assistant's text.
    continue_final_message: Annotated[bool, Field(strict=True)] | None = None
    add_generation_prompt: Annotated[bool, Field(strict=True)] | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> ChatCompletionRequest:
        """Raise APIError 400 for fields that contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        own = sorted(OWN_VARIABLES & self.template_variables.keys())
        if own:
            raise APIError(
                400,
                f"chat_template_kwargs names {own[0]}, which this server sets itself: leave it out",
                "chat_template_kwargs",
            )
        self._check_continuation()
        _ = self.tool_use, self.turns, self.constraint  # errors in them are raised at once
        return self

    def _check_continuation(self) -> None:
        """Raise APIError 400 if the last message is to be continued and cannot be."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise APIError(
                400,
                "add_generation_prompt and continue_final_message are both true, but an answer "
                "cannot begin a message and continue one: leave one of them out",
                "continue_final_message",
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            noun = "has calls of tools" if last.tool_calls else f"is of the {last.role[:64]}"
            raise APIError(
                400,
                f"continue_final_message is true and the last message {noun}: end the conversation "
                "with a text of the assistant, or leave continue_final_message out",
                "continue_final_message",
            )

    @property
    def continued_text(self) -> str | None:
        """The text of the last message if the answer continues it; None if it begins one."""
        last = self.messages[-1]
        is_open = last.role == "assistant" and not last.tool_calls
        default = is_open and not self.add_generation_prompt
        wanted = default if self.continue_final_message is None else self.continue_final_message
        return str(last.turn["content"]) if wanted else None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call. Raises: APIError 400."""
        return read_tools(self.tools or [], self.tool_choice, self.parallel_tool_calls)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template. A template that does not read them ignores them."""
        effort = self.reasoning_effort
        return ({} if effort is None else {"reasoning_effort": effort}) | (
            self.chat_template_kwargs or {}
        )

    @property
    def ending_variables(self) -> dict[str, Any]:
        """Variables for the end of the prompt, if it is not the beginning of a message."""
        if self.continued_text is not None:
            return {"continue_final_message": True, "add_generation_prompt": False}
        return {"add_generation_prompt": False} if self.add_generation_prompt is False else {}

    @property
    def turns(self) -> list[Turn]:
        """The messages as chat templates take them. Raises: APIError 400."""
        return [message.turn for message in self.messages]


A = TypeVar("A", bound=RequestPart)


def parse_request(
    request_class: type[A], body: bytes, translate: Callable[[Any], Any] = lambda data: data
) -> A:
    """Parse a request body. Raises: APIError 400 that names the wrong field.

    translate: makes the fields of `request_class` from what the body holds.
    """
    try:
        data = translate(json.loads(body))
        return request_class.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        names = [
            part for part in first["loc"] if isinstance(part, str) and not part.startswith("<")
        ]  # without the tags of `_shape`
        field = names[0] if names else None
        if first["type"] == "missing":
            raise APIError(
                400, f"the request lacks {'.'.join(names)}", field, "missing_required_parameter"
            ) from None
        raise APIError(
            400,
            f"{field or 'the request'} is not as it should be: {first['msg']}",
            field,
            "invalid_value",
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deep
        raise APIError(
            400,
            "the body is not readable JSON: send one JSON object, in UTF-8",
            code="invalid_json",
        ) from None
