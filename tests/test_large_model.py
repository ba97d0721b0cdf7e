"""A model that people run: Qwen2.5-Coder-1.5B-Instruct as its publisher's file in Q4_K_M.

The rules are those of `test_real_model.py`, at eleven times the size and in the format that most
files have. It needs 9 GB of memory.

    make test-large
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.pretrained import marks_of, packaged_file
from test_real_model import CHATS, TEXTS, logits_of, write_texts

import skipsearch as ss
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.models import ModelAdapter
from skipsearch.models.chat.chat_text import encode_chat, encode_prompt
from skipsearch.tasks import load_task

ALIAS = "qwen2.5-coder-1.5b-instruct-gguf"
FILE = packaged_file(ALIAS)
pytestmark = marks_of(ALIAS, pytest.mark.large, "make test-large")

N_CHATS = 8
LAYERS = tuple(range(8, 20))
DRAFTERS: dict[str, DrafterSpec] = {
    "lookup": Lookup(min_match=1, draft_length=4),
    "skip": Skip(attn=LAYERS, mlp=LAYERS[::2], draft_length=3, exit=Fixed()),
    "clasp": CLaSp(skip=12, unit="sublayer", interval=16, draft_length=3, exit=Fixed()),
    "asd": ASD(threshold=0.98, every=10, draft_length=3, exit=Confidence(threshold=0.3)),
    "swift": SWIFT(skip_ratio=0.3, interval=8, draft_length=3, exit=Fixed()),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@cache
def model() -> ModelAdapter:
    return ss.load_model(str(FILE), device="cpu", engine="native", dtype="bfloat16")


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    texts = [prompt.text for prompt in load_task("chat").calibration[:N_CHATS]]
    return tuple(
        tuple(encode_prompt(model().tokenizer, text, chat=True, max_tokens=128)) for text in texts
    )


@cache
def plain_texts() -> list[list[int]]:
    return write_texts(Decoder(model()), prompts())[0]


def test_logits_and_text_are_those_of_transformers_with_dequantised_weights() -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    ).eval()
    ours = ss.load_model(
        str(FILE), device="cpu", engine="native", dtype="float32", activations="float"
    )
    for prompt in prompts()[:2]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = theirs(ids).logits[0]
            text = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=32,
                eos_token_id=[],
                do_sample=False,
                repetition_penalty=1.0,
            )[0, len(prompt) :].tolist()
        difference = (logits_of(ours, prompt) - expected).abs().max()
        assert float(difference) < 1e-3 * float(expected.std())
        assert write_texts(Decoder(ours), [prompt])[0] == [text]


def test_tokens_are_those_of_llama_cpp() -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(FILE), vocab_only=True, verbose=False)
    for text in TEXTS:
        expected = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert model().tokenizer(text, add_special_tokens=False)["input_ids"] == expected, text


def test_chats_are_those_of_the_template() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert encode_chat(model().tokenizer, messages) == list(expected["input_ids"])


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_token(kind: str) -> None:
    texts, stats = write_texts(Decoder(model(), Recipe((DRAFTERS[kind],))), prompts())
    assert texts == plain_texts()
    assert stats.accepted > 0
    assert stats.rejecting_rounds > 0


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_tool_is_called_over_the_server(tool_choice: str) -> None:
    from fastapi.testclient import TestClient

    from skipsearch.serve.app import build_app
    from skipsearch.serve.auth import APIKeys
    from skipsearch.serve.limits import Limits
    from skipsearch.serve.service import Service

    decoder = Decoder(model(), Recipe((DRAFTERS["lookup"], DRAFTERS["skip"])))
    service = Service(decoder, APIKeys([]), Limits(), "qwen")
    body = {
        "model": "qwen",
        "messages": [{"role": "user", "content": "What is the weather in Oslo? Use the tool."}],
        "tools": [WEATHER],
        "tool_choice": tool_choice,
        "max_tokens": 80,
        "temperature": 0,
    }
    with TestClient(build_app(service)) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert "Oslo" in message["tool_calls"][0]["function"]["arguments"]
