"""The race: who drops out and when, who wins, and who decodes what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Generation
from skipsearch.errors import SearchError
from skipsearch.replay.simulate import Prediction
from skipsearch.timing.elimination import (
    MIN_COMPARED_PROMPTS,
    PLAIN_PROMPTS,
    WORTHWHILE_GAIN,
    race_decoders,
)
from skipsearch.timing.interleaved import PairedTimings

N_PROMPTS = 40


@dataclass(frozen=True)
class Paced:
    """A decoder that takes so many seconds on each prompt."""

    name: str
    seconds: Sequence[float]
    is_learning: bool = False


@dataclass(frozen=True)
class Answers:
    """A workload of answers with ten tokens in rounds each; those of `empty` prompts have none."""

    empty: Collection[int] = ()
    n_prompts: int = N_PROMPTS
    log: list[tuple[str, int]] = field(default_factory=list)  # who met which prompt

    @property
    def prompt_ids(self) -> range:
        return range(self.n_prompts)

    def generate(
        self, decoder: Paced, prompt: int, seed: int, max_tokens: int | None = None, **_: Any
    ) -> Generation:
        if max_tokens is None:
            self.log.append((decoder.name, prompt))
        n_tokens = 0 if prompt in self.empty else 10
        stats = DecodeStats(round_tokens=n_tokens, decode_seconds=decoder.seconds[prompt])
        return Generation([], "length", stats)

    def met_by(self, name: str) -> list[int]:
        return [prompt for met, prompt in self.log if met == name]


def race(
    paces: dict[str, Sequence[float]],
    rungs: Sequence[int] = (N_PROMPTS,),
    answers: Answers | None = None,
    corrections: Sequence[Callable[[Collection[int]], float]] = (),
    limit_s: float | None = None,
    complexities: Sequence[int] = (),
) -> tuple[str, Answers, dict[str, PairedTimings]]:
    """(the winner, who met whom, timings). Plain decoding takes a second a prompt."""
    answers = answers or Answers()
    racing = [Paced(name, seconds) for name, seconds in paces.items()]
    winner, _, pairs = race_decoders(
        Paced("plain", [1.0] * N_PROMPTS),  # type: ignore[arg-type]
        racing,  # type: ignore[arg-type]
        answers,  # type: ignore[arg-type]
        rungs,
        corrections=corrections,
        limit_s=limit_s,
        complexities=complexities,
    )
    return racing[winner].name, answers, dict(zip(paces, pairs, strict=True))


def steady(seconds: float) -> list[float]:
    return [seconds] * N_PROMPTS


def uneven(seconds: float, spread: float = 0.2) -> list[float]:
    """Times that differ from prompt to prompt and have the mean `seconds` over every four."""
    return [seconds * (1 + spread * sign) for sign in (1, -1, -1, 1)] * (N_PROMPTS // 4)


def test_what_is_certainly_slower_drops_out_as_soon_as_anything_is_certain() -> None:
    winner, answers, _ = race({"a": steady(0.9), "b": steady(0.5), "c": steady(0.7)})
    assert winner == "b"
    for name in "ac":
        assert answers.met_by(name) == list(range(MIN_COMPARED_PROMPTS))
    assert answers.met_by("b") == list(range(PLAIN_PROMPTS)), "as many as its speedup needs"


def test_what_cannot_be_told_apart_goes_on_and_the_others_do_not_wait_for_it() -> None:
    _, answers, _ = race({"a": uneven(0.5), "b": steady(0.5), "c": steady(2.0)})
    assert len(answers.met_by("c")) < len(answers.met_by("a")) == len(answers.met_by("b"))


def test_a_gain_that_is_not_worth_more_prompts_ends_the_race() -> None:
    small = 1 + (WORTHWHILE_GAIN - 1) / 2
    winner, answers, _ = race({"a": steady(0.5 * small), "b": steady(0.5)})
    assert winner == "b"
    assert len(answers.met_by("a")) == MIN_COMPARED_PROMPTS


@pytest.mark.parametrize(
    ("complexities", "winner"), [((), "b"), ((0, 1), "a"), ((1, 1), "b"), ((1, 0), "b")]
)
def test_of_two_that_cannot_be_told_apart_the_simpler_wins(
    complexities: Sequence[int], winner: str
) -> None:
    """`a` takes 1 % more, and its times differ by 20 % from prompt to prompt."""
    assert race({"a": uneven(0.505), "b": steady(0.5)}, complexities=complexities)[0] == winner


def test_what_is_simpler_and_slower_does_not_win() -> None:
    winner, *_ = race({"a": uneven(0.6, 0.01), "b": steady(0.5)}, complexities=(0, 1))
    assert winner == "b"
    few = Answers(n_prompts=MIN_COMPARED_PROMPTS - 1)
    winner, *_ = race({"a": uneven(0.505), "b": steady(0.5)}, answers=few, complexities=(0, 1))
    assert winner == "b", "so few prompts tell nothing of an error"


def test_once_the_time_is_over_the_fastest_so_far_wins() -> None:
    winner, answers, pairs = race({"a": uneven(0.6), "b": uneven(0.5)}, limit_s=0.0)
    assert winner == "b"
    assert answers.met_by("a") == answers.met_by("b") == [0]
    assert pairs["b"].plain.n_prompts == 1
    _, answers, _ = race({"a": uneven(0.5), "b": steady(0.5)}, limit_s=60.0)
    assert len(answers.met_by("a")) > 1


def test_the_rungs_end_a_race_in_which_nothing_is_certain() -> None:
    paces = {name: uneven(0.5 + 0.01 * i, -0.9 + 0.3 * i) for i, name in enumerate("abcdef")}
    winner, answers, _ = race(paces, rungs=(4, 4, 8))
    assert winner in "abcdef"
    n_met = sorted(len(answers.met_by(name)) for name in paces)
    assert n_met[-2:] == [16, 16], "two race to the end"
    assert n_met[:3] == [4, 4, 4], "the slower half leaves after the first rung"
    assert n_met[3] == 8


def test_plain_decoding_takes_part_at_the_beginning_alone() -> None:
    _, answers, pairs = race({"a": uneven(0.5), "b": steady(0.5)}, rungs=(20,))
    assert answers.met_by("plain") == list(range(PLAIN_PROMPTS))
    assert len(answers.met_by("a")) > PLAIN_PROMPTS
    for pair in pairs.values():
        assert pair.plain.n_prompts == pair.drafted.n_prompts == PLAIN_PROMPTS


def test_each_prompt_is_decoded_once_by_everybody_who_races_and_nobody_always_goes_first() -> None:
    _, answers, _ = race({"a": uneven(0.5), "b": steady(0.5)}, rungs=(4,))
    turns = [[name for name, prompt in answers.log if prompt == p] for p in range(4)]
    assert all(sorted(turn) == ["a", "b", "plain"] for turn in turns)
    assert [turn[0] for turn in turns] == ["a", "b", "plain", "a"]


def test_a_single_candidate_is_measured_on_a_few_prompts() -> None:
    winner, answers, pairs = race({"a": steady(0.5)})
    assert winner == "a"
    assert len(answers.met_by("a")) == PLAIN_PROMPTS
    assert pairs["a"].speedup.mean == pytest.approx(2)


def test_a_race_ends_with_the_prompts() -> None:
    _, answers, _ = race({"a": uneven(0.5), "b": steady(0.5)}, answers=Answers(n_prompts=2))
    assert answers.met_by("a") == [0, 1]


def test_what_the_first_prompts_suit_is_corrected_by_what_was_predicted_of_all() -> None:
    """`a` is fast on the first prompts alone, as predicted; `b` is as fast everywhere."""
    paces = {"a": [0.4] * 6 + [0.9] * 34, "b": steady(0.6)}
    tokens = np.array([10.0] * N_PROMPTS)
    predicted = [
        Prediction(DecodeStats(), np.array(pace) * tokens, tokens, tuple(range(N_PROMPTS)))
        for pace in paces.values()
    ]
    assert race(paces)[0] == "a"
    winner, answers, _ = race(paces, corrections=[p.extrapolation_factor for p in predicted])
    assert winner == "b"
    assert len(answers.met_by("a")) == MIN_COMPARED_PROMPTS


def test_differences_that_were_predicted_do_not_make_a_race_uncertain() -> None:
    paces = {"a": uneven(0.5), "b": steady(0.6)}
    tokens = np.array([10.0] * N_PROMPTS)
    predicted = [
        Prediction(DecodeStats(), np.array(pace) * tokens, tokens, tuple(range(N_PROMPTS)))
        for pace in paces.values()
    ]
    _, uncorrected, _ = race(paces)
    _, corrected, _ = race(paces, corrections=[p.extrapolation_factor for p in predicted])
    assert len(corrected.met_by("b")) == MIN_COMPARED_PROMPTS < len(uncorrected.met_by("b"))


def test_predictions_that_vary_more_than_the_answers_are_left_out() -> None:
    paces = {"a": steady(0.5), "b": steady(0.6)}
    tokens = np.array([10.0] * N_PROMPTS)
    predicted = [
        Prediction(DecodeStats(), np.array(pace) * tokens, tokens, tuple(range(N_PROMPTS)))
        for pace in (uneven(0.5), uneven(0.6, -0.3))
    ]
    winner, answers, _ = race(paces, corrections=[p.extrapolation_factor for p in predicted])
    assert winner == "a"
    assert len(answers.met_by("b")) == MIN_COMPARED_PROMPTS


def test_a_prediction_that_lacks_a_prompt_corrects_nothing() -> None:
    predicted = Prediction(DecodeStats(), np.array([1.0, 3.0]), np.array([1.0, 1.0]), (0, 2))
    assert predicted.extrapolation_factor({0}) == pytest.approx(2.0)
    assert predicted.extrapolation_factor({0, 2}) == pytest.approx(1.0)
    assert predicted.extrapolation_factor({0, 1}) == 1.0
    assert predicted.extrapolation_factor(()) == 1.0


@pytest.mark.parametrize("empty", [(0, 1), (2, 3)])
def test_a_prompt_whose_answers_end_at_once_decides_nothing(empty: tuple[int, ...]) -> None:
    _, answers, pairs = race(
        {"a": steady(0.5), "b": steady(0.9)}, answers=Answers(empty=empty), rungs=(8,)
    )
    n_met = MIN_COMPARED_PROMPTS + sum(p < MIN_COMPARED_PROMPTS + len(empty) for p in empty)
    seen = {s.prompt_index for s in pairs["b"].drafted.samples}
    assert seen.isdisjoint(empty)
    assert len(seen) == MIN_COMPARED_PROMPTS
    assert len(answers.met_by("b")) <= n_met


def test_a_race_without_any_round_is_one_sentence() -> None:
    with pytest.raises(SearchError, match="with its first token"):
        race({"a": steady(0.5)}, answers=Answers(empty=range(N_PROMPTS)))
