"""Requests that name no sampling get what the model's author recommends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.letter_tokenizer import letter_tokenizer
from helpers.tiny import tiny_llama
from transformers import RepetitionPenaltyLogitsProcessor

from skipsearch.decoding import Decoder
from skipsearch.errors import ModelError
from skipsearch.models import adapt
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.protocol import CompletionRequest
from skipsearch.serve.service import Service

from .tiny_server import LIMITS

RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1}


def sampling(defaults: dict[str, Any], **fields: Any) -> dict[str, Any]:
    request = CompletionRequest(prompt="a", **fields).with_defaults(defaults)
    return {name: request.sampling_options[name] for name in ("temperature", "top_p", "top_k")}


def test_each_field_that_a_request_names_is_its_own() -> None:
    named = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert sampling(RECOMMENDED) == named
    assert sampling(RECOMMENDED, temperature=0) == named | {"temperature": 0}
    assert sampling(RECOMMENDED, top_p=1, top_k=0) == named | {"top_p": 1, "top_k": 0}
    assert sampling({}) == {"temperature": 1, "top_p": 1, "top_k": 0}


def test_min_p_and_the_repetition_penalty_are_defaults_too() -> None:
    request = CompletionRequest(prompt="a").with_defaults(RECOMMENDED | {"repetition_penalty": 1.2})
    penalty, _ = request.processors(1, 8)
    ids, logits = torch.tensor([[1, 2]]), torch.randn(1, 8)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(ids, logits.clone())
    assert torch.equal(penalty(ids, logits.clone()), expected)
    assert CompletionRequest(prompt="a", repetition_penalty=1).processors(1, 8) == ()


@pytest.mark.parametrize(("name", "value"), [("top_p", 1.5), ("temperature", "hot"), ("top_k", -7)])
def test_a_recommendation_that_no_request_may_have_ends_the_start(name: str, value: Any) -> None:
    decoder = Decoder(adapt(tiny_llama(context=64), letter_tokenizer()))
    with pytest.raises(ModelError, match=f"has the {name} .*--generation-config none"):
        Service(decoder, APIKeys([]), LIMITS, sampling_defaults={name: value})
