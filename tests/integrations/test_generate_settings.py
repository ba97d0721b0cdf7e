"""Each thing that `model.generate` takes is decided on: carried out, without effect, or refused by
name.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from models.tiny import hf_model, some_tokens
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

import skipsearch as ss
from skipsearch.errors import DecodeError, UnsupportedRequest
from skipsearch.integrations import hf_settings as tables
from skipsearch.integrations.hf_settings import (
    IGNORED,
    KNOWN_SETTINGS,
    LOSSY_SETTING,
    NEUTRAL_VALUES,
    SUPPORTED,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using the model-agnostic default"
)  # transformers', where no length is given

# What transformers hands on to the model, or takes out of the keywords: no signature names these.
UNNAMED = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "past_key_values",
    "tokenizer",
    "assistant_tokenizer",
    "trust_remote_code",
}
TAKEN = (
    UNNAMED
    | {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    | {
        name
        for name, parameter in inspect.signature(GenerationMixin.generate).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }
)


def test_each_field_and_argument_of_transformers_is_decided_on() -> None:
    """A field that a later transformers adds fails here until it stands in a table."""
    assert sorted(TAKEN - KNOWN_SETTINGS) == []


def test_a_field_of_a_later_transformers_is_refused_unless_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "KNOWN_SETTINGS", KNOWN_SETTINGS - {"num_beams"})
    monkeypatch.setattr(
        tables,
        "NEUTRAL_VALUES",
        {name: values for name, values in NEUTRAL_VALUES.items() if name != "num_beams"},
    )
    asked: list[dict[str, Any]] = [
        {"num_beams": 1},
        {"generation_config": GenerationConfig(num_beams=1)},
    ]
    for beams in asked:
        with pytest.raises(DecodeError, match=r"^num_beams is 1"):
            ss.generate(hf_model("llama"), some_tokens(5), **beams)
    ss.generate(hf_model("llama"), some_tokens(5), max_new_tokens=1, num_beams=None)


def test_each_name_stands_in_one_table_alone() -> None:
    tables = [SUPPORTED, IGNORED, NEUTRAL_VALUES.keys()]
    assert sum(map(len, tables)) == len(KNOWN_SETTINGS)


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
@pytest.mark.parametrize(
    "value",
    [0.37, 3, torch.ones(1, 5), "x", [[1]]],
    ids=["fraction", "number", "tensor", "text", "list"],
)
def test_any_value_but_a_neutral_one_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(DecodeError, match=f"^{name} is .*leave it out"):
        ss.generate(hf_model("llama"), some_tokens(5), do_sample=True, **{name: value})


def test_one_and_true_are_not_the_same() -> None:
    for name, value in (("num_beams", True), ("use_cache", 1), ("output_attentions", 0)):
        with pytest.raises(DecodeError, match=f"{name} is {value}"):
            ss.generate(hf_model("llama"), some_tokens(5), **{name: value})


NEUTRAL_PAIRS = [(name, value) for name, values in NEUTRAL_VALUES.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *NEUTRAL_PAIRS,
        ("logits_processor", LogitsProcessorList()),
        ("logits_processor", []),
        ("repetition_penalty", 1.0),
        ("typical_p", 1.0),
        ("min_length", 0),
        ("min_p", None),
        ("num_return_sequences", 1),
    ],
    ids=lambda value: str(value),
)
def test_a_neutral_value_leaves_a_sample_as_it_is(name: str, value: Any) -> None:
    asked = {"do_sample": True, "seed": 5, "max_new_tokens": 6}
    plain = ss.generate(hf_model("llama"), some_tokens(5), **asked)
    assert (
        ss.generate(hf_model("llama"), some_tokens(5), **asked, **{name: value}).tolist()
        == plain.tolist()
    )


# Given None as a keyword, transformers 5.23 compares it with a number, or reads a cache that it
# believes to be off.
STUMBLES = {"num_beams", "use_cache"}


def test_transformers_too_takes_each_neutral_value_for_nothing() -> None:
    model, ids = hf_model("llama"), some_tokens(5)
    plain = model.generate(ids, max_new_tokens=3).tolist()
    for name, value in NEUTRAL_PAIRS:
        if value is not None or name not in STUMBLES:
            assert model.generate(ids, max_new_tokens=3, **{name: value}).tolist() == plain, name


def test_what_has_no_effect_has_none_in_transformers() -> None:
    values: dict[str, Any] = {
        "early_stopping": True,
        "length_penalty": 2.0,
        "max_cache_len": 64,
        "disable_compile": True,
        "transformers_version": "4.0",
        "decoder_start_token_id": 3,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.1,
        "assistant_lookbehind": 3,
        "target_lookbehind": 3,
        "max_matching_ngram_size": 3,
        "trust_remote_code": True,
        "compile_config": None,
    }
    assert values.keys() == IGNORED
    model, ids = hf_model("llama"), some_tokens(5)
    plain = model.generate(ids, max_new_tokens=8).tolist()
    for name, value in values.items():
        assert model.generate(ids, max_new_tokens=8, **{name: value}).tolist() == plain, name
    assert ss.generate(model, ids, max_new_tokens=8, **values).tolist() == plain


def test_what_is_not_carried_out_is_handed_over_on_request() -> None:
    model, ids = hf_model("llama"), some_tokens(5)
    for asked in (
        {"num_beams": 3},
        {"guidance_scale": 1.5},
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])},
        {"use_cache": False},
    ):
        with pytest.raises(UnsupportedRequest):
            ss.generate(model, ids, max_new_tokens=6, **asked)
        handed = ss.generate(model, ids, max_new_tokens=6, fallback=True, **asked)
        assert handed.tolist() == model.generate(ids, max_new_tokens=6, **asked).tolist()


def test_what_writes_other_tokens_or_is_misspelt_is_handed_to_nobody() -> None:
    for asked in ({LOSSY_SETTING: 0.3}, {"max_new_token": 3}, {"num_beam": 3}):
        with pytest.raises(DecodeError) as refusal:
            ss.generate(hf_model("llama"), some_tokens(5), fallback=True, **asked)
        assert not isinstance(refusal.value, UnsupportedRequest)
