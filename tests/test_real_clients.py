"""Clients that ask for JSON and tools, unmodified, against a server of a pretrained model.

    make real-short

`instructor` and `openai-agents` take part where they are installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from helpers.pretrained import marks_of, packaged_file
from openai import OpenAI
from pydantic import BaseModel, Field

import skipsearch as ss
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup.spec import Lookup

ALIAS = "smollm2-135m-instruct-gguf"
FILE = packaged_file(ALIAS)
pytestmark = marks_of(ALIAS, pytest.mark.real, "make real-short")
MODEL = "smollm2"
QUESTION: list[Any] = [
    {"role": "user", "content": "The rowing club of Esterwick held its regatta on 3 May. 610 came."}
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Event(BaseModel):
    kind: Literal["concert", "regatta", "market"]
    month: Literal["April", "May", "June"]
    visitors: int = Field(ge=0, le=5000)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from helpers.served import served

    from skipsearch.serve.auth import APIKeys
    from skipsearch.serve.limits import Limits
    from skipsearch.serve.service import Service

    model = ss.load_model(str(FILE), engine="native", dtype="bfloat16")
    decoder = Decoder(model, Recipe((Lookup(min_match=2, draft_length=4),)))
    with served(Service(decoder, APIKeys([]), Limits(), MODEL)) as address:
        yield address


@pytest.fixture
def client(address: str) -> OpenAI:
    return OpenAI(base_url=address, api_key="none", max_retries=0)


def test_parse_returns_a_pydantic_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Event, temperature=0
    )
    event = answer.choices[0].message.parsed
    assert isinstance(event, Event)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens  # forced tokens, at least


def test_a_stream_is_parsed_too(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Event, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Event)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_answered(client: OpenAI, stream: bool) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": WEATHER,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    if stream:
        with client.chat.completions.stream(**settings) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**settings).choices[0].message  # type: ignore[assignment]
    (call,) = message.tool_calls or []
    assert call.function.name == "get_weather"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments).keys() == {"city"}  # type: ignore[union-attr]
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[
            *WEATHER,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,  # type: ignore[union-attr]
                            "arguments": call.function.arguments,  # type: ignore[union-attr]
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 degrees"},
        ],
        tools=TOOLS,
        tool_choice="none",
        temperature=0,
        max_tokens=40,
    )
    assert answered.choices[0].message.content


def test_instructor_returns_a_pydantic_model(address: str) -> None:
    instructor = pytest.importorskip("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(
            OpenAI(base_url=address, api_key="none", max_retries=0), mode=mode
        )
        event = client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_model=Event, temperature=0, max_retries=0
        )
        assert isinstance(event, Event)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tool(address: str, stream: bool) -> None:
    agents = pytest.importorskip("agents")
    import asyncio

    from openai import AsyncOpenAI

    called: list[str] = []

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        called.append(city)
        return "sunny, 24 degrees"

    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(
        model=MODEL, openai_client=AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    )
    agent = agents.Agent(
        name="weather",
        instructions="Answer about the weather.",
        model=model,
        tools=[get_weather],
        # After the first call the agent resets the choice, so that the model can answer.
        model_settings=agents.ModelSettings(
            temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False
        ),
    )

    async def run() -> str:
        question = "What is the weather in Paris?"
        if not stream:
            return str((await agents.Runner.run(agent, question, max_turns=6)).final_output)
        streamed = agents.Runner.run_streamed(agent, question, max_turns=6)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    assert asyncio.run(run())
    assert called
