"""Where a generation ends and what it shows: the same with any draft, by the definition."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.byte_tokenizer import SPECIAL, byte_tokenizer
from helpers.properties import with_examples
from helpers.tiny import (
    VOCAB,
    FullModel,
    tiny_llama,
    tiny_model_and_reference,
    with_eos,
    with_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.models import adapt

from .checks import DRAFTINGS, MASKS, PROMPTS, Drafting, Ending, check_endings, expected_ending

pieces = st.sampled_from(
    ["a", "b", "\n", "\n\n", "é", "€", "🙂", "def ", "ab", "aba", ":", "gh", "k:", "=="]
)
texts = pieces | st.text("ab \né", min_size=1, max_size=3)
endings = st.builds(
    Ending,
    limit=st.integers(1, 20),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    stop=st.lists(texts, max_size=2).map(tuple),
    end_on_repeat=st.none() | st.integers(1, 4),
)


def test_every_kind_of_ending_is_the_definitions_own_with_its_reason_and_its_text() -> None:
    reasons = check_endings(draftings=(None, *DRAFTINGS[1:3]))
    assert set(reasons) == {"eos", "stop", "repeat", "length"}


def test_any_mix_of_limits_ends_and_stop_strings_ends_where_the_definition_says() -> None:
    seen: Counter[str] = Counter()

    @with_examples(60)
    @given(st.sampled_from([*PROMPTS, (4,), (58,)]), endings, st.sampled_from([None, *DRAFTINGS]))
    def holds(prompt: tuple[int, ...], ending: Ending, drafting: Drafting | None) -> None:
        seen.update(check_endings([(prompt, ending)], [drafting]))

    holds()
    assert len(seen) == 4, seen


@pytest.mark.parametrize("draft_length", range(1, 13))
def test_a_limit_is_exact_with_any_draft_length(draft_length: int) -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(
        model, SkipMask(5), draft_length=draft_length
    )  # nothing skipped: every draft is accepted whole
    for limit in range(1, 15):
        result = decoder.generate(PROMPTS[0], limit)
        assert result.tokens == full.greedy(PROMPTS[0], limit)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("drafting", [None, *DRAFTINGS])
def test_the_models_context_is_filled_to_its_last_token_and_not_beyond(
    drafting: Drafting | None,
) -> None:
    hf = tiny_llama(context=20)
    model, full = adapt(hf), FullModel(hf)
    decoder = drafting.decoder(model) if drafting else Decoder(model)
    for prompt in (PROMPTS[0], PROMPTS[2], tuple(range(19))):
        result = decoder.generate(prompt, max_new_tokens=100)
        assert result.tokens == full.greedy(prompt, 20 - len(prompt))
        assert result.finish_reason == "length"


def test_the_end_of_sequence_tokens_of_the_models_own_configuration_end_it() -> None:
    _, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 12)
    hf = tiny_llama(eos=[tokens[7], tokens[4]])
    ended = Decoder(adapt(hf), MASKS[0], draft_length=6).generate(PROMPTS[0], 12)
    assert (ended.tokens, ended.finish_reason) == (
        tokens[: 1 + min(tokens.index(tokens[7]), tokens.index(tokens[4]))],
        "eos",
    )
    assert Decoder(adapt(hf), MASKS[0]).generate(PROMPTS[0], 12, ignore_eos=True).tokens == tokens


def test_the_first_token_may_be_the_last() -> None:
    model, full = tiny_model_and_reference()
    [first] = full.greedy(PROMPTS[0], 1)
    for decoder in (Decoder(with_eos(model, first)), Drafting().decoder(with_eos(model, first))):
        result = decoder.generate(PROMPTS[0], 12)
        assert (result.tokens, result.finish_reason, result.stats.rounds) == ([first], "eos", 0)


def test_a_special_token_given_as_a_stop_string_stops_though_it_shows_as_nothing() -> None:
    _, full = tiny_model_and_reference()
    hf, tokenizer = tiny_llama(), byte_tokenizer()
    prompt = next(
        p for p in ((i, j) for i in range(30) for j in range(3)) if 1 in full.greedy(p, 16)[1:]
    )
    tokens = full.greedy(prompt, 16)
    expected = tokens[: tokens.index(1) + 1]
    result = Decoder(adapt(hf, tokenizer), MASKS[0]).generate(prompt, 16, stop=SPECIAL[1])
    assert (result.tokens, result.finish_reason) == (expected, "stop")
    assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_chunks_come_a_round_at_a_time_and_only_the_last_has_reason_and_stats() -> None:
    model, full = tiny_model_and_reference()
    chunks = list(
        Drafting(draft_length=5)
        .decoder(with_tokenizer(model, byte_tokenizer()))
        .stream(PROMPTS[0], 20)
    )
    assert [t for c in chunks for t in c.tokens] == full.greedy(PROMPTS[0], 20)
    assert all(c.finish_reason is None and c.stats is None for c in chunks[:-1])
    assert (chunks[-1].finish_reason, len(chunks[0].tokens)) == ("length", 1)
    assert chunks[-1].stats is not None
    assert len(chunks) == 1 + chunks[-1].stats.rounds
    assert max(len(c.tokens) for c in chunks) > 1


def test_a_model_without_a_tokenizer_gives_tokens_and_no_text() -> None:
    model, _ = tiny_model_and_reference()
    assert Decoder(model).generate(PROMPTS[0], 3).text is None
    assert [c.text for c in Decoder(model).stream(PROMPTS[0], 3)] == [None, None, None]


def test_the_definition_used_here_reads_a_known_text_as_a_person_would() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(["ab", "c", "a", "ab", "c"])
    assert expected_ending(tokens, Ending(5), tokenizer) == (tokens, "length", "abcaabc")
    assert expected_ending(tokens, Ending(5, stop=("ca",)), tokenizer) == (tokens[:3], "stop", "ab")
    assert expected_ending(tokens, Ending(5, eos=(tokens[2],)), tokenizer) == (
        tokens[:3],
        "eos",
        "abca",
    )
    assert expected_ending(tokens, Ending(5, end_on_repeat=2), tokenizer) == (
        tokens,
        "repeat",
        "abcaabc",
    )
