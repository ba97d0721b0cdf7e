"""Tools in a chat: the template gets what transformers gives it.

What the server does not support is refused by name. `test_structured.py` has the calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import FullModel, tiny_llama

from skipsearch.decoding import Decoder
from skipsearch.models import adapt
from skipsearch.models.chat.described_tools import describe_tools
from skipsearch.models.chat.formats import UNKNOWN_FORMS
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.service import Service

from .tiny_server import LIMITS, RECIPE

__all__ = ["one_thread"]
# As chat models have it: schemas before the first turn, calls and their results in turns of their
# own.
WITH_TOOLS = (
    "<s>{% if tools %}tools:{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% if m.tool_call_id %} ({{ m.tool_call_id "
    "}}){% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}ai:{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
            "description": "look a word up",
        },
    }
]
USER: list[Any] = [{"role": "user", "content": "say it"}]
CALLED: list[Any] = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abc",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"word": "it"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abc", "content": "a pronoun"},
]


N = 12  # tokens of an answer


def client_of(template: Any) -> Iterator[TestClient]:
    decoder = Decoder(adapt(tiny_llama(context=1024), letter_tokenizer(template)), RECIPE)
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    yield from client_of(WITH_TOOLS)


@pytest.fixture(scope="module")
def without() -> Iterator[TestClient]:
    yield from client_of(CHAT_TEMPLATE)


def ask(client: TestClient, messages: list[Any] = USER, **more: Any) -> Any:
    return client.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": N, "temperature": 0} | more,
    )


@cache
def full_model() -> FullModel:
    return FullModel(tiny_llama(context=1024))


def expected(
    messages: list[Any], tools: list[Any] | None, template: Any = WITH_TOOLS
) -> tuple[int, str]:
    """Return (tokens of the prompt, answer), computed by transformers alone."""
    tokenizer = letter_tokenizer(template)
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)[
        "input_ids"
    ]
    answer = full_model().greedy(ids, N)
    return len(ids), str(tokenizer.decode(answer, skip_special_tokens=True))


def told(answer: Any) -> tuple[int, str]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    return answer.json()["usage"]["prompt_tokens"], choice["message"]["content"]


def test_the_template_gets_the_tools_as_transformers_gives_them(client: TestClient) -> None:
    with_tools = expected(USER, TOOLS)
    assert with_tools[0] > expected(USER, None)[0] + 100
    for choice in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        assert told(ask(client, tools=TOOLS, **choice)) == with_tools


def test_answers_with_tools_are_drafted_and_some_drafts_are_rejected(client: TestClient) -> None:
    figures = ask(client, tools=TOOLS, max_tokens=24).json()["skipsearch"]
    assert 0 < figures["accepted"] < figures["drafted"]


@pytest.mark.parametrize("strict", [False, None])
def test_strict_tools_are_accepted_and_make_the_same_prompt(
    client: TestClient, strict: bool | None
) -> None:
    """Agents send `strict` by default. It is not in the prompt."""
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"]["strict"] = strict
    assert told(ask(client, tools=tools)) == expected(USER, TOOLS)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"functions": [], "function_call": "none", "response_format": {"type": "text"}},
    ],
)
def test_where_no_tool_may_be_used_the_prompt_has_none(
    client: TestClient, asked: dict[str, Any]
) -> None:
    assert told(ask(client, **asked)) == expected(USER, None)


def test_a_call_and_its_result_stand_in_the_next_prompt(client: TestClient) -> None:
    """OpenAI writes the arguments as text, and templates read an object."""
    as_objects = json.loads(json.dumps(CALLED))
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {"word": "it"}
    found = told(ask(client, CALLED, tools=TOOLS))
    assert found == expected(as_objects, TOOLS) == told(ask(client, as_objects, tools=TOOLS))
    assert told(ask(client, CALLED)) == expected(as_objects, None)


def called_with(arguments: Any) -> list[Any]:
    call = {"function": {"name": "look_up", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, CALLED[-1]]


@pytest.mark.parametrize("arguments", ['{"word": "i', "[1]", "null", "", "it"])
def test_arguments_that_are_no_object_are_text_of_the_prompt(
    client: TestClient, arguments: str
) -> None:
    shown = called_with(arguments or {})
    assert told(ask(client, called_with(arguments), tools=TOOLS)) == expected(shown, TOOLS)
    assert told(ask(client, called_with([1]), tools=TOOLS)) == expected(called_with("[1]"), TOOLS)


def test_a_template_that_needs_an_object_gets_one_around_the_text() -> None:
    template = WITH_TOOLS.replace("c.function | tojson", "c.function.arguments | items | list")
    clients = client_of(template)
    wrapped = called_with({"arguments": '{"word": "i'})
    found = told(ask(next(clients), called_with('{"word": "i'), tools=TOOLS))
    assert found == expected(wrapped, TOOLS, template)
    clients.close()


def test_what_agents_send_for_caches_and_accounts_changes_no_token(client: TestClient) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "say it"} | cached
    (tool,) = TOOLS
    asked = {
        "messages": [{"role": "user", "content": [part], "name": "me", "id": "m"} | cached],
        "tools": [tool | cached | {"function": tool["function"] | cached}],
        "cache_prompt": True,
        "stream_options": None,
        "grammar": None,
        "store": True,
        "parallel_tool_calls": True,
    }
    assert told(ask(client, **asked)) == expected(USER, TOOLS)


def test_of_several_templates_the_one_for_tools_is_taken() -> None:
    several = {"default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS}
    client = client_of(several)
    each = next(client)
    assert told(ask(each, tools=TOOLS)) == expected(USER, TOOLS)
    assert told(ask(each)) == expected(USER, None, CHAT_TEMPLATE)
    client.close()


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | function}]


@pytest.mark.parametrize(
    ("asked", "param", "sentence"),
    [
        (
            {"tools": TOOLS, "tool_choice": "some"},
            "tool_choice",
            'tool_choice is "some"; it is "auto", "none"',
        ),
        ({"tool_choice": "required"}, "tool_choice", 'tool_choice is "required"'),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "one of tools",
        ),
        ({"tools": [*TOOLS, *TOOLS]}, "tools", "two tools have the name look_up"),
        ({"tools": tool(strict="yes")}, "tools", "a strict that is neither true, false nor null"),
        ({"tools": 128 * tool() + tool()}, "tools", "129 tools are given; at most 128 are read"),
        ({"tools": {}}, "tools", "tools is not as it should be"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools",
            "the one kind that this server knows",
        ),
        ({"tools": ["f"]}, "tools", "the one kind that this server knows"),
        ({"tools": tool(name="a b")}, "tools", 'a tool has the name "a b"'),
        ({"tools": tool(name=None)}, "tools", "a tool has the name null"),
        ({"tools": tool(description=3)}, "tools", "a description that is no text"),
        ({"tools": tool(parameters=[])}, "tools", "parameters that are no object"),
        ({"functions": [{"name": "f"}]}, "functions", "functions is"),
        ({"function_call": "auto"}, "function_call", "function_call is"),
        ({"response_format": {"type": "xml"}}, "response_format", "its type is text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "a json_schema without"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "end-of-sequence token and this model names none",
        ),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_fields_that_make_no_sense_are_refused(
    client: TestClient, asked: Any, param: str, sentence: str
) -> None:
    check_refused(ask(client, **asked), param, sentence)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "assistant", "content": None}, "a message of the assistant has no content"),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            "a message of the assistant has no content",
        ),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls is not a list of"),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f"}},
            "a message has 'function_call'",
        ),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_a_turn_that_makes_no_sense_is_refused(
    client: TestClient, message: Any, sentence: str
) -> None:
    check_refused(ask(client, [*USER, message]), "messages", sentence)


def test_a_template_without_tools_shows_them_in_a_system_message(without: TestClient) -> None:
    described = describe_tools(USER, TOOLS)
    assert described[0]["role"] == "system"
    assert "look a word up" in described[0]["content"]
    assert told(ask(without, tools=TOOLS)) == expected(described, None, CHAT_TEMPLATE)
    led = [{"role": "developer", "content": "be kind"}, *USER]
    described = describe_tools([led[0] | {"role": "system"}, *USER], TOOLS)
    assert told(ask(without, led, tools=TOOLS)) == expected(described, None, CHAT_TEMPLATE)
    as_objects = json.loads(json.dumps(CALLED))
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {"word": "it"}
    conversation = describe_tools(as_objects, TOOLS)
    assert [turn["role"] for turn in conversation] == ["system", "user", "assistant", "user"]
    assert told(ask(without, CALLED, tools=TOOLS)) == expected(conversation, None, CHAT_TEMPLATE)
    assert told(ask(without, tools=TOOLS, tool_choice="none")) == expected(
        USER, None, CHAT_TEMPLATE
    )


def test_a_template_with_calls_of_an_unknown_form_is_refused_by_name() -> None:
    mark, name = next(iter(UNKNOWN_FORMS.items()))
    for tag, named in (("tag>", "in a form that this server cannot read"), (f"{mark}>", name)):
        client = client_of(WITH_TOOLS.replace("tool_call>", tag))
        check_refused(ask(next(client), tools=TOOLS), "tools", named)
        client.close()


def test_a_completion_takes_no_tools(client: TestClient) -> None:
    check_refused(
        client.post("/v1/completions", json={"prompt": "x", "tools": TOOLS}), "tools", "tools is"
    )


def check_refused(answer: Any, param: str, sentence: str) -> None:
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert sentence in answer.json()["error"]["message"]
