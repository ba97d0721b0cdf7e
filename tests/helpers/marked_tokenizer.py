"""A tokenizer in which texts, such as the marks of a call, are special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def add_marks(tokenizer: Any, marks: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a copy of a BPE tokenizer whose last tokens are replaced by marks: its size stays."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = parts["model"]["vocab"]
    for mark in marks:
        word, i = max(vocabulary.items(), key=lambda item: item[1])
        del vocabulary[word]
        parts["model"]["merges"] = [m for m in parts["model"]["merges"] if "".join(m) != word]
        parts["added_tokens"].append(
            dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            | {"id": i, "content": mark, "special": True}
        )
    raw = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=tokenizer.eos_token)
