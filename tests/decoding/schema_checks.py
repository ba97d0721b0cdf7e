"""Checks of decoding under random JSON schemas, against a loop over Hugging Face's modules."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import llguidance.numpy
import numpy as np
from helpers.tiny import FullModel, model_and_reference, tiny_llama, with_eos, with_tokenizer
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from skipsearch.constraints.after_thinking import begin_after_thinking
from skipsearch.core.constraint import Constraint, ConstraintAfterThinking
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.engine import load_model
from skipsearch.models import ModelAdapter

from .checks import DRAFTINGS, Drafting

VOCAB, EOS = 4096, 0  # of the embedded model's tokenizer

names = st.text("abcdefgh_", min_size=1, max_size=6)
leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer", "minimum": 0, "maximum": 99}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda words: {"enum": sorted(words)}, st.sets(names, min_size=1, max_size=3)),
    st.builds(lambda word: {"const": word}, names),
)


def _object_of(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(_object_of, st.dictionaries(names, inner, min_size=1, max_size=3), st.sets(names))
        | st.builds(
            lambda item, n: {"type": "array", "items": item, "maxItems": n},
            inner,
            st.integers(0, 2),
        )
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2))
    ),
    max_leaves=5,
)


@cache
def world() -> tuple[ModelAdapter, FullModel, LLTokenizer]:
    """A tiny random model with the embedded model's tokenizer, and the library's view of it."""
    tokenizer = load_model("demo", engine="hf").tokenizer
    model, full = model_and_reference(lambda: tiny_llama(vocab=VOCAB, hidden=16, layers=5))
    prepared = from_tokenizer(tokenizer, VOCAB, EOS)
    return with_eos(with_tokenizer(model, tokenizer), EOS), full, prepared


def masked_greedy_by_library(
    full: FullModel, prepared: LLTokenizer, prompt: tuple[int, ...], grammar: str, n: int
) -> list[int]:
    """Return the greedy text of Hugging Face's logits under the library's own masks."""
    matcher, text = LLMatcher(prepared, grammar), list[int]()
    words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
    while len(text) < n and EOS not in text:
        llguidance.numpy.fill_next_token_bitmask(matcher, words)
        legal = np.unpackbits(words.view(np.uint8), bitorder="little", count=VOCAB).astype(bool)
        text.append(int(np.where(legal, full.next_logits([*prompt, *text]), -np.inf).argmax()))
        matcher.consume_token(text[-1])
    return text


@cache
def thinking_text(prompt: tuple[int, ...]) -> str:
    """Return the beginning of a thinking that never ends."""
    constraint = ConstraintAfterThinking(json_schema={}, end="</think>")
    return Decoder(world()[0]).generate(Request(prompt, 16, constraint=constraint)).text or ""


def check_schema(
    schema: dict[str, Any],
    drafting: Drafting | None,
    prompt: tuple[int, ...],
    n: int,
    thinking_end: str | None = None,
) -> DecodeStats:
    """Check the tokens of an answer, and that it is JSON of the schema unless it was cut off.

    thinking_end: the mark after which the answer begins.
    """
    model, full, prepared = world()
    decoder = Decoder(model) if drafting is None else drafting.decoder(model)
    constraint = Constraint(json_schema=schema)
    if thinking_end is not None:
        constraint = ConstraintAfterThinking(json_schema=schema, end=thinking_end)
    result = decoder.generate(Request(prompt, n, constraint=constraint))
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = LLMatcher.grammar_from_json_schema(schema, style)  # type: ignore[arg-type]
    if isinstance(constraint, ConstraintAfterThinking):
        grammar = begin_after_thinking(grammar, constraint, model.tokenizer, prepared, (EOS,))
    expected = masked_greedy_by_library(full, prepared, prompt, grammar, n)
    assert result.tokens == expected, (schema, drafting)
    if EOS in expected:
        assert result.finish_reason == "eos"
        answer = (result.text or "").partition(thinking_end)[2] if thinking_end else result.text
        jsonschema.validate(json.loads(answer or ""), schema)
    else:
        assert result.finish_reason == "length"
    return result.stats


DRAFTINGS_OF_SCHEMAS = (None, *DRAFTINGS[:7])
