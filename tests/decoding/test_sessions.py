"""Requests as values, sessions that reuse common prefixes, and chunks with their drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from helpers.marks import thorough
from helpers.properties import with_examples
from helpers.threads import one_thread
from helpers.tiny import (
    VOCAB,
    FullModel,
    tiny_llama,
    tiny_model_and_reference,
    use_engine,
    with_eos,
    with_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

import skipsearch as ss
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.errors import DecodeError
from skipsearch.models import adapt

from .checks import DRAFTINGS, PROMPTS, Drafting, assert_partly_accepted
from .prefix_checks import Turn, check_growing, check_prefixes

__all__ = ["one_thread"]

turns = st.builds(
    Turn,
    keep=st.integers(0, 120),
    new=st.lists(st.integers(0, VOCAB - 1), max_size=9).map(tuple),
    limit=st.integers(1, 20),
    read=st.one_of(st.none(), st.integers(1, 8)),
    session=st.integers(0, 1),
)


def test_any_chat_gets_the_answers_of_a_fresh_decoder() -> None:
    total = DecodeStats()

    @with_examples(12)
    @given(st.lists(turns, min_size=2, max_size=6), st.sampled_from(DRAFTINGS))
    def holds(chat: list[Turn], drafting: Drafting) -> None:
        nonlocal total
        total += check_prefixes(chat, drafting)

    holds()
    assert_partly_accepted(total)
    assert total.cached_tokens > 0


@pytest.mark.parametrize("engine", ["hf", "graph"])
def test_on_other_engines_too(engine: str) -> None:
    with use_engine(engine):
        world = tiny_model_and_reference()
    for drafting in (DRAFTINGS[0], DRAFTINGS[5]):
        assert_partly_accepted(check_prefixes(drafting=drafting, world=world))


def test_in_exact_passes_an_answer_is_the_same_to_the_bit_whatever_was_known() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, Drafting().recipe, exact=True)
    session = decoder.new_session()
    for prompt in (PROMPTS[2], (*PROMPTS[2], 5, 6), PROMPTS[2][:4]):
        assert session.generate(prompt, 12).tokens == full.greedy(prompt, 12)


def test_the_second_turn_of_a_long_chat_pays_for_its_new_tokens_alone() -> None:
    hf = tiny_llama(layers=2, hidden=16, context=1100)
    model, full = adapt(hf), FullModel(hf)
    session = Decoder(model, ss.SkipMask(2, (1,), (1,)), draft_length=4).new_session()
    first = tuple(i * 7 % VOCAB for i in range(900))
    answer = session.generate(first, 12)
    assert (answer.stats.prompt_tokens, answer.stats.cached_tokens) == (900, 0)
    second = (*first, *answer.tokens, 5, 9, 3)
    again = session.generate(second, 12)
    assert (again.stats.prompt_tokens, again.stats.cached_tokens) == (
        915,
        911,
    )  # the last token of an answer has no K/V yet
    assert again.tokens == full.greedy(second, 12)


def test_a_session_that_outgrows_its_cache_keeps_what_it_knows() -> None:
    check_growing()


def test_a_session_gives_one_answer_at_a_time() -> None:
    session = Decoder(tiny_model_and_reference()[0]).new_session()
    stream = session.stream(PROMPTS[0], 9)
    next(stream)
    with pytest.raises(
        DecodeError, match="in the middle of an answer: read that to its end or close it"
    ):
        session.generate(PROMPTS[0], 9)
    stream.close()  # type: ignore[attr-defined]
    assert len(session.generate(PROMPTS[0], 9).tokens) == 9


def test_a_request_that_is_refused_leaves_the_session_as_it_was() -> None:
    session = Decoder(tiny_model_and_reference()[0]).new_session()
    session.generate(PROMPTS[0], 5)
    before = session.cached_ids
    with pytest.raises(DecodeError, match="temperature is -1"):
        session.generate(PROMPTS[0], 5, temperature=-1)
    assert session.cached_ids == before


def test_an_end_within_a_round_leaves_no_token_behind_it_in_the_session() -> None:
    model, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 12)
    for eos in dict.fromkeys(tokens):
        session = DRAFTINGS[0].decoder(with_eos(model, eos)).new_session()
        text = [*PROMPTS[0], *session.generate(PROMPTS[0], 12).tokens]
        assert session.cached_ids == text[: len(session.cached_ids)]
        again = [*text, 5, 9]
        plain = DRAFTINGS[0].decoder(model).generate(again, 8).tokens
        assert session.generate(again, 8, ignore_eos=True).tokens == plain == full.greedy(again, 8)


def test_samples_of_a_session_are_those_of_a_fresh_decoder() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    session = decoder.new_session()
    for prompt, seed in ((PROMPTS[0], 3), ((*PROMPTS[0], 4), 4), (PROMPTS[2], 3)):
        asked = Request(prompt, 16, temperature=0.8, top_k=20, seed=seed)
        assert session.generate(asked).tokens == decoder.generate(asked).tokens


# --- requests as values


def test_a_request_asks_for_what_its_settings_as_keywords_ask_for() -> None:
    model = with_tokenizer(tiny_model_and_reference()[0], byte_tokenizer())
    decoder = DRAFTINGS[0].decoder(model)
    asked = Request(
        PROMPTS[0],
        20,
        temperature=0.9,
        top_p=0.9,
        top_k=30,
        seed=5,
        stop="ab",
        end_on_repeat=3,
        ignore_eos=True,
    )
    by_keyword = decoder.generate(
        PROMPTS[0],
        20,
        temperature=0.9,
        top_p=0.9,
        top_k=30,
        seed=5,
        stop="ab",
        end_on_repeat=3,
        ignore_eos=True,
    )
    for _ in range(2):  # a request may run again
        again = decoder.generate(asked)
        assert (again.tokens, again.finish_reason, again.text) == (
            by_keyword.tokens,
            by_keyword.finish_reason,
            by_keyword.text,
        )
    assert decoder.generate(replace(asked, seed=6)).tokens != by_keyword.tokens


def test_settings_beside_a_request_are_refused() -> None:
    decoder = Decoder(tiny_model_and_reference()[0])
    for settings in ({"seed": 3}, {"max_new_tokens": 4}, {"max_new_tokens": 128}):
        with pytest.raises(DecodeError, match="a Request says everything that is asked for"):
            decoder.generate(Request(PROMPTS[0]), **settings)  # type: ignore[arg-type]


# --- what was proposed


@pytest.mark.parametrize(
    "drafting",
    [*DRAFTINGS[::3], *thorough(*DRAFTINGS[1::3], *DRAFTINGS[2::3])],
    ids=lambda drafting: drafting.recipe.shape,
)
def test_a_traced_request_tells_what_was_proposed_and_its_counts_are_the_decoders(
    drafting: Drafting,
) -> None:
    decoder = drafting.decoder(tiny_model_and_reference()[0])
    chunks = list(decoder.stream(PROMPTS[2], 60, trace=True))
    stats = chunks[-1].stats
    assert stats is not None
    proposals = [(chunk.proposal, chunk.tokens) for chunk in chunks if chunk.proposal is not None]
    for i, by in enumerate(stats.by_drafter):
        own = [(p, tokens) for p, tokens in proposals if p.drafter_index == i]
        assert len(own) == by.rounds
        assert sum(len(p.tokens) for p, _ in own) == by.drafted
        assert sum(p.count_accepted(tokens) for p, tokens in own) == by.accepted
    assert chunks[0].proposal is None
    assert [c.tokens for c in chunks] == [c.tokens for c in decoder.stream(PROMPTS[2], 60)]
    assert all(chunk.proposal is None for chunk in decoder.stream(PROMPTS[2], 20))
