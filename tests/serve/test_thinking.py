"""Thinking in a chat: what the template is told about it, and what a client gets of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.marked_tokenizer import add_marks
from helpers.threads import one_thread
from helpers.tiny import tiny_llama

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Chunk, Decoder, Request
from skipsearch.engine import load_model
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.chat.thinking import THINKING_FORMATS, ThinkingFormat
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.service import Service

from .tiny_server import LIMITS, RECIPE

__all__ = ["one_thread"]
WITH_VARIABLES = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}"
)


def client_of(template: str) -> Iterator[TestClient]:
    decoder = Decoder(adapt(tiny_llama(context=512), letter_tokenizer(template)), RECIPE)
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    yield from client_of(WITH_VARIABLES)


def ask(client: TestClient, **more: Any) -> Any:
    messages = [{"role": "user", "content": "say it"}]
    fields = {"messages": messages, "max_tokens": 1, "temperature": 0}
    return client.post("/v1/chat/completions", json=fields | more)


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "no"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unread": [1, {"a": None}]}}, ""),
        ({"chat_template_kwargs": None, "reasoning_effort": "low"}, "effort low"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"},
            "effort high",
        ),
    ],
)
def test_a_template_gets_the_variables_of_a_request(
    client: TestClient, fields: dict[str, Any], added: str
) -> None:
    without = ask(client).json()["usage"]["prompt_tokens"]
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == without + len(added)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(
            ({"chat_template_kwargs": {name: 1}}, name)
            for name in ("messages", "tools", "add_generation_prompt", "chat_template", "bos_token")
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_variables_that_the_server_sets_itself_are_refused_by_name(
    client: TestClient, fields: dict[str, Any], name: str
) -> None:
    answer = ask(client, **fields)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(fields))


# As models that think have it: earlier thinking is rendered, and the answer may begin inside it.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if m.reasoning_content %}BEGIN{{ m.reasoning_content }}END{% endif %}"
    "{{ m['content'] }}\n{% endfor %}"
    "ai:{% if enable_thinking is not defined %}{% elif enable_thinking %}BEGIN\n"
    "{% else %}BEGIN\n\nEND\n\n{% endif %}"
)
PLAIN, SPECIAL = THINKING_FORMATS[0], THINKING_FORMATS[1]


class Scripted(Decoder):
    """A decoder whose answers are written by the test, three tokens in each round."""

    script = ""

    def stream(self, request: Request, **_: Any) -> Iterator[Chunk]:  # type: ignore[override]
        stop = request.prepare(self.model).stop_condition
        assert stop.detokenizer is not None
        tokenizer = self.model.tokenizer
        ids = [*tokenizer(self.script, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for at in range(0, len(ids), 3):
            tokens = stop.cut(ids[at : at + 3])
            is_last = stop.reason is not None
            yield Chunk(tokens, stop.detokenizer.pop_text(last=is_last), stop.reason)
            if is_last:
                return


def make_model(form: ThinkingFormat) -> ModelAdapter:
    model = copy(load_model("demo", engine="lean"))
    model.tokenizer = add_marks(model.tokenizer, form.marks if form is SPECIAL else ["<unused>"])
    template = THINKING_TEMPLATE.replace("BEGIN", form.begin).replace("END", form.end)
    model.tokenizer.chat_template = template
    return model


@pytest.fixture(scope="module", params=[PLAIN, SPECIAL], ids=["plain", "special"])
def thinking(request: pytest.FixtureRequest) -> Iterator[tuple[Scripted, TestClient, Any]]:
    decoder = Scripted(make_model(request.param))
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield decoder, client, request.param


def read(answer: Any, stream: bool) -> tuple[str, str | None, dict[str, Any]]:
    """Return (thinking, content, usage)."""
    assert answer.status_code == 200, answer.text
    if not stream:
        message = answer.json()["choices"][0]["message"]
        usage = answer.json()["usage"]
        return message.get("reasoning_content", ""), message["content"], usage
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    texts = [
        "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning_content", "content")
    ]
    return texts[0], texts[1] or None, events[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("variables", "script", "thought", "content"),
    [
        ({}, "BEGIN\nit is so\nEND\n\nYes, it is.", "it is so", "Yes, it is."),
        ({"enable_thinking": True}, "it is so\nEND\n\nYes, it is.", "it is so", "Yes, it is."),
        ({"enable_thinking": False}, "Yes, it is.", "", "Yes, it is."),
        ({"enable_thinking": True}, "it goes on and on", "it goes on and on", None),
    ],
)
def test_thinking_has_a_field_of_its_own(
    thinking: Any, variables: Any, script: str, thought: str, content: str, stream: bool
) -> None:
    decoder, client, form = thinking
    decoder.script = script.replace("BEGIN", form.begin).replace("END", form.end)
    fields = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = ask(client, max_tokens=100, chat_template_kwargs=variables, **fields)
    *texts, usage = read(answer, stream)
    assert texts == [thought, content]
    n_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    before = decoder.script.partition(form.end)[0] + form.end if content else decoder.script
    encoded = decoder.model.tokenizer(before if thought else "", add_special_tokens=False)
    n_end = 1 if thought and not content else 0  # of the answer, which never left the thinking
    assert n_reasoning == len(encoded.input_ids) + n_end


# The marks and channels are those of gpt-oss' own template.
HARMONY_TEMPLATE = (
    "{% if tools %}namespace functions {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to={{ 'functions.' + m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
ANALYSIS = "<|channel|>analysis<|message|>It is a sum.<|end|><|start|>assistant"
CALL = 'to=functions.look_up <|constrain|>json<|message|>{"word": "sum"}<|call|>'


@pytest.fixture(scope="module")
def harmony() -> Iterator[tuple[Scripted, TestClient]]:
    model = copy(load_model("demo", engine="lean"))
    model.tokenizer = add_marks(model.tokenizer, HARMONY_MARKS)
    model.tokenizer.chat_template = HARMONY_TEMPLATE
    decoder = Scripted(model)
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield decoder, client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("script", "thought", "content", "is_call"),
    [
        (ANALYSIS + "<|channel|>final<|message|>It is 4.", "It is a sum.", "It is 4.", False),
        ("<|channel|>final<|message|>It is 4.", "", "It is 4.", False),
        (f"{ANALYSIS}<|channel|>commentary {CALL}", "It is a sum.", None, True),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            f"<|channel|>commentary {CALL}",
            "It is a sum.",
            "I look.",
            True,
        ),
        ("<|channel|>analysis<|message|>It goes on", "It goes on", None, False),
        (ANALYSIS + ANALYSIS, "It is a sum.\nIt is a sum.", None, False),
    ],
    ids=["final", "no analysis", "call", "preamble", "cut", "two analyses"],
)
def test_channels_of_gpt_oss_are_thinking_content_and_calls(
    harmony: Any,
    script: str,
    thought: str,
    content: str | None,
    is_call: bool,
    has_tools: bool,
    stream: bool,
) -> None:
    decoder, client = harmony
    decoder.script = script
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "look_up"}}]}
    fields = fields if has_tools else {}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(client, max_tokens=100, **fields)
    *texts, usage = read(answer, stream)
    assert texts == [thought, content]
    assert ('"name": "look_up"' in answer.text) == (is_call and has_tools)
    n_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    ended = (
        script.rpartition("<|end|>")[0] if content != "I look." else ANALYSIS.split("<|end|>")[0]
    )
    encoded = decoder.model.tokenizer(ended + "<|end|>", add_special_tokens=False).input_ids
    n_cut = len(decoder.model.tokenizer(script, add_special_tokens=False).input_ids) + 1
    assert n_reasoning == (0 if not thought else len(encoded) if "<|end|>" in script else n_cut)


def test_earlier_thinking_of_gpt_oss_is_given_with_its_call(harmony: Any) -> None:
    decoder, client = harmony
    decoder.script = "<|channel|>final<|message|>Yes"
    user = {"role": "user", "content": "say it"}
    call = {"id": "1", "function": {"name": "look_up", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    counts = [
        ask(
            client, messages=[user, {"role": "assistant", "tool_calls": [call], **more}, result]
        ).json()["usage"]["prompt_tokens"]
        for more in ({}, {"reasoning_content": "so"})
    ]
    assert counts[1] > counts[0]


def test_the_responses_api_has_the_thinking_as_an_item_of_its_own(thinking: Any) -> None:
    decoder, client, form = thinking
    decoder.script = f"{form.begin}so it is{form.end}Yes"
    response = client.post("/v1/responses", json={"input": "say it"}).json()
    parts = [part for item in response["output"] for part in item.get("content") or []]
    assert [(part["type"], part["text"]) for part in parts] == [
        ("reasoning_text", "so it is"),
        ("output_text", "Yes"),
    ]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 2


def test_thinking_that_the_limit_cuts_is_no_content(thinking: Any) -> None:
    decoder, client, form = thinking
    decoder.script = f"{form.begin}\n{'it goes on ' * 20}{form.end}Yes"
    choice = ask(client, max_tokens=20).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"].startswith("it goes on")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thinking_is_given_to_the_template(thinking: Any, name: str) -> None:
    decoder, client, _ = thinking
    decoder.script = "Yes"
    user = {"role": "user", "content": "say it"}
    counts = [
        ask(client, messages=[user, {"role": "assistant", "content": "No", **more}, user]).json()[
            "usage"
        ]["prompt_tokens"]
        for more in ({}, {name: "so"}, {name: None}, {name: ""})
    ]
    assert counts[1] > counts[0] == counts[2] == counts[3]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def drafting() -> Iterator[tuple[TestClient, int, int]]:
    """A model that drafts, and the tokens that begin and end its thinking."""
    model = make_model(SPECIAL)
    decoder = Decoder(model, SkipMask(model.spec.n_layers, (3, 5, 7), (4, 6)), draft_length=4)
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield client, *model.tokenizer.convert_tokens_to_ids(SPECIAL.marks)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["response_format", "tools"],
)
def test_the_shape_of_an_answer_begins_after_the_thinking(
    drafting: Any, fields: dict[str, Any], is_open: bool
) -> None:
    """The marks are made likely, so that the thinking is short."""
    client, begin, end = drafting
    answers = [
        ask(
            client,
            max_tokens=100,
            chat_template_kwargs={"enable_thinking": True} if is_open else {},
            logit_bias={str(begin): 90, str(end): 100},
            skipsearch={"profile": profile},
            **fields,
        ).json()
        for profile in ("own", "none")
    ]
    messages = [answer["choices"][0]["message"] for answer in answers]
    text = messages[0]["content"] or messages[0]["tool_calls"][0]["function"]["arguments"]
    jsonschema.validate(json.loads(text), SCHEMA)
    usage = answers[0]["usage"]["completion_tokens_details"]
    assert usage["reasoning_tokens"] == 1 + (not is_open)
    for message in messages:
        for call in message.get("tool_calls", []):
            del call["id"]
    assert messages[0] == messages[1]
    assert answers[0]["skipsearch"]["accepted"] > answers[1]["skipsearch"]["accepted"] == 0
