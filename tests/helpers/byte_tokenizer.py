"""A byte-level tokenizer of 64 pieces for the tiny models: half characters, whole ones, and pieces
that straddle two.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|end|>", "<|tool|>")
PIECES = [
    *(bytes([b]) for b in b' \nabcdefghijkxyz01():="'),
    *(bytes([b]) for b in dict.fromkeys("é€🙂".encode())),
    "é".encode(),
    "€".encode(),
    "🙂".encode(),
    b" a",
    b" b",
    b"ab",
    b"ba",
    b"abc",
    b"cab",
    b"==",
    b"\n\n",
    b"\n  ",
    b"):",
    b"def ",
    b"  ",
    b" \xe2\x82",
    b"\xac\n",
    b"\xa9a",
    b"a\xf0\x9f",
    b"\x99\x82b",
    b"b\xc3",
    b"\xaca",
    b"\xf0\x9f",
    b"\xff",
    b"ef",
    b"gh",
    b"de",
    b"fa",
    b"ca",
    b"ha",
    b"ad",
]


def _spell_bytes(piece: bytes) -> str:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return "".join(chr(b) if b in plain else chr(256 + others.index(b)) for b in piece)


def byte_tokens(text: str) -> list[int]:
    """A text as tokens of one byte each."""
    return byte_tokenizer().convert_tokens_to_ids([_spell_bytes(bytes([b])) for b in text.encode()])


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 and 1 are special tokens and show as nothing; the rest are PIECES."""
    words = [*SPECIAL, *map(_spell_bytes, PIECES)]
    assert len(set(words)) == len(words) == 64, len(words)
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.add_special_tokens(
        {"eos_token": SPECIAL[0], "additional_special_tokens": [SPECIAL[1]]}
    )
    return tokenizer
