"""Unmodified clients that people use, against a running server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from .conftest import KEYS, Running, expected

pytestmark = pytest.mark.xdist_group("server")
PROMPTS = ("def f(x):", "a b c a b c a", "Hello", "zzz")


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.address}/v1", api_key=KEYS[0], max_retries=0, timeout=60
    )


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "skipsearch"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_the_models_own(client: openai.OpenAI, prompt: str) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0)
    assert answer.choices[0].text == expected(prompt, 40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1 + len(prompt), 40)
    streamed = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=40, temperature=0, stream=True
    )
    assert "".join(event.choices[0].text for event in streamed) == expected(prompt, 40)


def test_some_drafts_are_accepted_and_some_rejected_and_both_are_told(
    client: openai.OpenAI,
) -> None:
    answer = client.completions.create(
        model="tiny", prompt=list(PROMPTS), max_tokens=60, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        expected(prompt, 60) for prompt in PROMPTS
    ]
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    assert details.rejected_prediction_tokens
    figures: Any = answer.model_extra["skipsearch"]  # type: ignore[index]
    assert figures["accepted"] == details.accepted_prediction_tokens
    assert figures["tau"] > 1
    assert [by["kind"] for by in figures["by_drafter"]] == ["lookup", "skip"]


def test_chats_are_the_models_own(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "say it"}]
    answer = client.chat.completions.create(
        model="tiny", messages=asked, max_tokens=30, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected("say it", 30, chat=True)
    parts: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "it"}],
        }
    ]
    again = client.chat.completions.create(
        model="tiny", messages=parts, max_completion_tokens=30, temperature=0
    )
    assert again.choices[0].message.content == answer.choices[0].message.content
    events = list(
        client.chat.completions.create(
            model="tiny",
            messages=asked,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert (
        "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        == answer.choices[0].message.content
    )
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 30


@pytest.mark.parametrize("chat", [False, True])
def test_the_usage_so_far_is_in_every_event_for_those_who_ask(
    client: openai.OpenAI, chat: bool
) -> None:
    """Load generators use this option of vLLM."""
    asked: Any = {
        "model": "tiny",
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    events: Any = list(
        client.chat.completions.create(messages=[{"role": "user", "content": "say it"}], **asked)
        if chat
        else client.completions.create(prompt="a b c a b c a", **asked)
    )
    told = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert len(told) >= len(events) - 1, "the event that says whose turn it is has none"
    assert told == sorted(told)
    assert told[0] < told[-1] == 40
    asked["stream_options"] = {"continuous_usage_stats": True}
    assert all(event.usage is None for event in client.completions.create(prompt="x", **asked))


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    asked: Any = [
        {"role": "system", "content": "be kind and answer in words of one syllable"},
        {"role": "user", "content": "say it"},
    ]
    first = client.chat.completions.create(
        model="tiny", messages=asked, max_tokens=20, temperature=0
    )
    more: Any = [
        *asked,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "again"},
    ]
    second = client.chat.completions.create(
        model="tiny", messages=more, max_tokens=20, temperature=0
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    ends = len("ai:")  # where the template has the role of a turn that was answered
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - ends


def test_samples_repeat_with_their_seed_and_differ_among_n(client: openai.OpenAI) -> None:
    def sample(seed: int | None) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="abc", max_tokens=30, temperature=1.0, top_p=0.95, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    assert sample(7) == sample(7)
    assert len({*sample(7), *sample(None)}) == 6


def test_stop_strings_end_an_answer_and_are_left_out(client: openai.OpenAI) -> None:
    whole = expected("Hello", 40)
    stop = whole[10:12]
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=40, temperature=0, stop=[stop, "never so"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs(client: openai.OpenAI, stream: bool) -> None:
    asked: Any = {
        "model": "tiny",
        "prompt": "a b c",
        "max_tokens": 6,
        "temperature": 0,
        "echo": True,
        "logprobs": 3,
        "stream": stream,
    }
    answer = client.completions.create(**asked)
    choices = [event.choices[0] for event in answer] if stream else answer.choices
    tokens = [
        token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []
    ]
    logprobs = [
        value
        for choice in choices
        if choice.logprobs
        for value in choice.logprobs.token_logprobs or []
    ]
    tops = [
        top for choice in choices if choice.logprobs for top in choice.logprobs.top_logprobs or []
    ]
    assert "".join(choice.text for choice in choices) == "a b c" + expected("a b c", 6)
    assert (len(tokens), len(logprobs), logprobs[0]) == (6 + 6, 12, None)
    assert all(value is not None and value < 0 for value in logprobs[1:])
    for value, top in zip(
        logprobs[6:], tops[6:], strict=True
    ):  # greedy: each generated token is the most likely
        assert value == max(top.values())


def test_logprobs_are_the_full_models_own(client: openai.OpenAI) -> None:
    import torch
    from helpers.letter_tokenizer import letter_tokenizer

    from .conftest import full_model

    ids = letter_tokenizer()("def f(x): y").input_ids
    logits = full_model().hf(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, temperature=0, echo=True, logprobs=0
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.token_logprobs[1:] == pytest.approx(
        [float(logits[i, token]) for i, token in enumerate(ids[1:])], abs=1e-9
    )
    assert len(told.tokens or []) == len(ids)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "x"}]
    answer = client.chat.completions.create(
        model="tiny", messages=asked, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [len(entry.top_logprobs) for entry in told.content] == [2] * 5
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in told.content)


def test_errors_are_those_that_the_client_knows(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here"):
        client.completions.create(**asked | {"model": "gpt-9"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**asked, temperature=-1)
    with pytest.raises(
        openai.BadRequestError, match=r"suffix is \"x\", which this server does not carry out"
    ):
        client.completions.create(**asked, suffix="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(**asked | {"prompt": "a" * 600})
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(
            base_url=f"{server.address}/v1", api_key="wrong", max_retries=0
        ).completions.create(**asked)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).completions.create(**asked)
    assert client.completions.create(**asked).choices[0].finish_reason == "length"


def test_plain_decoding_and_a_trace_on_request(client: openai.OpenAI) -> None:
    pieces: dict[str, list[Any]] = {}
    for profile in ("own", "none"):
        events = client.completions.create(
            model="tiny",
            prompt="a b c a b c",
            max_tokens=40,
            temperature=0,
            stream=True,
            extra_body={"skipsearch": {"trace": True, "profile": profile}},
        )
        told: list[Any] = [(event.model_extra or {}).get("skipsearch") for event in events]
        pieces[profile] = [piece for one in told for piece in (one or {}).get("pieces", [])]
        assert told[-1]["figures"]["rounds"] > 0
    assert ["".join(piece["text"] for piece in pieces[profile]) for profile in pieces] == [
        expected("a b c a b c", 40)
    ] * 2
    assert {piece["by"] for piece in pieces["own"]} >= {None, "skip"}
    assert {piece["by"] for piece in pieces["none"]} == {None}


def test_penalties_and_biases_move_the_full_models_logits(client: openai.OpenAI) -> None:
    from helpers.letter_tokenizer import letter_tokenizer

    from .conftest import full_model

    tokenizer = letter_tokenizer()
    ids, bias = (
        list(tokenizer("a b c").input_ids),
        {tokenizer("q").input_ids[1]: 2.5, tokenizer("e").input_ids[1]: -100.0},
    )
    text = list(ids)
    for _ in range(30):
        logits = full_model().next_logits(text).copy()
        for token in set(text[len(ids) :]):
            logits[token] -= 0.7 + 1.1 * text[len(ids) :].count(token)
        for token, value in bias.items():
            logits[token] += value
        text.append(int(logits.argmax()))
    answer = client.completions.create(
        model="tiny",
        prompt="a b c",
        max_tokens=30,
        temperature=0,
        presence_penalty=0.7,
        frequency_penalty=1.1,
        logit_bias={str(token): value for token, value in bias.items()},
    )  # type: ignore[misc, arg-type]
    assert answer.choices[0].text == tokenizer.decode(text[len(ids) :])
    assert answer.choices[0].text != expected("a b c", 30)


def test_min_p_rules_out_what_is_far_less_likely_than_the_likeliest_token() -> None:
    """Both probabilities are those at the temperature of the request, as in transformers."""
    import torch
    from transformers import MinPLogitsWarper

    from skipsearch.serve.penalties import MinP

    logits = torch.tensor([[2.0, 1.0, 0.0, -3.0, 1.9]], dtype=torch.float64)
    for temperature in (0.5, 1.0, 3.0):
        theirs = MinPLogitsWarper(0.2)(None, logits / temperature)
        assert torch.equal(MinP(0.2, temperature)(logits[:, :1], logits).isinf(), theirs.isinf())


def test_min_p_of_one_leaves_the_likeliest_token_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=30, temperature=2.0, extra_body={"min_p": 1.0}
    )
    assert answer.choices[0].text == expected("Hello", 30)


def test_hugging_faces_client(server: Running) -> None:
    client = InferenceClient(base_url=f"{server.address}/v1", api_key=KEYS[1])
    asked: Any = [{"role": "user", "content": "say it"}]
    answer = client.chat_completion(asked, model="tiny", max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == expected("say it", 20, chat=True)
    events = client.chat_completion(asked, model="tiny", max_tokens=20, temperature=0, stream=True)
    assert "".join(
        event.choices[0].delta.content or "" for event in events if event.choices
    ) == expected("say it", 20, chat=True)
