"""Prompts as token ids: as they are, in a chat model's template, and cut where they are too
long.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skipsearch.errors import ModelError
from skipsearch.models.chat import chat_text
from skipsearch.models.chat.chat_text import (
    encode_prompt,
    get_chat_template,
    render_chat,
    render_user_turn,
)
from skipsearch.models.chat.template_sandbox import TemplateRenderer
from skipsearch.models.loading.hub import DEMO_FOLDER
from skipsearch.models.third_party import panics_as_errors

BASE, TALKING = letter_tokenizer(), letter_tokenizer(CHAT_TEMPLATE)


def text_of(tokenizer: object, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))  # type: ignore[attr-defined]


def test_a_base_model_has_no_template_and_gets_its_text_behind_its_own_special_tokens() -> None:
    assert get_chat_template(BASE) is None
    assert text_of(BASE, encode_prompt(BASE, "two plus two")) == "<s>two plus two"


def test_a_request_stands_in_the_template_up_to_the_answer_and_special_tokens_are_there_once() -> (
    None
):
    assert get_chat_template(TALKING) == CHAT_TEMPLATE
    assert render_user_turn(TALKING, "two plus two") == "<s>user:two plus two\nai:"
    ids = encode_prompt(TALKING, "two plus two", chat=True)
    assert text_of(TALKING, ids) == "<s>user:two plus two\nai:"
    assert (
        ids
        == TALKING.apply_chat_template(
            [{"role": "user", "content": "two plus two"}], add_generation_prompt=True
        )["input_ids"]
    )


def test_what_is_too_long_loses_the_beginning_of_its_text_and_nothing_around_it() -> None:
    assert text_of(BASE, encode_prompt(BASE, "two plus two", max_tokens=5)) == "<s> two"
    assert (
        text_of(TALKING, encode_prompt(TALKING, "two plus two", chat=True, max_tokens=14))
        == "<s>user: two\nai:"
    )
    assert encode_prompt(BASE, "two plus two", max_tokens=13) == encode_prompt(BASE, "two plus two")


def test_where_the_template_alone_is_too_long_its_end_is_kept() -> None:
    assert text_of(TALKING, encode_prompt(TALKING, "two", chat=True, max_tokens=3)) == "ai:"


@pytest.fixture(scope="module")
def demo() -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@given(
    text=st.text(alphabet=st.sampled_from("ab \n\t_(é€🙂模�"), min_size=1, max_size=60),
    most=st.integers(1, 20),
)
def test_any_text_is_cut_to_what_there_is_room_for(demo: object, text: str, most: int) -> None:
    """Bytes of a character that was cut, and texts whose tokens do not decode to them, included."""
    ids = encode_prompt(demo, text, max_tokens=most)
    assert len(ids) <= most
    if len(encode_prompt(demo, text)) <= most:
        assert ids == encode_prompt(demo, text)


def test_a_template_that_refuses_a_request_is_one_sentence() -> None:
    picky = letter_tokenizer("{{ raise_exception('first a system turn, please.') }}")
    with pytest.raises(ModelError) as caught:
        encode_prompt(picky, "hello", chat=True)
    assert (
        "cannot take a single request (first a system turn, please): mend it, or remove it"
        in str(caught.value)
    )
    with pytest.raises(ModelError, match="cannot take a single request"):
        render_user_turn(letter_tokenizer("{% if %}"), "hello")


def with_pattern(pattern: str) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", name_or_path="org/name")


def test_a_pattern_that_backtracks_without_end_is_one_sentence() -> None:
    """The library of the tokenizers gives up on it with an exception that is no `Exception`."""
    tokenizer = with_pattern("(a+)+b")
    assert encode_prompt(tokenizer, "a") == [1]
    with pytest.raises(ModelError) as caught:
        encode_prompt(tokenizer, "a" * 60)
    assert str(caught.value) == (
        "the tokenizer in org/name cannot read a text of 60 characters (Onig: Regex search error: "
        "retry-limit-in-match over): take the "
        "tokenizer.json of the original model, or leave that text out"
    )


def test_ctrl_c_is_no_panic() -> None:
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt


def test_templates_are_rendered_by_a_process_of_their_own_as_transformers_would() -> None:
    template = (
        "{{ bos_token }}{%- for m in messages %}{{ m['role'] | upper }} {{ m['content'] | trim "
        "}}\n{% endfor %}"
        "{%- if add_generation_prompt %}{{ namespace(x='é🙂').x }}{% endif %}"
    )
    tokenizer = letter_tokenizer(template)
    asked = [{"role": "user", "content": " two\nplus "}]
    assert render_user_turn(tokenizer, " two\nplus ") == tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize(("known", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_the_template_does_not_know_the_role(
    known: str, role: str
) -> None:
    turns = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = render_chat(letter_tokenizer(CHAT_TEMPLATE + known), turns)
    assert text == f"<s>{role}:be kind\nuser:hi\nai:"


HELLO = [{"role": "user", "content": "hello"}]


def test_a_process_that_was_prepared_renders_and_one_that_died_is_replaced() -> None:
    child = TemplateRenderer()
    for _ in range(2):
        child.prepare()
        process = child._process
        assert process is not None
        child.prepare()
        assert child.render("{{ messages[0].content }}", {}, HELLO) == "hello"
        assert child._process is process
        process.kill()
        process.wait()
        assert child.render("{{ messages[0].content }}", {}, HELLO) == "hello"
        assert child._process is not process


def test_a_template_that_never_ends_is_stopped_and_the_next_one_works() -> None:
    child = TemplateRenderer(timeout_s=1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TimeoutError, match="takes more than 1 seconds for one request"):
        child.render(endless, {}, HELLO)
    child.timeout_s = 60
    assert child.render("{{ messages[0].content }}", {}, HELLO) == "hello"


def test_a_template_adds_a_bounded_text_to_its_request() -> None:
    child = TemplateRenderer(timeout_s=60)
    with pytest.raises(ValueError, match=r"makes 12,000,000 characters of a request of \d+ bytes"):
        child.render("{{ 'x' * 12000000 }}", {}, HELLO)
    long = [{"role": "user", "content": "x" * 1_000_000}]
    assert len(child.render("{{ messages[0].content * 3 }}", {}, long)) == 3_000_000


def test_a_template_that_had_to_be_stopped_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(TemplateRenderer):
        def render(self, *_: object) -> str:
            raise TimeoutError(
                "takes more than 5 seconds for one request, or more memory than there is"
            )

    monkeypatch.setattr(chat_text, "get_renderer", Stopped)
    with pytest.raises(ModelError) as caught:
        render_user_turn(letter_tokenizer(CHAT_TEMPLATE), "hello")
    assert str(caught.value).endswith(
        "takes more than 5 seconds for one request, or more memory than there is, and was stopped: "
        "mend it, "
        "or remove it to give the model its prompts as they are"
    )


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="this system does not limit memory"
)
def test_a_template_that_fills_the_memory_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"cannot take a single request \(MemoryError\)|more memory than there is"
    ):
        render_user_turn(letter_tokenizer("{{ 'a' * 3000000000 }}"), "hello")


def test_a_template_that_recurses_without_end_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot take a single request"):
        render_user_turn(
            letter_tokenizer("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"), "hello"
        )


def test_several_templates_without_a_default_or_one_that_is_no_text_are_refused() -> None:
    several = letter_tokenizer({"a": CHAT_TEMPLATE, "b": CHAT_TEMPLATE})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="leave open which one is meant"):
        get_chat_template(several)
    with pytest.raises(ModelError, match="is a list: write it as text, or remove it"):
        get_chat_template(letter_tokenizer([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "what"), [("a\udcff", "the byte 0xff"), ("\ud83d", "U+D83D"), ("ab\udfff", "U+DFFF")]
)
@pytest.mark.parametrize("chat", [False, True])
def test_half_of_a_character_is_refused_by_name(given: str, what: str, chat: bool) -> None:
    with pytest.raises(ModelError, match=re.escape(what)):
        encode_prompt(TALKING, given, chat=chat)
