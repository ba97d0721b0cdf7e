"""What clients send: OpenAI's requests, field by field. What would change the answer and is not carried out is refused by name."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skipsearch.serve.faults import Fault
from skipsearch.serve.penalties import MinP, Penalties
from skipsearch.serve.tools import Tool, Turn, read_calls, read_tools

MOST_ANSWERS = 32    # of one request: prompts times n
Token = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, Field(strict=True)]

# Fields that change no token here: bookkeeping of other services, and what has no counterpart.
NO_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"})
# Values that ask for nothing; any other is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "tools": ([],), "tool_choice": ("none",),
    "functions": ([],), "function_call": ("none",), "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "prediction": (), "repetition_penalty": (1,), "reasoning_effort": ("none",),
    "verbosity": ("medium",), "web_search_options": (), "use_beam_search": (False,), "length_penalty": (1,), "min_tokens": (0,)}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Part):
    include_usage: bool = False
    continuous_usage_stats: bool = False   # vLLM's: with include_usage, the usage so far in every event; guidellm asks for it
    include_obfuscation: bool = False   # padding against eavesdroppers on packet sizes; there is no network between here and localhost


class Ours(_Part):
    """What OpenAI's protocol has no word for. profile: "none" decodes plainly. trace: tell who proposed each token, and what was
    rejected."""

    profile: Literal["own", "none"] = "own"
    trace: bool = False


class Asked(_Part):
    """What both kinds of request have. None stands for the default, as clients send it."""

    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=100, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_ANSWERS)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-2**63, lt=2**64)] | None = None
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100, strict=True)]], Field(max_length=1000)] | None = None
    skipsearch: Ours = Ours()

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_carried_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise Fault(400, f"the body is a {type(data).__name__}; a request is a JSON object")
        kept = {}
        for name, value in data.items():
            if name in NO_EFFECT:
                continue
            if name in NEUTRAL and name not in cls.model_fields:
                if value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
                    raise Fault(400, f"{name} is {json.dumps(value)[:60]}, which this server does not carry out: leave it out", name)
                continue
            kept[name] = value
        return kept

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings of a decoding `Request`; a sample without a seed gets one of its own."""
        return {"temperature": 1.0 if self.temperature is None else self.temperature, "top_p": self.top_p or 1.0,
                "top_k": max(0, self.top_k or 0), "stop": self.stop or None, "ignore_eos": bool(self.ignore_eos)}

    def processors(self, prompt: int, vocab: int) -> tuple[Penalties | MinP, ...]:
        """What stands between the logits of this request and its tokens. prompt: tokens of it. Raises: Fault 400."""
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or int(token) >= vocab:
                raise Fault(400, f"logit_bias names {token[:20]!r}; its keys are token ids, 0..{vocab - 1}", "logit_bias")
            bias[int(token)] = value
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        penalties = (Penalties(prompt, presence, frequency, bias),) if presence or frequency or bias else ()
        temperature = self.sampling["temperature"]
        return (*penalties, MinP(self.min_p, temperature)) if self.min_p and temperature else penalties

    def seed_of(self, answer: int) -> int:
        """Of the n answers to a prompt each has its own seed."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        return (first + answer + 2**63) % 2**64 - 2**63

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_each(self) -> bool:
        """Whether every event tells the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionAsked(Asked):
    """/v1/completions"""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    echo: Annotated[bool, Field(strict=True)] | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None

    @model_validator(mode="after")
    def _together(self) -> CompletionAsked:
        if self.best_of is not None and self.best_of != self.count:
            raise Fault(400, f"best_of is {self.best_of} and n is {self.count}: this server does not choose among answers, leave best_of "
                        "out", "best_of")
        if not self.prompts:
            raise Fault(400, "prompt is an empty list; give a text, token ids, or several of either", "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise Fault(400, "max_tokens is 0; without echo nothing would be answered", "max_tokens")
        if len(self.prompts) * self.count > MOST_ANSWERS:
            raise Fault(400, f"{len(self.prompts) * self.count} answers are asked for at once; at most {MOST_ANSWERS} are given", "prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt of the request, as text or token ids."""
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class TextPart(_Part):
    type: Literal["text"]
    text: Text


class Message(_Part):
    """A turn. Clients send more than role and content for turns of the assistant; what is null or empty there says nothing.

    tool_calls: what the assistant called; its content may then be null. tool_call_id: which call a turn of the tool answers, for templates
    that write it down; in those that do not, the order of the turns says it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    role: Annotated[str, Field(min_length=1, max_length=64, strict=True)]
    content: Text | list[TextPart] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _nothing_else(self) -> Message:
        said = next((name for name, value in (self.model_extra or {}).items() if value not in (None, [], "") and name != "name"), None)
        if said is not None:
            raise Fault(400, f"a message has {said!r}, which this server does not carry out: leave it out", "messages")
        if self.content is None and not self.tool_calls:
            raise Fault(400, f"a message of the {self.role} has no content", "messages")
        return self

    @property
    def turn(self) -> Turn:
        """Raises: Fault 400."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        turn: Turn = {"role": self.role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = read_calls(self.tool_calls)
        if self.role == "tool":
            more = {"tool_call_id": self.tool_call_id, "name": (self.model_extra or {}).get("name")}
            turn |= {name: value for name, value in more.items() if isinstance(value, str)}
        return turn


class ChatAsked(Asked):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Annotated[bool, Field(strict=True)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatAsked:
        if self.top_logprobs is not None and not self.logprobs:
            raise Fault(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        _ = self.offered, self.turns   # what is amiss there is said at once
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the prompt tells of. Raises: Fault 400."""
        return read_tools(self.tools or [], self.tool_choice, self.parallel_tool_calls)

    @property
    def turns(self) -> list[Turn]:
        """Raises: Fault 400."""
        return [message.turn for message in self.messages]


A = TypeVar("A", bound=Asked)


def parse(kind: type[A], body: bytes) -> A:
    """A request of its kind. Raises: Fault 400 with the field that is wrong."""
    try:
        data = json.loads(body)
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        names = [str(part) for part in first["loc"] if isinstance(part, str) and part not in ("str", "list[str]")]
        field = names[0] if names else None
        if first["type"] == "extra_forbidden":
            raise Fault(400, f"{'.'.join(names)} is no field of this request that the server knows: leave it out", field) from None
        if first["type"] == "missing":
            raise Fault(400, f"the request lacks {'.'.join(names)}", field, "missing_required_parameter") from None
        raise Fault(400, f"{field or 'the request'} is not as it should be: {first['msg']}", field, "invalid_value") from None
    except (ValueError, RecursionError):   # not UTF-8, not JSON, or nested too deep to be read
        raise Fault(400, "the body is not readable JSON: send one JSON object, in UTF-8", code="invalid_json") from None
