"""The bytes of tokens: those of all tokens of a text are its UTF-8."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.letter_tokenizer import letter_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skipsearch.models.loading.hub import DEMO_FOLDER
from skipsearch.models.token_bytes import TokenBytes

TEXT = "a smile 🙂 é\n  日本 <0x0A> end"


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens as Llama 2 has them: `▁` for a space, and a token for each byte of a rare character.

    Every text begins with a space that decoding leaves out.
    """
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "a",
        *"smile",
    ]
    raw = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a")], byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def byte_level_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, byte_level_tokenizer])
def test_the_bytes_of_all_tokens_are_those_of_the_text(make: Any) -> None:
    tokenizer = make()
    first, *rest = tokenizer(TEXT, add_special_tokens=False).input_ids
    read = TokenBytes(tokenizer)
    parts = [read.read_first(first), *(read.read(token) for token in rest)]
    assert b"".join(parts).decode() == TEXT
    assert any(b"\xf0" in part and b"\xf0\x9f\x99\x82" not in part for part in parts)


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing() -> None:
    for tokenizer in (sentencepiece_tokenizer(), letter_tokenizer()):
        read = TokenBytes(tokenizer)
        end = tokenizer.eos_token_id
        assert (read.read(end), read.is_special(end)) == (b"</s>", True)
        assert read.read(len(tokenizer) + 5) == b""
    a = tokenizer.convert_tokens_to_ids("a")
    assert (read.read(a), read.is_special(a)) == (b"a", False)


def test_a_metaspace_is_a_space() -> None:
    raw = Tokenizer(models.WordLevel({"▁two": 0, "▁plus": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    read = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=raw))
    assert read.read_first(0) + read.read(1) == b"two plus"
