"""The bytes that single tokens stand for: a token may be part of a character, which has no text."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space


class TokenBytes:
    """The bytes of each token of a tokenizer. Those of a special token are its name in UTF-8."""

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.tokenizer = tokenizer
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        self._decoders = _read_decoders(tokenizer)
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def is_special(self, token: int) -> bool:
        """Return whether the token has no text in an answer."""
        return token in self._added and self._added[token].special

    def read(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not have."""
        if token in self._added:
            return str(self._added[token].content).encode("utf-8", "replace")
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if "ByteLevel" in self._decoders and all(c in self._bytes for c in name):
            return bytes(self._bytes[c] for c in name)
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        if self._decoders & {"Replace", "Metaspace"}:
            return str(name).replace(_SPACE, " ").encode("utf-8", "replace")
        return str(self.tokenizer.decode([token])).encode("utf-8", "replace")

    def read_first(self, token: int) -> bytes:
        """Return the bytes of the first token of a text, whose space some tokenizers leave out."""
        read = self.read(token)
        starts = str(self.tokenizer.decode([token])).startswith(" ")
        return read[1:] if read.startswith(b" ") and not starts else read


def _read_decoders(tokenizer: Any) -> set[str]:
    """Return the types of a fast tokenizer's decoders; none for another tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())  # what pickle reads
    return {part["type"] for part in state.get("decoders", [state])}
