"""Prompts as token ids: as they are, in a chat model's template, and cut where they are too long."""

from __future__ import annotations

import pytest
from helpers.letters import CHAT, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.errors import ModelError
from skipsearch.models.hub import DEMO_FOLDER
from skipsearch.models.text import as_request, chat_template, token_ids

BASE, TALKING = letter_tokenizer(), letter_tokenizer(CHAT)


def text_of(tokenizer: object, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))  # type: ignore[attr-defined]


def test_a_base_model_has_no_template_and_gets_its_text_behind_its_own_special_tokens() -> None:
    assert chat_template(BASE) is None
    assert text_of(BASE, token_ids(BASE, "two plus two")) == "<s>two plus two"


def test_a_request_stands_in_the_template_up_to_the_answer_and_special_tokens_are_there_once() -> None:
    assert chat_template(TALKING) == CHAT
    assert as_request(TALKING, "two plus two") == "<s>user:two plus two\nai:"
    ids = token_ids(TALKING, "two plus two", chat=True)
    assert text_of(TALKING, ids) == "<s>user:two plus two\nai:"
    assert ids == TALKING.apply_chat_template([{"role": "user", "content": "two plus two"}], add_generation_prompt=True)["input_ids"]


def test_what_is_too_long_loses_the_beginning_of_its_text_and_nothing_around_it() -> None:
    assert text_of(BASE, token_ids(BASE, "two plus two", most=5)) == "<s> two"
    assert text_of(TALKING, token_ids(TALKING, "two plus two", chat=True, most=14)) == "<s>user: two\nai:"
    assert token_ids(BASE, "two plus two", most=13) == token_ids(BASE, "two plus two")


def test_where_the_template_alone_is_too_long_its_end_is_kept() -> None:
    assert text_of(TALKING, token_ids(TALKING, "two", chat=True, most=3)) == "ai:"


@pytest.fixture(scope="module")
def demo() -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@given(text=st.text(alphabet=st.sampled_from("ab \n\t_(é€🙂模�"), min_size=1, max_size=60), most=st.integers(1, 20))
def test_any_text_is_cut_to_what_there_is_room_for(demo: object, text: str, most: int) -> None:
    """Bytes of a character that was cut, and texts whose tokens do not decode to them, included."""
    ids = token_ids(demo, text, most=most)
    assert len(ids) <= most
    if len(token_ids(demo, text)) <= most:
        assert ids == token_ids(demo, text)


def test_a_template_that_refuses_a_request_is_one_sentence() -> None:
    picky = letter_tokenizer("{{ raise_exception('first a system turn, please.') }}")
    with pytest.raises(ModelError) as caught:
        token_ids(picky, "hello", chat=True)
    assert "cannot take a single request (first a system turn, please): mend it, or remove it" in str(caught.value)
    with pytest.raises(ModelError, match="cannot take a single request"):
        as_request(letter_tokenizer("{% if %}"), "hello")
