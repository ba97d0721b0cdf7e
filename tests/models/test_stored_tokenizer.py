"""A tokenizer that is made of stored parts is the one that was stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from models.test_gguf_tokenizer import MARKS, TEXTS, read, read_pieces, vocabulary, write_vocabulary
from skipsearch.models.chat.chat_text import encode_text, get_chat_template, render_user_turn
from skipsearch.models.loading.stored_tokenizer import StoredTokenizer, take_apart

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def read_byte_level(path: Path, adds_bos: bool) -> Any:
    n = len(vocabulary()[0])
    tokenizer = read(
        write_vocabulary(
            path, MARKS, pre="qwen2", add_bos_token=adds_bos, bos_token_id=n, eos_token_id=n + 3
        )
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZERS = {
    "byte level": lambda path: read_byte_level(path, adds_bos=False),
    "byte level with bos": lambda path: read_byte_level(path, adds_bos=True),
    "SentencePiece": lambda path: read_pieces(path, marks=("<|u|>",)),
    "Phi-3": lambda path: read_pieces(path, marks=("<|u|>",), general__name="Phi-3 mini"),
    "without special tokens": lambda path: read(write_vocabulary(path, pre="gpt-2")),
}


@pytest.fixture(params=TOKENIZERS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StoredTokenizer, Any]:
    """A stored tokenizer and the one that was stored."""
    original = TOKENIZERS[request.param](tmp_path / "v.gguf")
    return StoredTokenizer(take_apart(original)), original


@pytest.fixture(params=["before transformers is asked", "afterwards"])
def tokenizers(request: pytest.FixtureRequest, pair: Any) -> tuple[StoredTokenizer, Any]:
    stored, original = pair
    if request.param == "afterwards":
        for tokenizer in (stored, original):
            tokenizer(TEXTS[0], max_length=2, truncation=True)
    return stored, original


def test_texts_have_the_same_tokens_and_tokens_the_same_text(tokenizers: Any) -> None:
    stored, original = tokenizers
    texts = [*TEXTS, "ab aab", "<|end|>a<|u|>\n b</s>", "", " "]
    for text in texts:
        for special in (False, True):
            ids = encode_text(original, text, special)
            assert encode_text(stored, text, special) == ids
            assert stored(text, add_special_tokens=special).input_ids == ids
            for skips in (False, True):
                for part in (ids, ids[:-1], ids[1:]):
                    text_of = original.decode(part, skip_special_tokens=skips)
                    assert stored.decode(part, skip_special_tokens=skips) == text_of


def test_special_tokens_and_template_are_the_same(tokenizers: Any) -> None:
    stored, original = tokenizers
    for name in (
        "special_tokens_map",
        "all_special_ids",
        "bos_token",
        "eos_token",
        "pad_token",
        "chat_template",
        "name_or_path",
        "vocab_size",
    ):
        assert getattr(stored, name) == getattr(original, name), name
    assert len(stored) == len(original)
    assert stored.get_added_vocab() == original.get_added_vocab()
    assert str(stored.added_tokens_decoder) == str(original.added_tokens_decoder)
    assert get_chat_template(stored) == get_chat_template(original)
    assert stored.full.backend_tokenizer.to_str() == original.backend_tokenizer.to_str()
    if original.chat_template:
        assert render_user_turn(stored, "x") == render_user_turn(original, "x")


def test_a_change_holds(pair: Any) -> None:
    stored, _ = pair
    stored.chat_template = "other"
    stored.add_special_tokens({"eos_token": "<end>"})
    assert (get_chat_template(stored), stored.eos_token) == ("other", "<end>")
    assert encode_text(stored, "<end>", special=False) == [stored.eos_token_id]
    assert stored.special_tokens_map["eos_token"] == "<end>"


def test_what_transformers_tokenizer_lacks_is_lacking(pair: Any) -> None:
    stored, _ = pair
    assert not hasattr(stored, "no_such_name")
    assert copy.copy(stored).encode_ids("x", False) == stored.encode_ids("x", False)
