"""The arguments of `Decoder`, and its messages for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference, with_tokenizer
from transformers import BatchEncoding

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import DecodeError, MaskError, ModelError, ProfileError, SkipSearchError
from skipsearch.models import adapt

from .checks import MASKS, PROMPTS


def test_a_prompt_may_be_a_list_a_tuple_a_tensor_or_a_batch_of_one() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, MASKS[0])
    tensor = torch.tensor(PROMPTS[0])
    prompts: list[Any] = [list(PROMPTS[0]), PROMPTS[0], tensor, tensor[None], tensor.numpy()]
    for prompt in prompts:
        assert decoder.generate(prompt, 6).tokens == full.greedy(PROMPTS[0], 6)


def test_a_bare_mask_drafts_as_draft_and_verify_does_unless_told_otherwise() -> None:
    model, _ = tiny_model_and_reference()
    assert Decoder(model, MASKS[0]).recipe == Recipe((Skip.from_mask(MASKS[0], 12, Adaptive()),))
    assert Decoder(model, MASKS[0], draft_length=3).recipe.drafters[0].draft_length == 3


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), "the prompt is empty"),
        ([3, 64], r"token id 64 is outside 0\.\.63"),
        ([-1], r"token id -1 is outside 0\.\.63"),
        (torch.zeros(2, 3, dtype=torch.long), "holds 2 sequences"),
        (torch.tensor([1.5]), "whole numbers"),
        ([1, 2.0], "whole numbers"),
        ([[1, 2]], "whole numbers"),
        ("text", "whole numbers"),
        (None, "whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"has shape \(1, 2, 3\)"),
        (torch.tensor(5), r"has shape \(\)"),
        (torch.tensor([[1.0, 2.0]]), r"a tensor of torch.float32; token ids are whole numbers"),
        (torch.tensor([True, False]), "a tensor of torch.bool"),
        ([1, True], "whole numbers"),
        ({"input_ids": [1, 2]}, "the prompt is a dict, not token ids: give its input_ids"),
        (
            BatchEncoding({"input_ids": [1, 2]}),
            "the prompt is a BatchEncoding, not token ids: give its input_ids",
        ),
        (list(range(64)) * 4, "has 256 tokens and llama was made for 256"),
    ],
    ids=str,
)
def test_a_senseless_prompt_is_refused_with_what_is_wrong_with_it(
    prompt: Any, sentence: str
) -> None:
    with pytest.raises(DecodeError, match=sentence):
        Decoder(tiny_model_and_reference()[0]).generate(prompt, 4)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": float("inf")}, "max_new_tokens is inf"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": "9"}, "max_new_tokens is '9'"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": [1]}, r"temperature is \[1\]"),
        ({"temperature": 101}, "temperature is 101"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_p": "a"}, "top_p is 'a'"),
        ({"top_p": True}, "top_p is True"),
        ({"top_p": None}, "top_p is None"),
        ({"top_k": "3"}, "top_k is '3'"),
        ({"top_k": float("nan")}, "top_k is nan"),
        ({"top_k": None}, "top_k is None"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": True}, "top_k is True"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": True}, "seed is True"),
        ({"seed": None}, "seed is None"),
        ({"max_draft_tokens": -1}, "max_draft_tokens is -1"),
        ({"max_draft_tokens": 1.5}, "max_draft_tokens is 1.5"),
        ({"max_draft_tokens": "2"}, "max_draft_tokens is '2'"),
        ({"stop": [3]}, r"stop is \[3\]; give a string"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": b"x"}, "stop is b'x'"),
        ({"stop": [["a"]]}, r"stop is \[\['a'\]\]"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"end_on_repeat": "2"}, "end_on_repeat is '2'"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": ["a"] * 17}, "17 stop strings are given, and at most 16"),
        ({"stop": ["a", "b" * 1025]}, "a stop string has 1,025 characters, and at most 1,024"),
        ({"max_seconds": 0}, "max_seconds is 0"),
        ({"max_seconds": float("nan")}, "max_seconds is nan"),
        ({"max_seconds": "1"}, "max_seconds is '1'"),
        ({"end_on_repeat": -1}, "end_on_repeat is -1"),
        ({"end_on_repeat": 2.5}, "end_on_repeat is 2.5"),
    ],
    ids=str,
)
def test_a_senseless_number_is_refused_before_the_first_token(
    asked: dict[str, Any], sentence: str
) -> None:
    decoder = Decoder(with_tokenizer(tiny_model_and_reference()[0], byte_tokenizer()))
    with pytest.raises(DecodeError, match=sentence):
        decoder.stream(PROMPTS[0], **({"max_new_tokens": 4, "temperature": 0.0} | asked))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(DecodeError, match="need a tokenizer"):
        Decoder(tiny_model_and_reference()[0]).stream(PROMPTS[0], stop="x")


@pytest.mark.parametrize("draft_length", [0, -1, 2.5, True])
def test_a_senseless_draft_length_is_refused(draft_length: Any) -> None:
    with pytest.raises(DecodeError, match=f"draft_length is {draft_length}"):
        Decoder(tiny_model_and_reference()[0], MASKS[0], draft_length=draft_length)


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ("mine.yaml", r"the text 'mine.yaml': load it first with skipsearch.load_profile\(path\)"),
        (Path("mine.yaml"), r"skipsearch.load_profile\(path\)"),
        ({"attn": [1]}, "the profile is a dict"),
        (True, "the profile is a bool"),
        (SkipMask, "the profile is a type"),
    ],
    ids=str,
)
def test_a_profile_that_is_none_is_refused(profile: Any, sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        Decoder(tiny_model_and_reference()[0], profile)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("demo", "the model is 'demo'; give what skipsearch.load_model"),
        (tiny_llama(), "a LlamaForCausalLM of transformers: give skipsearch.adapt"),
    ],
    ids=["name", "transformers"],
)
def test_a_model_that_is_none_is_refused(model: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        Decoder(model)


def test_a_mask_of_another_depth_is_refused() -> None:
    with pytest.raises(MaskError, match=f"for 6 layers and llama has {LAYERS}"):
        Decoder(tiny_model_and_reference()[0], SkipMask(6, (1,)))


def test_every_refusal_can_be_caught_by_the_one_root() -> None:
    with pytest.raises(SkipSearchError):
        Decoder(tiny_model_and_reference()[0]).generate([], 4)


def test_decoding_tracks_no_gradients_and_leaves_the_model_as_it_was() -> None:
    hf = tiny_llama().requires_grad_(True)
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    Decoder(adapt(hf), MASKS[0]).generate(PROMPTS[0], 6)
    assert all(p.grad is None and p.requires_grad for p in hf.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in hf.state_dict().items())
    assert torch.is_grad_enabled()
