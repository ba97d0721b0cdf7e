"""The tokenizer of a GGUF file, built with the library tokenizers."""

from __future__ import annotations

import re
import warnings
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from skipsearch.errors import TokenizerWarning
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile
from skipsearch.models.loading.gguf_pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from skipsearch.models.third_party import first_line_of, panics_as_errors, silence_transformers

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; the last two stay whole in a text
SPACE = "▁"  # in a vocabulary of SentencePiece
# Of models whose name says Phi-3, all but these swallow the spaces that follow, as in llama.cpp.
KEEPS_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class _Uncopied:
    """A tokenizer that transformers takes as it is: a copy of a large vocabulary takes longer than
    all other steps of reading it.
    """

    def __init__(self, backend: Tokenizer):
        self.backend = backend

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self.backend


def find_special_token(file: GGUFFile, name: str, vocab_size: int) -> int | None:
    """Return the id of a special token such as `bos`; None if the file has none, or no valid one.

    Raises: GGUFError if it is no number.
    """
    token = file.get(f"tokenizer.ggml.{name}_token_id", int)
    return token if token is not None and 0 <= token < vocab_size else None


def read_tokenizer(file: GGUFFile, vocab_size: int) -> Any:
    """Return the tokenizer of a file; None if it has none.

    vocab_size: rows of the model's embedding. Raises: GGUFError if the vocabulary has more tokens,
    or cannot be read.
    """
    kind = file.get("tokenizer.ggml.model", str, "none")
    if kind in ("none", "no_vocab"):  # llama.cpp takes both
        return None
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    types = file.get("tokenizer.ggml.token_type", list) or [NORMAL] * len(tokens)
    if not all(isinstance(token, str) for token in tokens[:1]) or len(types) != len(tokens):
        raise GGUFError(
            f"{file.name}: tokenizer.ggml.tokens has to be texts, and tokenizer.ggml.token_type a "
            "type for each; download the file again"
        )
    if not 0 < len(tokens) <= vocab_size:
        raise GGUFError(
            f"{file.name}: its vocabulary has {len(tokens)} tokens, and its embedding "
            f"{vocab_size}; download the file again"
        )
    settings: dict[str, Any] = {"chat_template": file.get("tokenizer.chat_template", str)}
    for name, key in SPECIAL_TOKENS.items():
        token = find_special_token(file, key, len(tokens))
        settings[f"{name}_token"] = None if token is None else tokens[token]
    try:
        with silence_transformers(), panics_as_errors():
            if kind == "gpt2":
                pre = _find_pre_tokenizer(file)
                backend, adds_bos = _build_byte_level(file, tokens, pre), pre.adds_bos
            elif kind in ("llama", "gemma4"):
                backend, adds_bos = _build_sentencepiece(file, tokens, types), True
            else:
                raise ValueError(f"its kind is {kind[:40]!r}, and gpt2, llama and gemma4 are read")
            is_phi3 = re.search("phi-?3", file.get("general.name", str, ""), re.I) is not None
            for token_type, add in (
                (CONTROL, backend.add_special_tokens),
                (USER_DEFINED, backend.add_tokens),
            ):
                whole = [
                    AddedToken(
                        token,
                        rstrip=is_phi3 and token not in KEEPS_SPACES,
                        normalized=False,
                        special=token_type == CONTROL,
                    )
                    for token, own_type in zip(tokens, types, strict=True)
                    if own_type == token_type and backend.token_to_id(token) is not None
                ]
                add(whole)
            settings["add_bos_token"] = _read_flag(file, "add_bos_token", adds_bos)
            settings["add_eos_token"] = _read_flag(file, "add_eos_token", False)
            return wrap_tokenizer(backend, settings, file.name)
    except Exception as error:  # tokenizers raises bare Exception
        raise GGUFError(
            f"{file.name}: its tokenizer cannot be read ({first_line_of(error)}); take the "
            "model's folder instead"
        ) from None


def wrap_tokenizer(backend: Tokenizer, settings: dict[str, Any], name: str) -> Any:
    """Return transformers' tokenizer around one of the library tokenizers, which it takes over.

    settings: as transformers takes them. name: of the file.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_Uncopied(backend), **settings)
    # For errors. Given earlier, transformers would ask the Hub about a model of this name.
    tokenizer.name_or_path = name
    return tokenizer


def _read_flag(file: GGUFFile, name: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))


def _find_pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    """Return how text is split, and warn if that is a guess."""
    name = file.get("tokenizer.ggml.pre", str)
    if (known := PRE_TOKENIZERS.get(name or "")) is not None:
        return known
    if name is None or name == "default":
        reason = "does not say how its tokenizer splits text (tokenizer.ggml.pre)"
    else:
        reason = f"splits text in a way that is not known here (tokenizer.ggml.pre {name[:40]!r})"
    warnings.warn(
        f"{file.name} {reason}, so some texts may become other tokens than the model was trained "
        "on: take a newer file of the model, or its folder",
        TokenizerWarning,
        stacklevel=2,
    )
    return DEFAULT


def _build_byte_level(file: GGUFFile, tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    merges = _read_merges(file)
    if merges is None:
        raise ValueError("it has no merges")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.keeps_words))
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return BPE with the merges of a file, or those that the scores of its vocabulary imply.

    Raises: ValueError if no order of merges gives llama.cpp's tokens.
    """
    architecture = file.metadata.get("general.architecture", "")
    is_gemma = str(architecture).startswith("gemma")
    if is_gemma:  # its file spells tokens of spaces as spaces, and its order is that of merges
        tokens = [SPACE * len(t) if " " in t and not t.strip() else t for t in tokens]
        scores = [float(-i) for i in range(len(tokens))]
    else:
        scores = file.get("tokenizer.ggml.scores", list, [])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _read_merges(file) if file.metadata["tokenizer.ggml.model"] == "gemma4" else None
    if merges is None:
        if len(scores) != len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens and {len(scores)} scores")
        merges = _derive_merges(vocabulary, scores, types)
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>" if is_gemma else None,
        )
    )
    has_prefix = not is_gemma and _read_flag(file, "add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    if is_gemma:
        backend.normalizer = replace
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif has_prefix:  # before spaces and after special tokens, too
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    else:
        backend.normalizer = replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps
    )
    return backend


def _read_merges(file: GGUFFile) -> list[tuple[str, str]] | None:
    """Return the pairs of tokens that merge, first those that merge first; None if it has none."""
    merges = file.get("tokenizer.ggml.merges", list)
    if merges is None:
        return None
    pairs = dict[tuple[str, str], None]()  # of a merge that appears twice, the first counts
    for merge in merges:
        left, _, right = str(merge)[1:].partition(" ")  # a token may begin with a space
        pairs.setdefault((str(merge)[:1] + left, right))
    return list(pairs)


def _derive_merges(
    vocabulary: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return each pair of tokens that makes a token, first those with the highest score.

    llama.cpp also merges characters that are no tokens, and of tokens with equal scores it takes
    the first in the text; no list of merges does so. Tokens of other types stay whole before
    anything merges. Raises: ValueError if a token of a text is merged in these ways.
    """
    ranked = []
    by_score = dict[float, str]()
    for token, index in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        parts = [pair for pair in pairs if all(len(p) == 1 or p in vocabulary for p in pair)]
        if parts and types[index] == NORMAL:
            unknown = next((p for pair in parts for p in pair if p not in vocabulary), None)
            if unknown is not None:
                raise ValueError(f"its token {token!r} is made of {unknown!r}, which is no token")
            other = by_score.setdefault(scores[index], token)
            if other != token:
                raise ValueError(f"its tokens {other!r} and {token!r} have the same score")
        for left, right in parts:
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], -len(left), -len(right), left, right))
    ranked.sort(key=lambda pair: pair[:3])
    return [(left, right) for *_, left, right in ranked]
