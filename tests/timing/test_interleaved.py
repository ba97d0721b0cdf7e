"""The wall clock: everybody meets every prompt in turn, samples are paired, and the figures are
those of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, with_eos
from hypothesis import given
from hypothesis import strategies as st
from replay.fabricated import drafting, plain, sample

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.drafters.exits import make_exit
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter
from skipsearch.replay.workload import Workload
from skipsearch.timing.interleaved import (
    FEWEST_PROMPTS,
    FIRST_CHECK,
    NARROW_RATIO,
    PairedTimings,
    Timings,
    find_first_divergence,
    measure_speedup,
    time_interleaved,
    time_prompt,
)

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31), (33, 34))
WORK = Workload(tuple("abcd"), PROMPTS, 8, None, SamplingParams())


class Recorder(Decoder):
    """Notes whom a prompt was given to, and writes nothing by itself."""

    def __init__(
        self,
        name: str,
        log: list[tuple[str, int]],
        model: ModelAdapter,
        immediate: tuple[int, ...] = (),
    ):
        super().__init__(model)
        self.name, self.log, self.immediate = name, log, immediate

    def generate(self, input_ids, max_new_tokens=128, **request):  # type: ignore[no-untyped-def, override]
        prompt = PROMPTS.index(tuple(input_ids))
        self.log.append((self.name, prompt))
        tokens = 1 if prompt in self.immediate else max_new_tokens
        stats = DecodeStats(
            tokens=tokens, rounds=tokens - 1, round_tokens=tokens - 1, decode_seconds=0.5
        )
        return Generation(list(range(tokens)), "length", stats)


def decoders(
    names: str, immediate: dict[str, tuple[int, ...]] | None = None
) -> tuple[list[Decoder], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    return [
        Recorder(n, log, tiny_model_and_reference()[0], (immediate or {}).get(n, ())) for n in names
    ], log


# --- the race


def test_every_decoder_is_warmed_up_and_then_meets_every_prompt_as_often_as_asked() -> None:
    racing, log = decoders("pqr")
    timings = time_interleaved(racing, WORK, repeats=2)
    assert log[:3] == [("p", 0), ("q", 0), ("r", 0)]
    assert sorted(log[3:]) == sorted([(name, prompt) for name in "pqr" for prompt in range(4)] * 2)
    assert [[s.prompt_index for s in t.samples] for t in timings] == [[0, 1, 2, 3] * 2] * 3


def test_they_take_turns_within_a_prompt_and_nobody_always_goes_first() -> None:
    racing, log = decoders("pqr")
    time_interleaved(racing, WORK)
    turns = [log[3:][3 * p : 3 * p + 3] for p in range(4)]
    assert all(len({prompt for _, prompt in turn}) == 1 for turn in turns), (
        "a prompt is finished by all before the next begins"
    )
    assert ["".join(name for name, _ in turn) for turn in turns] == ["pqr", "qrp", "rpq", "pqr"]


def test_a_prompt_that_one_of_them_ended_at_once_is_left_out_by_all() -> None:
    racing, _ = decoders("pq", {"q": (1, 3)})
    assert [[s.prompt_index for s in t.samples] for t in time_interleaved(racing, WORK)] == [
        [0, 2],
        [0, 2],
    ]


def test_nothing_to_time_is_one_sentence() -> None:
    model = with_eos(tiny_model_and_reference()[0], *range(VOCAB))
    with pytest.raises(SearchError, match="ends every one of these prompts with its first token"):
        time_interleaved([Decoder(model), Decoder(model)], WORK)


def test_progress_counts_prompts_over_all_repeats() -> None:
    told: list[tuple[int, int]] = []
    time_interleaved(
        decoders("pq")[0], WORK, repeats=2, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(n, 8) for n in range(1, 9)]


def test_samples_are_real_generations_and_drafting_changes_none_of_their_tokens() -> None:
    model, full = tiny_model_and_reference()
    drafter = Decoder(
        model, SkipMask(LAYERS, (1, 3), (2,)), draft_length=3, exit_policy=make_exit("fixed")
    )
    timed, drafted = time_interleaved([Decoder(model), drafter], WORK)
    assert [s.generation.tokens for s in timed.samples] == [full.greedy(p, 8) for p in PROMPTS]
    assert [s.generation.tokens for s in drafted.samples] == [
        s.generation.tokens for s in timed.samples
    ]
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    for s in (*timed.samples, *drafted.samples):
        assert (s.seconds, s.n_tokens) == (s.stats.decode_seconds, s.stats.round_tokens)
        assert s.seconds > 0
    assert timed.stats.rounds == timed.stats.round_tokens == 4 * 7


def test_with_a_shared_cache_one_decoder_reads_the_prompt_and_all_write_the_same_text() -> None:
    model, _ = tiny_model_and_reference()
    drafter = Decoder(model, SkipMask(LAYERS, (1, 3), (2,)), draft_length=3)
    alone = time_prompt([Decoder(model), drafter], WORK, 0, 0, 0)
    shared = time_prompt([Decoder(model), drafter], WORK, 0, 0, 0, PrefixCache())
    assert [s.generation.tokens for s in shared] == [s.generation.tokens for s in alone]
    assert [s.stats.cached_tokens for s in alone] == [0, 0]
    assert [s.stats.cached_tokens for s in shared] == [0, len(PROMPTS[0]) - 1]


# --- a measurement that ends when it is certain enough


@dataclass(frozen=True)
class Known:
    """A decoder with known seconds a prompt."""

    seconds: Sequence[float]
    is_learning: bool = False


@dataclass(frozen=True)
class Answers:
    """A workload of answers with ten tokens in rounds each, or none."""

    rounds: Sequence[bool]
    asked: list[int] = field(default_factory=list)

    @property
    def prompt_ids(self) -> range:
        return range(len(self.rounds))

    def generate(
        self, decoder: Known, prompt: int, seed: int, max_tokens: int | None = None, **_: Any
    ) -> Generation:
        if max_tokens is None:
            self.asked.append(prompt)
        n_tokens = 10 * self.rounds[prompt]
        stats = DecodeStats(round_tokens=n_tokens, decode_seconds=decoder.seconds[prompt])
        return Generation([], "length", stats)


def measured(
    drafting_s: Sequence[float],
    rounds: Sequence[bool] = (),
    is_learning: bool = False,
    limit_s: float | None = None,
) -> tuple[PairedTimings, Answers, list[tuple[int, int]]]:
    """(what was measured, who was asked, progress). Plain decoding takes a second a prompt."""
    told: list[tuple[int, int]] = []
    answers = Answers(rounds or [True] * len(drafting_s))
    pair = measure_speedup(
        Known([1.0] * len(drafting_s)),  # type: ignore[arg-type]
        Known(drafting_s, is_learning),  # type: ignore[arg-type]
        answers,  # type: ignore[arg-type]
        progress=lambda done, total: told.append((done, total)),
        limit_s=limit_s,
    )
    return pair, answers, told


EQUAL = [0.5, 0.5]  # seconds of prompts that tell all at once
APART = [0.4, 0.6]


@pytest.mark.parametrize(
    ("seconds", "n_measured", "stopped_early"),
    [
        pytest.param(EQUAL * 16, FIRST_CHECK, True, id="certain-at-the-first-look"),
        pytest.param([0.2, *EQUAL * 40], 32, True, id="one-prompt-stands-out"),
        pytest.param(APART * 16, 32, False, id="never-certain"),
        pytest.param(EQUAL * (FIRST_CHECK // 2), FIRST_CHECK, False, id="the-prompts-end-there"),
        pytest.param(EQUAL * 2, 4, False, id="fewer-prompts-than-a-look-needs"),
    ],
)
def test_a_measurement_stops_once_its_interval_is_narrow_or_the_prompts_end(
    seconds: list[float], n_measured: int, stopped_early: bool
) -> None:
    pair, answers, told = measured(seconds)
    assert pair.stopped_early == stopped_early
    assert pair.plain.n_prompts == pair.drafted.n_prompts == n_measured
    assert answers.asked == [prompt for prompt in range(n_measured) for _ in range(2)], (
        "in their order, each by both, once"
    )
    assert told == [(n, len(seconds)) for n in range(1, n_measured + 1)]
    if stopped_early:
        assert pair.speedup.high <= NARROW_RATIO * pair.speedup.mean


def test_a_measurement_counts_prompts_that_have_a_round() -> None:
    pair, answers, _ = measured(EQUAL * 16, rounds=[False, True] * 16)
    assert pair.plain.n_prompts == FIRST_CHECK
    assert answers.asked[-1] == 2 * FIRST_CHECK - 1
    with pytest.raises(SearchError, match="with its first token"):
        measured(EQUAL, rounds=[False] * 2)


def test_what_learns_from_request_to_request_is_measured_on_all_prompts() -> None:
    pair, *_ = measured(EQUAL * 16, is_learning=True, limit_s=0.0)
    assert (pair.plain.n_prompts, pair.stopped) == (32, "prompts_ended")


def test_once_the_time_is_over_no_prompt_begins_but_a_few_are_measured() -> None:
    pair, *_ = measured(EQUAL * 16, limit_s=0.0)
    assert (pair.plain.n_prompts, pair.stopped) == (FEWEST_PROMPTS, "time_over")
    assert not pair.stopped_early, "the time does not depend on the interval, so it is not widened"
    pair, *_ = measured(EQUAL * 16, limit_s=60.0)
    assert (pair.plain.n_prompts, pair.stopped) == (FIRST_CHECK, "narrow")


# --- figures


def test_a_speedup_is_the_ratio_of_total_times_over_the_same_prompts() -> None:
    assert drafting([1.0, 3.0]).speedup_over(plain([2.0, 4.0])).mean == pytest.approx(6 / 4)


def test_repeats_of_a_prompt_are_added_up_before_prompts_are_compared() -> None:
    twice = Timings([*drafting([1.0, 3.0]).samples, *drafting([2.0, 4.0]).samples])
    assert twice.totals_by_prompt(lambda s: s.seconds) == [3.0, 7.0]
    assert twice.speedup_over(plain([1.0, 1.0])).mean == pytest.approx(2 / (1.5 + 3.5))


def test_pairing_takes_away_what_prompts_have_in_common() -> None:
    seconds = [0.1, 1.0, 5.0, 20.0, 0.3]
    halved = drafting([s / 2 for s in seconds]).speedup_over(plain(seconds))
    assert (halved.mean, halved.low, halved.high) == pytest.approx((2, 2, 2)), (
        "prompts differ by 200 times, the ratio by nothing"
    )


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_against_itself_a_speedup_is_one(seconds: list[float]) -> None:
    speedup = plain(seconds).speedup_over(plain(seconds))
    assert (speedup.mean, speedup.low, speedup.high) == pytest.approx((1, 1, 1))


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=20))
def test_the_interval_holds_the_ratio_of_totals_which_lies_within_the_prompts_own_ratios(
    pairs: list[tuple[float, float]],
) -> None:
    speedup = drafting([b for _, b in pairs]).speedup_over(plain([a for a, _ in pairs]))
    ratios = [a / b for a, b in pairs]
    assert 0 < speedup.low <= speedup.mean <= speedup.high
    assert min(ratios) * (1 - 1e-9) <= speedup.mean <= max(ratios) * (1 + 1e-9)


def test_a_generation_that_ended_elsewhere_is_compared_by_token() -> None:
    longer = Timings(
        [sample(0, 2.0, tuple(range(21)))]
    )  # 20 tokens in rounds where the other emits 10
    assert longer.speedup_over(plain([1.0])).mean == pytest.approx(1.0)


def test_time_per_token_leaves_the_prefills_token_out() -> None:
    timings = plain([2.0, 3.0])
    assert timings.seconds_per_token == pytest.approx(5 / 20)
    assert timings.estimate().mean == pytest.approx(5 / 20)


# --- where two generations part


def test_identical_generations_do_not_part() -> None:
    model, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 6)
    assert find_first_divergence(model, PROMPTS[0], tokens, list(tokens)) is None


@pytest.mark.parametrize("index", [0, 3, 5])
def test_the_first_difference_is_found_with_the_gap_of_the_full_models_two_best_logits(
    index: int,
) -> None:
    model, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 6)
    other = [*tokens[:index], *(VOCAB - 1 - t for t in tokens[index:])]
    found = find_first_divergence(model, PROMPTS[0], tokens, other)
    assert found is not None
    best = sorted(full.next_logits([*PROMPTS[0], *tokens[:index]]))
    assert found.index == index
    assert found.gap == pytest.approx(best[-1] - best[-2], rel=1e-4)


def test_a_generation_that_is_the_beginning_of_another_parts_where_it_ends() -> None:
    model, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 6)
    for one, other in ((tokens, tokens[:4]), (tokens[:4], tokens)):
        found = find_first_divergence(model, PROMPTS[0], one, other)
        assert found is not None
        assert found.index == 4


# --- the request


def test_the_first_prompts_of_a_workload_are_the_same_request() -> None:
    assert WORK.head(2) == replace(WORK, prompt_names=("a", "b"), prompt_ids=PROMPTS[:2])
    assert WORK.head(99) == WORK
