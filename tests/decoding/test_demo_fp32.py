"""The embedded model in fp32: plain, drafted and Hugging Face's own tokens are the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.marks import thorough

from skipsearch import load_model
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.models import ModelAdapter

from .checks import assert_partly_accepted

TEXTS = ("def read_lines(path):\n", 'class Stack:\n    """', "The function returns")
NEW_TOKENS = 20


@cache
def demo(engine: str = "lean") -> ModelAdapter:
    return load_model("demo", device="cpu", dtype="float32", engine=engine)


@cache
def prompt(text: str) -> list[int]:
    return list(demo().tokenizer(text).input_ids)


@cache
def of_hugging_face(text: str) -> list[int]:
    ids = torch.tensor([prompt(text)])
    out = demo("hf").model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )  # type: ignore[attr-defined]
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("engine", ["lean", *thorough("hf")])
@pytest.mark.parametrize("text", TEXTS)
def test_plain_decoding_writes_what_hugging_face_generates(text: str, engine: str) -> None:
    result = Decoder(demo(engine)).generate(prompt(text), NEW_TOKENS)
    assert result.tokens == of_hugging_face(text)
    assert result.text == demo().tokenizer.decode(result.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("engine", ["lean", *thorough("hf")])
@pytest.mark.parametrize("kind", ["adaptive", *thorough("fixed")])
def test_speculative_decoding_writes_the_same_tokens(kind: str, engine: str) -> None:
    layers = demo().spec.n_layers
    middle = range(layers // 3, layers - layers // 4)
    mask = SkipMask(layers, tuple(middle)[::2], tuple(middle)[1::2])
    decoder = Decoder(demo(engine), mask, draft_length=5, exit_policy=make_exit(kind))
    total = DecodeStats()
    for text in TEXTS:
        result = decoder.generate(prompt(text), NEW_TOKENS)
        assert result.tokens == of_hugging_face(text)
        total += result.stats
    assert_partly_accepted(total)


def test_a_stop_string_cuts_the_text_and_the_rounds_alike() -> None:
    layers = demo().spec.n_layers
    plain = Decoder(demo()).generate(prompt(TEXTS[0]), NEW_TOKENS, stop="\n")
    drafted = Decoder(demo(), SkipMask(layers, (8, 10), (9,)), draft_length=6).generate(
        prompt(TEXTS[0]), NEW_TOKENS, stop="\n"
    )
    assert (plain.tokens, plain.text, plain.finish_reason) == (drafted.tokens, drafted.text, "stop")
    assert plain.text is not None
    assert "\n" not in plain.text
