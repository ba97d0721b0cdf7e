"""Bound the expansion of a text by a tokenizer, from the tokenizer's description.

tokenizer.json is untrusted. A few of its lines can double a text thirty times. The tokenizers
library then fills the memory and ends the process, in native code that no timeout can stop. A bound
is therefore computed before any text is read.

The factor of a component is the largest number of bytes that it makes from one byte. Factors of
components in sequence multiply. The bound is small for the tokenizers of language models: 2 to 6
for byte-level tokenizers, 12 for those of SentencePiece. Ordinary texts stay far below it.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from skipsearch.errors import ModelError
from skipsearch.models.third_party import panics_as_errors

MAX_FACTOR = 1024  # a tokenizer with a larger factor is not loaded
MAX_DECODE_FACTOR = 64  # bytes of text for a byte of tokens
ALWAYS_BYTES = 2**24  # any text may expand to this size
ALWAYS_FACTOR = 16  # any text may grow by this factor
UNKNOWN_FACTOR = 4.0  # of an unknown component
FEW_TOKENS = 64  # special tokens around a text that do not count
LONG_TOKEN = 64  # bytes; searching for tokens up to this length takes no extra time

# Factors of Unicode maps on UTF-8. After one map, a text does not grow in another map.
UNICODE_FACTORS = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "Nmt": 1.0,
    "Strip": 1.0,
    "StripAccents": 1.0,
}
SPLITTERS = {
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
PLAIN_DECODERS = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip"}

_factors: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # by tokenizer


def check_file(path: Path) -> None:
    """Check the normalizer of a tokenizer.json before it is loaded.

    The check comes first because loading normalizes the added tokens. A file that cannot be read
    passes; the loader reports the error. Raises: ModelError if the normalizer can expand a text too
    much.
    """
    from tokenizers import normalizers

    normalizer = normalizers.NFC()
    try:
        data = json.loads(path.read_bytes())["normalizer"]
        with panics_as_errors():
            # The library's own reader also supports older forms.
            normalizer.__setstate__(json.dumps(data).encode())
    except Exception:
        return
    _refuse_large(str(path.parent), encode_factor({"normalizer": _state(normalizer)}), 1.0)


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Check a loaded tokenizer. Raises: ModelError if it can expand a text too much."""
    decoder = _state(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    _refuse_large(str(folder), _factor_of(tokenizer), decode_factor(decoder))


def check_text(tokenizer: Any, text: str) -> None:
    """Raise ModelError if the tokenizer can expand this text too much."""
    n_bytes = _size(text) + 1  # some components also add to an empty text
    bound = n_bytes * _factor_of(tokenizer)
    if bound > max(ALWAYS_BYTES, n_bytes * ALWAYS_FACTOR):
        raise ModelError(
            f"the tokenizer in {tokenizer.name_or_path} may make {bound:.0e} bytes of a text of "
            f"{len(text)} characters, and {ALWAYS_BYTES:.0e} are allowed: take the tokenizer.json "
            "of the original model, or shorter texts"
        )


def encode_factor(parts: dict[str, Any]) -> float:
    """Return how many bytes encoding makes at most from a byte of text.

    parts: normalizer, pre_tokenizer, post_processor and model, as in tokenizer.json.
    """
    return (
        _normalizers(_flat(parts.get("normalizer"), "normalizers"))
        * _product(_pre_tokenizer, _flat(parts.get("pre_tokenizer"), "pretokenizers"))
        * _product(_model, [parts.get("model") or {}])
        * _product(_post_processor, _flat(parts.get("post_processor"), "processors"))
    )


def decode_factor(decoder: Any) -> float:
    """Return how many bytes of text decoding makes at most from a byte of tokens.

    decoder: as in tokenizer.json.
    """
    return _product(_decoder, _flat(decoder, "decoders"))


def _product(factor_of: Callable[[dict[str, Any]], float], steps: list[dict[str, Any]]) -> float:
    product = 1.0
    for step in steps:
        try:
            product *= factor_of(step)
        except (KeyError, TypeError, ValueError):  # perhaps the form of a later version
            product *= UNKNOWN_FACTOR
    return product


def _normalizers(steps: list[dict[str, Any]]) -> float:
    """Return the factor of all normalizers together.

    Unicode maps are counted once together, and again after a step that writes new characters.
    """
    kinds = {step["type"] for step in steps}
    maps = kinds & UNICODE_FACTORS.keys() | (
        {"NFD", "Lowercase"} if "BertNormalizer" in kinds else set()
    )
    lowered = UNICODE_FACTORS["Lowercase"] if "Lowercase" in maps else 1.0
    of_maps = lowered * max((UNICODE_FACTORS[name] for name in maps - {"Lowercase"}), default=1.0)
    factor, is_mapped = 1.0, False
    for step in steps:
        if step["type"] in UNICODE_FACTORS or step["type"] == "BertNormalizer":
            factor *= 1.0 if is_mapped else of_maps
            is_mapped = True
        if step["type"] not in UNICODE_FACTORS:
            factor *= _product(_normalizer, [step])
            is_mapped = is_mapped and _is_mapped(step)
    return factor


def _is_mapped(step: dict[str, Any]) -> bool:
    """Return whether the text that a step writes, such as `▁`, is unchanged by Unicode maps."""
    content = step.get("content", step.get("prepend"))
    return step["type"] == "BertNormalizer" or (
        isinstance(content, str) and unicodedata.normalize("NFKD", content).lower() == content
    )


def _normalizer(step: dict[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            return _replacement(step)
        case "Prepend":
            return 1.0 + _size(step["prepend"])
        case "Precompiled":
            return float(max(1, _longest_replacement(step["precompiled_charsmap"])))
        # A space before and after each ideograph; a character for each byte.
        case "BertNormalizer" | "ByteLevel":
            return 2.0
    return UNKNOWN_FACTOR


def _replacement(step: dict[str, Any]) -> float:
    """Return the factor of a step that replaces parts of the text.

    A regular expression may match the empty string at every position of the text.
    """
    content, pattern = _size(step["content"]), step["pattern"]
    replaced = _size(pattern["String"]) if "String" in pattern else 0
    return max(1.0, content / replaced) if replaced else 1.0 + content


def _longest_replacement(charsmap: str) -> int:
    """Return the bytes of the longest text that SentencePiece's compiled map writes.

    The map is a trie, followed by the texts, which are separated by zero bytes.
    """
    data = base64.b64decode(charsmap)
    trie_bytes = int.from_bytes(data[:4], "little")
    return max(map(len, data[4 + trie_bytes :].split(b"\0")))


def _pre_tokenizer(step: dict[str, Any]) -> float:
    match step["type"]:
        case "ByteLevel":
            return 4.0 if step.get("add_prefix_space") else 2.0
        case "Metaspace":  # the replacement is written for each space, and before each word
            size = _size(step["replacement"])
            return float(size if step.get("prepend_scheme") == "never" else 2 * size)
        case kind if kind in SPLITTERS:
            return 1.0
    return UNKNOWN_FACTOR


def _post_processor(step: dict[str, Any]) -> float:
    """Return the factor by which a step increases the number of tokens.

    A few special tokens around the text do not count.
    """
    if step["type"] != "TemplateProcessing":
        return 1.0 if step["type"] == "ByteLevel" else UNKNOWN_FACTOR
    sizes = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
    n_special = sum(
        sizes[part["SpecialToken"]["id"]] for part in step["single"] if "SpecialToken" in part
    )
    return max(1.0, sum("Sequence" in part for part in step["single"])) * max(
        1.0, n_special / FEW_TOKENS
    )


def _model(model: dict[str, Any]) -> float:
    """Return the factor of memory and time that a tokenizer model needs over an ordinary one."""
    affixes = sum(
        _size(model.get(name) or "") for name in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    longest, letters = 0, 1
    if model.get("type") == "Unigram":  # it searches the longest possible token at each position
        longest = max((_size(entry[0]) for entry in model.get("vocab") or ()), default=0)
    if model.get("type") == "WordPiece":  # it tries all substrings of a word
        letters = model.get("max_input_chars_per_word") or 1
    return (1.0 + affixes) * max(1.0, longest / LONG_TOKEN) * max(1.0, letters / 100)


def _decoder(step: dict[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            return _replacement(step)
        case "WordPiece":  # a space before each token
            return 2.0
        case kind if kind in PLAIN_DECODERS:
            return 1.0
    return UNKNOWN_FACTOR


def _factor_of(tokenizer: Any) -> float:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return 1.0  # in Python, where a lack of memory is an ordinary error
    if tokenizer not in _factors:
        _factors[tokenizer] = encode_factor(_describe(tokenizer))
    return _factors[tokenizer]


def _describe(tokenizer: Any) -> dict[str, Any]:
    """Describe a loaded tokenizer as tokenizer.json does; the vocabulary only if it is needed."""
    backend = tokenizer.backend_tokenizer
    model: dict[str, Any] = {"type": type(backend.model).__name__}
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word"):
        model[name] = getattr(backend.model, name, None)
    if model["type"] == "Unigram":
        model["vocab"] = [(token, 0.0) for token in tokenizer.get_vocab()]
    return {"model": model} | {
        name: _state(getattr(backend, name))
        for name in ("normalizer", "pre_tokenizer", "post_processor")
    }


def _state(component: Any) -> Any:
    if component is None:
        return None
    try:
        return json.loads(component.__getstate__())
    except Exception:  # a component in Python
        return {"type": "custom"}


def _flat(step: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of nested sequences, in order."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner_step in step[inner] for part in _flat(inner_step, inner)]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _refuse_large(folder: str, encode: float, decode: float) -> None:
    for verb, factor, max_factor in (
        ("reads", encode, MAX_FACTOR),
        ("writes", decode, MAX_DECODE_FACTOR),
    ):
        if factor > max_factor:
            raise ModelError(
                f"the tokenizer in {folder} may make {factor:.3g} bytes of each that it {verb}, "
                f"and at most {max_factor} are allowed: take the tokenizer.json of the original "
                "model"
            )
