"""The wall clock: everybody meets every prompt in turn, samples are paired, and the figures are
those of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, with_eos
from hypothesis import given
from hypothesis import strategies as st
from replay.fabricated import drafting, plain, sample

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Generation
from skipsearch.drafters.exits import make_exit
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter
from skipsearch.replay.simulate import Prediction
from skipsearch.replay.workload import Workload
from skipsearch.timing.interleaved import (
    Timings,
    find_first_divergence,
    successive_halving,
    time_interleaved,
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


@pytest.mark.parametrize("ended", [(0, 1), (2, 3)])
def test_a_rung_whose_prompts_all_end_at_once_decides_nothing(ended: tuple[int, int]) -> None:
    (plain, p, q), _ = decoders("opq", dict.fromkeys("opq", ended))
    _, timings = successive_halving(plain, [p, q], WORK, rungs=(2, 2))
    seen = [[s.prompt_index for s in t.drafted.samples] for t in timings]
    assert seen == [[i for i in range(4) if i not in ended]] * 2


def test_a_race_without_any_round_is_one_sentence() -> None:
    (plain, p), _ = decoders("op", dict.fromkeys("op", (0, 1, 2, 3)))
    with pytest.raises(SearchError, match="with its first token"):
        successive_halving(plain, [p], WORK, rungs=(2, 2))


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
def test_the_interval_holds_the_mean_and_lies_within_the_prompts_own_ratios(
    pairs: list[tuple[float, float]],
) -> None:
    speedup = drafting([b for _, b in pairs]).speedup_over(plain([a for a, _ in pairs]))
    ratios = [a / b for a, b in pairs]
    assert min(ratios) * (1 - 1e-9) <= speedup.low <= speedup.high <= max(ratios) * (1 + 1e-9)
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


# --- successive halving


class Paced(Recorder):
    """Takes so many seconds a prompt, on each prompt as often as it is asked."""

    def __init__(
        self, name: str, log: list[tuple[str, int]], model: ModelAdapter, seconds: Sequence[float]
    ):
        super().__init__(name, log, model)
        self.seconds = seconds

    def generate(self, input_ids, max_new_tokens=128, **request):  # type: ignore[no-untyped-def, override]
        found = super().generate(input_ids, max_new_tokens, **request)
        found.stats.decode_seconds = self.seconds[PROMPTS.index(tuple(input_ids))]
        return found


def knocked_out(
    paces: dict[str, Sequence[float]],
    rungs: Sequence[int],
    corrections: Sequence[Callable[[Collection[int]], float]] = (),
    further: int = 0,
) -> tuple[int, list[int], list[tuple[str, int]]]:
    """(winner, prompts that each contender got to see, who met which prompt, warm-up left out)."""
    log: list[tuple[str, int]] = []
    plain_one, *others = [
        Paced(name, log, tiny_model_and_reference()[0], pace)
        for name, pace in {"plain": (1.0,) * 4, **paces}.items()
    ]
    winner, seen = successive_halving(
        plain_one, others, WORK, rungs, corrections=corrections, tie_break_prompts=further
    )
    return winner, [len(ours.samples) for _, ours in seen], log


def test_the_faster_half_goes_on_to_the_next_prompts() -> None:
    paces = {"a": (0.9,) * 4, "b": (0.5,) * 4, "c": (0.7,) * 4, "d": (0.6,) * 4}
    winner, seen, log = knocked_out(paces, (2, 2))
    assert (winner, seen) == (1, [2, 4, 2, 4])
    assert {name for name, prompt in log if prompt == 3} == {"plain", "b", "d"}


def test_what_was_slow_on_the_first_prompts_may_still_win_by_all_of_them() -> None:
    winner, seen, _ = knocked_out(
        {"a": (0.6, 0.6, 0.6, 0.6), "b": (0.7, 0.7, 0.2, 0.2), "c": (0.9,) * 4, "d": (0.9,) * 4},
        (2, 2),
    )
    assert (winner, seen) == (1, [4, 4, 2, 2])


def test_a_contender_whom_the_first_prompts_suit_is_corrected_by_what_was_predicted_of_all() -> (
    None
):
    """`a` is fast on the two prompts of the first rung alone, as predicted; `b` is as fast
    everywhere.
    """
    paces = {"a": (0.4, 0.4, 0.9, 0.9), "b": (0.6, 0.6, 0.6, 0.6)}
    tokens = np.array([10.0] * 4)
    predicted = [
        Prediction(DecodeStats(), np.array(pace) * tokens, tokens, (0, 1, 2, 3))
        for pace in paces.values()
    ]
    assert knocked_out(paces, (2,))[0] == 0
    assert knocked_out(paces, (2,), [p.extrapolation_factor for p in predicted])[0] == 1


def test_a_prediction_that_lacks_a_prompt_corrects_nothing() -> None:
    predicted = Prediction(DecodeStats(), np.array([1.0, 3.0]), np.array([1.0, 1.0]), (0, 2))
    assert predicted.extrapolation_factor({0}) == pytest.approx(2.0)
    assert predicted.extrapolation_factor({0, 2}) == pytest.approx(1.0)
    assert predicted.extrapolation_factor({0, 1}) == 1.0
    assert predicted.extrapolation_factor(()) == 1.0


@pytest.mark.parametrize(("rungs", "seen"), [((9,), [4, 4]), ((4, 5), [4, 4]), ((1, 99), [1, 1])])
def test_rungs_end_with_the_prompts_and_with_the_last_contender(
    rungs: Sequence[int], seen: list[int]
) -> None:
    winner, found, _ = knocked_out({"a": (0.5,) * 4, "b": (0.8,) * 4}, rungs)
    assert (winner, found) == (0, seen)


@pytest.mark.parametrize(
    ("b", "seen"),
    [
        ((0.9, 0.9, 0.9, 0.9), [2, 2, 1, 1]),  # slower on both prompts
        ((0.4, 0.7, 0.7, 0.7), [4, 4, 1, 1]),
    ],
)  # faster on one of two, and it stays so
def test_the_two_fastest_go_on_while_neither_is_measurably_faster(
    monkeypatch: pytest.MonkeyPatch, b: Sequence[float], seen: list[int]
) -> None:
    monkeypatch.setattr("skipsearch.timing.interleaved.CHECK_EVERY", 1)
    paces = {"a": (0.5, 0.5, 0.5, 0.5), "b": b, "c": (1.0,) * 4, "d": (1.1,) * 4}
    _, found, log = knocked_out(paces, (1, 1), further=2)
    assert found == seen
    assert {name for name, prompt in log if prompt == 3} in (set(), {"plain", "a", "b"})


def test_prompts_that_only_the_first_rounds_had_do_not_decide_between_equals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skipsearch.timing.interleaved.CHECK_EVERY", 1)
    paces = {"a": (0.5, 0.6, 0.8, 0.8), "b": (0.6, 0.51, 0.5, 0.5)}
    assert knocked_out(paces, (2,))[0] == 0
    winner, seen, _ = knocked_out(paces, (2,), further=2)
    assert (winner, seen) == (1, [4, 4])
