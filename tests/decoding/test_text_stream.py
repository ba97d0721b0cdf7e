"""Tokens become text as they arrive.

A stream never shows a part of a character or of a possible stop string, and loses nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.byte_tokenizer import PIECES, SPECIAL, byte_tokenizer, byte_tokens
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import skipsearch
from skipsearch.decoding import stopping
from skipsearch.decoding.stopping import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_UNSETTLED,
    Detokenizer,
    StopCondition,
    StopString,
)


@cache
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(skipsearch.__file__).parent / "demo" / "model")


@cache
def llama_2_like_tokenizer() -> Any:
    """Return a tokenizer with space marks and byte tokens, as models of SentencePiece have."""
    words = [
        "<s>",
        "</s>",
        "▁",
        "▁a",
        "▁b",
        "a",
        "b",
        "ab",
        *(f"<0x{b:02X}>" for b in sorted({10, *"é€🙂".encode()})),
    ]
    raw = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def shown(
    tokenizer: Any, tokens: list[int], looks: list[bool], stop: tuple[str, ...] = ()
) -> list[str]:
    """Return what a stream shows after the tokens for which `looks` is true, and at the end.

    A stop string may bring the end.
    """
    stream, chunks = Detokenizer(tokenizer, stop), []
    for token, look in zip(tokens, looks, strict=True):
        if stream.push_token(token):
            break
        if look:
            chunks.append(stream.pop_text())
    return [*chunks, stream.pop_text(last=True)]


def expected(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> str:
    """Return the text up to the first token that completes a stop string, cut before the string."""
    for n in range(1, len(tokens) + 1):
        text: str = tokenizer.decode(tokens[:n], skip_special_tokens=True)
        found = [text.find(s) for s in stop if s in text]
        if found:
            return text[: min(found)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@st.composite
def streams(
    draw: st.DrawFn, vocab: int, stops: st.SearchStrategy[str], bytes_only: int | None = None
) -> tuple[Any, ...]:
    token = (
        st.integers(0, vocab - 1)
        if bytes_only is None
        else st.integers(0, bytes_only) | st.integers(0, vocab - 1)
    )
    tokens = draw(st.lists(token, max_size=40))
    looks = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    return tokens, looks, tuple(draw(st.lists(stops, max_size=3)))


short = st.text("ab \né€🙂", min_size=1, max_size=3)


@with_examples(300)
@given(streams(64, short))
def test_what_is_shown_adds_up_to_the_whole_text_cut_before_its_first_stop_string(
    case: tuple[Any, ...],
) -> None:
    tokens, looks, stop = case
    tokenizer = byte_tokenizer()
    chunks = shown(tokenizer, tokens, looks, stop)
    assert "".join(chunks) == expected(tokenizer, tokens, stop)
    # With a stop string, a chunk may end before settled text that may begin the string.
    assert stop or not any(chunk.endswith("\ufffd") for chunk in chunks[:-1])


@with_examples(150)
@given(streams(4096, st.text("\n :e", min_size=1, max_size=2), bytes_only=257))
def test_the_embedded_models_own_tokenizer_streams_what_it_decodes(case: tuple[Any, ...]) -> None:
    tokens, looks, stop = case
    assert "".join(shown(demo_tokenizer(), tokens, looks, stop)) == expected(
        demo_tokenizer(), tokens, stop
    )


@with_examples(100)
@given(st.text(max_size=30), st.data())
def test_any_text_streams_as_itself_however_it_is_cut(text: str, data: st.DataObject) -> None:
    tokens = demo_tokenizer()(text).input_ids
    looks = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    assert "".join(shown(demo_tokenizer(), tokens, looks)) == text


@with_examples(200)
@given(streams(17, short), st.data())
def test_with_byte_tokens_and_space_marks_text_does_not_depend_on_its_cuts(
    case: tuple[Any, ...], data: st.DataObject
) -> None:
    tokens, looks, stop = case
    other = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    chunks = shown(llama_2_like_tokenizer(), tokens, looks, stop)
    assert "".join(chunks) == "".join(shown(llama_2_like_tokenizer(), tokens, other, stop))
    assert not any(s in "".join(chunks) for s in stop)


def test_byte_tokens_and_space_marks_stream_as_they_decode() -> None:
    tokenizer = llama_2_like_tokenizer()
    ids = tokenizer.get_vocab()
    euro, newline = [ids[f"<0x{b:02X}>"] for b in "€".encode()], ids["<0x0A>"]
    tokens = [ids["▁a"], *euro, *euro, newline, ids["</s>"], ids["▁b"], newline, newline, ids["ab"]]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "a€€\n b\n\nab"
    assert "".join(shown(tokenizer, tokens, [True] * len(tokens))) == "a€€\n b\n\nab"
    assert "".join(shown(tokenizer, tokens, [True] * len(tokens), ("\n\n",))) == "a€€\n b"


def test_a_newline_is_found_as_a_stop_string_behind_a_long_run_of_byte_tokens() -> None:
    tokenizer = llama_2_like_tokenizer()
    ids = tokenizer.get_vocab()
    stopper = StopCondition(100, stop=["\n"], tokenizer=tokenizer)
    tokens = [ids[f"<0x{b:02X}>"] for b in "🙂🙂🙂🙂🙂🙂\n".encode()]
    assert [stopper.push_token(t) for t in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert stopper.detokenizer is not None
    assert stopper.detokenizer.pop_text(last=True) == "🙂🙂🙂🙂🙂🙂"


def test_a_character_is_shown_with_its_last_byte() -> None:
    stream, seen = Detokenizer(byte_tokenizer()), []
    for token in byte_tokens("€a"):
        stream.push_token(token)
        seen.append(stream.pop_text())
    assert seen == ["", "", "€", "a"]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_turns_out_not_to_be_one() -> None:
    stream, seen = Detokenizer(byte_tokenizer(), ["\n\n"]), []
    for token in byte_tokens("a\nb"):
        assert not stream.push_token(token)
        seen.append(stream.pop_text())
    assert seen == ["a", "", "\nb"]


def test_half_a_character_at_the_end_is_shown_as_decoding_shows_it() -> None:
    assert shown(byte_tokenizer(), byte_tokens("a€")[:2], [True, True]) == ["a", "", "\ufffd"]


@with_examples(60)
@given(st.lists(st.booleans(), min_size=14, max_size=14))
def test_special_tokens_have_no_text_unless_they_are_kept(looks: list[bool]) -> None:
    """A reader of calls or of thinking needs its marks, and nobody needs the others."""
    mark, other = SPECIAL[-1], SPECIAL[0]
    kept = len(SPECIAL) - 1
    tokens = [0, *byte_tokens("a€"), kept, kept, 0, *byte_tokens("é b"), kept, 0]
    stopper = StopCondition(100, tokenizer=byte_tokenizer(), kept_special=[mark, "none"])
    assert stopper.detokenizer is not None
    text = ""
    for token, look in zip(tokens, looks, strict=False):
        stopper.push_token(token)
        text += stopper.detokenizer.pop_text() if look else ""
    assert text + stopper.detokenizer.pop_text(last=True) == f"a€{mark}{mark}é b{mark}"
    assert other not in text


# --- time


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, inner: Any):
        self.inner, self.decoded = inner, 0

    def decode(self, tokens: list[int], **settings: Any) -> str:
        self.decoded += len(tokens)
        return str(self.inner.decode(tokens, **settings))


HALF = [
    i for i, piece in enumerate(PIECES, len(SPECIAL)) if "\ufffd" in piece.decode(errors="replace")
]


@with_examples(60)
@given(
    st.lists(
        st.sampled_from([*HALF, *range(len(SPECIAL))]),
        min_size=2 * MAX_UNSETTLED,
        max_size=4 * MAX_UNSETTLED,
    )
)
def test_bytes_that_make_no_character_stream_as_they_decode(tokens: list[int]) -> None:
    assert "".join(shown(byte_tokenizer(), tokens, [True] * len(tokens))) == expected(
        byte_tokenizer(), tokens, ()
    )


@pytest.mark.parametrize(
    "token",
    [len(SPECIAL) + PIECES.index(b"\xff"), 0, HALF[0]],
    ids=["no byte of a character", "special", "half"],
)
def test_tokens_whose_text_never_settles_cost_what_others_do(token: int) -> None:
    tokenizer, tokens = Counting(byte_tokenizer()), [token] * 2000
    stream = Detokenizer(tokenizer, ["nowhere"])
    for each in tokens:
        stream.push_token(each)
        stream.pop_text()
    assert tokenizer.decoded < 4 * MAX_UNSETTLED * len(tokens)


@with_examples(200)
@given(st.text("ab", min_size=1, max_size=9), st.lists(st.text("ab", max_size=6), max_size=8))
def test_a_stop_string_is_matched_as_far_as_the_text_ends_with_it(
    string: str, pieces: list[str]
) -> None:
    stop, text = StopString(string), ""
    for piece in pieces:
        for character in piece:
            text += character
            if stop.matched < len(string):  # it is found once
                stop.matched = stop.matched_with(character)
            assert stop.matched == (
                len(string)
                if string in text
                else max(n for n in range(len(string)) if text.endswith(string[:n]))
            )


def test_the_work_for_stop_strings_grows_with_the_text_and_not_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stop strings have the longest allowed length, and the text nearly contains each of them."""
    steps, real = [0], StopString._step

    def step(self: StopString, matched: int, character: str) -> int:
        steps[0] += 1
        return real(self, matched, character)

    monkeypatch.setattr(StopString, "_step", step)
    stream = Detokenizer(
        byte_tokenizer(),
        ["a" * (MAX_STOP_CHARACTERS - 1) + chr(98 + i) for i in range(MAX_STOP_STRINGS)],
    )
    tokens, steps[0] = byte_tokens("a" * 3000), 0
    for token in tokens:
        assert not stream.push_token(token)
        stream.pop_text()
    assert steps[0] <= 2 * MAX_STOP_STRINGS * len(tokens)
    assert len(stream.ready) == MAX_STOP_CHARACTERS - 1


def test_time_is_over_within_a_round_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopping, "monotonic", lambda: now[0])
    stopper = StopCondition(100, max_seconds=5)
    now[0] = 4.9
    assert stopper.cut([1, 2, 3]) == [1, 2, 3]
    now[0] = 5.0
    assert stopper.cut([4, 5, 6]) == [4]
    assert stopper.reason == "time"


@pytest.mark.parametrize(
    ("stop", "sentence"), [([""], "a stop string is empty"), (["x"], "need a tokenizer")]
)
def test_senseless_stop_strings_are_refused(stop: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StopCondition(4, stop=stop, tokenizer=byte_tokenizer() if stop == [""] else None)
