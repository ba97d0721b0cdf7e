"""Tokenizers of GGUF files: text is split as the file names it, and special tokens stay whole.

llama.cpp, where it is installed, reads the same vocabularies.
"""

from __future__ import annotations

import json
import socket
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from helpers.golden import check_golden
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer

from skipsearch.errors import TokenizerWarning
from skipsearch.models.loading.gguf_config import read_token
from skipsearch.models.loading.gguf_file import GGUFError, read_gguf
from skipsearch.models.loading.gguf_pre_tokenizers import DEFAULT, PRE_TOKENIZERS
from skipsearch.models.loading.gguf_tokenizer import read_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "pre_tokenizers.json"
# One name for each way to split.
CLASSES = list({pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}.values())
TEXTS = (
    "I'm we'LL IT'S 'tis 's",
    "  leading   spaces\n\n\n and\t\ttabs \r\n x  \n",
    "a1b22c333 4444 3.14159 ½ ²³ ١٢٣ 1,000,000  7\n 8",
    "日本語のテキスト 中文，标点。 한국어",
    "Привет naïve ÀÉ ẞß ﬁ ǅ ქართული",
    "foo_bar(x) -> {y: [1,2]} // c++ != `code` ~~ ^^ $5 |a|",
    "https://x.y/z?q=1#f\n/path/\r\n\n...!!! «q» “s”",
    "HTMLParser camelCase 🙂👩‍👧",
)
# llama.cpp approximates these classes, or leaves out marks: the patterns here are the publishers'.
OTHER_IN_LLAMA_CPP = {"kimi-k2": {TEXTS[7]}}


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges that cross every border, so that each split shows in the tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=alphabet, min_frequency=2
    )
    trained.train_from_iterator([*TEXTS, *TEXTS], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def write_vocabulary(
    path: Path,
    extra: tuple[str, ...] = (),
    repeated_merge: int | None = None,
    **metadata: str | int | bool | None,
) -> Path:
    """Write a file with a tokenizer and no tensors.

    extra: control tokens, after the others. repeated_merge: the merge that stands at the end again.
    """
    tokens, merges = vocabulary()
    merges = merges if repeated_merge is None else [*merges, merges[repeated_merge]]
    writer = gguf.GGUFWriter(path, "llama")
    for add in ("block_count", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{add}")(1)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *extra])
    writer.add_token_types([*[1] * len(tokens), *[3] * len(extra)])
    writer.add_token_merges(merges)
    for key, value in metadata.items():
        if value is not None:
            kind = {int: "uint32", str: "string", bool: "bool"}[type(value)]
            getattr(writer, f"add_{kind}")(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> Any:
    return read_tokenizer(read_gguf(path), 5000)


def split(name: str, text: str) -> str:
    """Return the pieces of a text, between strokes."""
    decoder = decoders.ByteLevel()
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    return "¦".join(decoder.decode([piece]) for piece, _ in pieces)


def test_each_way_to_split_is_as_recorded() -> None:
    """The pieces were compared with llama.cpp's tokens; see below."""
    pieces = {name: [split(name, text) for text in TEXTS] for name in CLASSES}
    check_golden(GOLDEN, json.dumps(pieces, ensure_ascii=False, indent=1) + "\n")


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("smollm", "x  12\n 3", "x¦  ¦1¦2¦\n ¦3"),
        ("gpt-2", "x  12", "x¦ ¦ 12"),
        ("llama-bpe", "x 1234 'S", "x¦ ¦123¦4¦ '¦S"),
        ("qwen2", "it'S 12", "it¦'S¦ ¦1¦2"),
        ("falcon", "1234 a+b", "123¦4¦ a¦+¦b"),
        ("tekken", "XMLHttp don't", "XMLHttp¦ don¦'t"),
        ("superbpe", "12345678 of it", "12¦345¦678¦ of it"),
    ],
)
def test_a_name_splits_a_text(name: str, text: str, pieces: str) -> None:
    assert split(name, text) == pieces


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_file_has_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_vocabulary(tmp_path / "v.gguf", pre=name, add_bos_token=False)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        pytest.skip(f"this llama.cpp does not know {name}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    ours = read(path)
    for text in TEXTS:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, len(buffer), False, True)
        same = ours(text)["input_ids"] == list(buffer[:count])
        assert same or text in OTHER_IN_LLAMA_CPP.get(name, ()), text
    llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_text_survives_its_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = read(write_vocabulary(tmp_path / "v.gguf", pre=name, add_bos_token=False))
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in TEXTS)


@pytest.mark.parametrize("name", [None, "default", "nobody-knows"])
def test_a_way_to_split_that_is_missing_or_unknown_is_warned_of(
    name: str | None, tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", pre=name)
    with pytest.warns(TokenizerWarning, match=name if name == "nobody-knows" else "does not say"):
        tokenizer = read(path)
    pieces = [piece for piece, _ in DEFAULT.build().pre_tokenize_str(TEXTS[2])]
    backend = tokenizer.backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in backend.pre_tokenize_str(TEXTS[2])] == pieces


def test_a_known_way_to_split_is_not_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TokenizerWarning)
        read(write_vocabulary(tmp_path / "v.gguf", pre="smollm"))


def test_a_piece_that_is_a_token_stays_one_where_the_vocabulary_wants_it(tmp_path: Path) -> None:
    """`ZqZq` has no merges; Llama 3 and Tekken have such words."""
    whole = ("ZqZq",)
    for name, count in (("llama-bpe", 1), ("qwen2", 4)):
        path = write_vocabulary(tmp_path / "v.gguf", whole, pre=name, add_bos_token=False)
        data = path.read_bytes()
        types = [*[1] * len(vocabulary()[0]), 3]
        old = b"".join(t.to_bytes(4, "little") for t in types)
        path.write_bytes(data.replace(old, old[:-4] + b"\1\0\0\0"))
        assert len(read(path)("ZqZq")["input_ids"]) == count, name


def test_bos_is_added_as_the_vocabulary_wants_it_unless_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    for name, flag, adds in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ):
        path = write_vocabulary(
            tmp_path / "v.gguf", ("<s>",), pre=name, add_bos_token=flag,
            bos_token_id=len(vocabulary()[0]),
        )  # fmt: skip
        assert (read(path)("x")["input_ids"][0] == len(vocabulary()[0])) == adds, (name, flag)


def test_of_a_merge_that_appears_twice_the_first_counts(tmp_path: Path) -> None:
    once = read(write_vocabulary(tmp_path / "once.gguf", pre="smollm"))
    twice = read(write_vocabulary(tmp_path / "twice.gguf", repeated_merge=0, pre="smollm"))
    for text in TEXTS:
        assert twice(text)["input_ids"] == once(text)["input_ids"]


def test_a_list_of_types_that_does_not_fit_the_tokens_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write_vocabulary(tmp_path / "v.gguf", pre="smollm"))
    file.metadata["tokenizer.ggml.token_type"].pop()
    with pytest.raises(GGUFError, match="a type for each"):
        read_tokenizer(file, 5000)


def test_an_error_of_the_chat_template_names_the_file(tmp_path: Path) -> None:
    assert read(write_vocabulary(tmp_path / "v.gguf", pre="smollm")).name_or_path == "v.gguf"


# --- vocabularies of SentencePiece

BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = {"a": -10, "b": -11, "▁": -12, "ab": -1, "▁a": -2, "aa": -3, "▁▁": -4, "aaa": -5}


def read_pieces(
    path: Path, pieces: dict[str, float] = PIECES, marks: tuple[str, ...] = (), **flags: bool | str
) -> Any:
    """Write and read a vocabulary with the scores of its pieces. marks: control tokens.

    flags: metadata, with __ for a dot.
    """
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *marks]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(
        [*[0.0] * 259, *[float(score) for score in pieces.values()], *[0.0] * len(marks)]
    )
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces), *[3] * len(marks)])
    for key, value in flags.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_tokenizer(read_gguf(path), len(tokens))


@pytest.mark.parametrize(
    ("text", "pieces", "flags"),
    [
        ("ab aab", "▁ ab ▁a ab", {}),
        ("  a", "▁▁ ▁a", {}),
        ("aaaaa", "▁a aa aa", {}),
        ("<|u|> a</s>a", "<|u|> ▁ ▁a </s> ▁a", {}),
        ("  a", "▁ ▁a", {"tokenizer__ggml__add_space_prefix": False}),
        ("<|u|>\n a<s> b", "<|u|> ▁a <s> ▁▁ b", {"general__name": "Phi-3 mini"}),
        ("é", "▁ <0xC3> <0xA9>", {}),
    ],
)
def test_pieces_merge_by_their_scores_as_in_llama_cpp(
    text: str, pieces: str, flags: dict[str, bool | str], tmp_path: Path
) -> None:
    """The pieces are those of llama.cpp."""
    tokenizer = read_pieces(tmp_path / "v.gguf", marks=("<|u|>",), **flags)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert " ".join(tokenizer.convert_ids_to_tokens(tokens)) == pieces


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ({**PIECES, "ba": -1}, "its tokens 'ab' and 'ba' have the same score"),
        ({**PIECES, "aé": -6}, "its token 'aé' is made of 'é', which is no token"),
    ],
)
def test_pieces_that_no_order_of_merges_gives_are_refused(
    pieces: dict[str, float], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match=reason):
        read_pieces(tmp_path / "v.gguf", pieces)


# --- special tokens

MARKS = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|end|>")


def test_control_tokens_of_any_characters_are_one_token_with_the_files_id(tmp_path: Path) -> None:
    n = len(vocabulary()[0])
    path = write_vocabulary(
        tmp_path / "v.gguf", MARKS, pre="deepseek-r1-qwen", bos_token_id=n, eos_token_id=n + 3
    )
    tokenizer = read(path)
    for i, mark in enumerate(MARKS):
        assert tokenizer(mark)["input_ids"] == [n + i]
        assert tokenizer.decode([n + i]) == mark
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (n, n + 3)
    assert len(tokenizer) == n + len(MARKS)


def test_an_invalid_id_is_a_warning_where_the_token_is_not_needed(tmp_path: Path) -> None:
    invalid = 4294967295
    file = read_gguf(
        write_vocabulary(
            tmp_path / "v.gguf", ("<s>",), pre="qwen2", padding_token_id=invalid,
            bos_token_id=invalid, eos_token_id=invalid,
        )
    )  # fmt: skip
    for name in ("padding", "bos"):
        with pytest.warns(TokenizerWarning, match=f"{name}_token_id is {invalid}"):
            assert read_token(file, name, 5000) is None
    with pytest.raises(GGUFError, match=f"eos_token_id is {invalid}; it has to be 0 to 4999"):
        read_token(file, "eos", 5000, needed=True)
    tokenizer = read_tokenizer(file, 5000)
    assert (tokenizer.pad_token, tokenizer.bos_token) == (None, None)
    assert len(tokenizer) == len(vocabulary()[0]) + 1


def test_a_large_vocabulary_is_read_without_a_look_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks the Hub about names of models with more than 100,000 tokens."""
    asked: list[Any] = []

    def refuse(*names: Any, **options: Any) -> None:
        asked.append(names)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    extra = tuple(f"<{i}>" for i in range(100_001))
    file = read_gguf(write_vocabulary(tmp_path / "large.gguf", extra, pre="gpt-2"))
    tokenizer = read_tokenizer(file, 200_000)
    assert tokenizer("<7>").input_ids == [len(tokenizer) - len(extra) + 7]
    assert (asked, tokenizer.name_or_path) == ([], "large.gguf")


def test_gemma_4_merges_what_its_file_says(tmp_path: Path) -> None:
    """Its kind of vocabulary is one of SentencePiece that has merges."""
    spaced = [text.replace(" ", "\u2581") for text in TEXTS]
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, min_frequency=2)
    trained.train_from_iterator([*spaced, *spaced], trainer)
    model = json.loads(trained.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*special, *sorted(model["vocab"], key=model["vocab"].get)]
    merges = [" ".join(pair) for pair in model["merges"]]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [6] * 256 + [1] * (len(tokens) - 260))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = read_tokenizer(read_gguf(tmp_path / "m.gguf"), len(tokens))
    theirs = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[*map(tuple, model["merges"])]
    )
    for text in (*TEXTS, "Ω is no token"):
        assert ours(text).input_ids == [2, *theirs(text, add_special_tokens=False).input_ids]
        assert ours.decode(ours(text).input_ids[1:]) == text
