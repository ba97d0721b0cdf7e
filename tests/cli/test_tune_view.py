"""The summary of `tune`, from the events of the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from time import monotonic, sleep

import pytest
from helpers.profiles import GOLDEN

import skipsearch
from skipsearch.cli.progress import BEAT_S
from skipsearch.cli.terminal import Terminal
from skipsearch.cli.train_view import TrainView
from skipsearch.cli.tune_view import TuneView
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Estimate, Trial
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.spec import Skip
from skipsearch.profile import load_profile
from skipsearch.tuning.events import (
    BaselinePredicted,
    CandidateMeasured,
    Forecast,
    LongestDecoding,
    Notice,
    StageProgress,
    StageStarted,
)

PROFILE = min(
    (Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo" / "pycode").glob("*.yaml")
)


@pytest.mark.parametrize("doubtful", [True, False])
def test_measurements_in_doubt_are_called_so_again_where_the_profile_is_written(
    doubtful: bool,
) -> None:
    told, said = StringIO(), StringIO()
    with TuneView(Terminal(file=told)) as view:
        view(Notice("the machine is what it is", doubtful))
        view(Notice("and something else, that casts no doubt on anything"))
    view.print_summary(Terminal(file=said, width=200), load_profile(PROFILE), Path("here.yaml"))
    assert "the machine is what it is" in told.getvalue()
    assert ("tune again on a quiet one before you share it" in said.getvalue()) == doubtful
    assert "written to here.yaml" in said.getvalue()


@pytest.mark.parametrize(
    ("name", "drawn", "told"),
    [
        ("speculate", True, "1.337× (1.310–1.366) as fast as plain decoding"),
        ("mixed", True, "lookup: 400 rounds, 3200 tokens drafted, 1900 accepted (59%)"),
        ("lost", True, "the best recipe measured 0.97×"),
        ("plain", False, "this profile decodes plainly"),
    ],
)
def test_the_summary_of_any_recipe(name: str, drawn: bool, told: str) -> None:
    said, profile = StringIO(), load_profile(GOLDEN / f"v3_{name}.yaml")
    with TuneView(Terminal(file=StringIO())) as view:
        view(
            CandidateMeasured(
                profile.measured_recipe, 1.3, Estimate(1.2, 1.1, 1.3), "calibration", 6
            )
        )
    view.print_summary(Terminal(file=said, width=200), profile, Path("here.yaml"))
    assert told in said.getvalue()
    assert str(profile.measured_recipe) in said.getvalue()
    assert ("attn  " in said.getvalue()) == drawn


def test_a_mask_is_told_of_where_it_is_better_than_lookup_alone() -> None:
    told = StringIO()

    def trial(*layers: int, speedup: float, alpha: float) -> Trial:
        return Trial(
            SkipMask(20, layers), 0.01 / speedup, baseline_seconds_per_token=0.01, alpha=alpha
        )

    with TuneView(Terminal(file=told)) as view:
        view(BaselinePredicted(2.46))
        view(StageProgress(1, 9, none := trial(*range(20), speedup=2.461, alpha=0.0), none))
        view(StageProgress(2, 9, good := trial(1, speedup=2.6, alpha=0.7), good))
        view(StageProgress(3, 9, hardly := trial(2, speedup=2.61, alpha=0.7), hardly))
        better = trial(1, 2, speedup=2.7, alpha=0.6)
        spec = Skip.from_mask(better.mask, 4, Fixed(), reading=Reading("int6"))
        better = replace(better, recipe=Recipe((spec,)), searcher="gp")
        view(StageProgress(4, 9, better, better))
    assert told.getvalue().splitlines() == [
        "  trial 2: best predicted so far 2.60×, α 0.70, skips 1 of 40",
        "  trial 4: best predicted so far 2.70×, α 0.60, skips 2 of 40, int6, by gp",
    ]


def wait_for(lines: Callable[[], list[str]], count: int) -> list[str]:
    ends = monotonic() + 20
    while len(lines()) < count and monotonic() < ends:
        sleep(0.01)
    return lines()


@pytest.mark.parametrize("shown_by", [TuneView, TrainView])
def test_a_pipe_is_told_how_far_it_is_whenever_nothing_else_was_said_for_a_while(
    shown_by: type[TuneView | TrainView],
) -> None:
    told = StringIO()
    with shown_by(Terminal(file=told), beat_s=0.02) as view:
        view(StageStarted("writing reference text: the model continues calibration prompts"))
        view(StageProgress(30, 120))
        lines = wait_for(lambda: told.getvalue().splitlines(), 4)
    assert lines[0] == "writing reference text: the model continues calibration prompts"
    assert lines[1].startswith("  writing reference text: 25 %")
    assert len(lines) >= 4, "and again"
    with shown_by(Terminal(file=(search := StringIO())), beat_s=0.02) as view:
        view(StageStarted("searching masks with auto (α: chance that a draft is accepted)"))
        view(StageProgress(30, 120))
        lines = wait_for(lambda: search.getvalue().splitlines(), 2)
    assert lines[1].startswith("  searching masks with auto: 25 %")
    after = told.getvalue()
    sleep(0.1)
    assert told.getvalue() == after, "nothing is said after the end"


def test_lines_that_come_anyway_are_enough() -> None:
    told = StringIO()
    with TuneView(Terminal(file=told), beat_s=30) as view:
        view(StageStarted("writing reference text"))
        view(Notice("something"))
        assert view.heartbeat._latest == pytest.approx(monotonic(), abs=5)
    assert told.getvalue().splitlines() == ["writing reference text", "something"]
    assert BEAT_S <= 30


def test_a_terminal_has_its_bar_and_no_such_lines() -> None:
    told = StringIO()
    with TuneView(Terminal(file=told, force_terminal=True, width=80), beat_s=0.01) as view:
        view(StageStarted("writing reference text"))
        sleep(0.1)
        assert not view.heartbeat._thread.is_alive()


@pytest.mark.parametrize(
    ("search_s", "refine_s", "said"),
    [
        (
            120.0,
            60.0,
            "about 8 min in all: 3 min for preparation, 2 min for judging masks, about 60 s for "
            "trying the best masks with every setting, about 2 min for race and final measurement",
        ),
        (
            0.0,
            0.0,
            "about 5 min in all: 3 min for preparation, about 2 min for race and final measurement",
        ),
        (
            None,
            60.0,
            "preparation took 3 min; what follows: the time for judging masks, about 60 s for "
            "trying the best masks with every setting, about 2 min for race and final measurement",
        ),
    ],
)
def test_the_time_that_is_announced_has_the_preparation_in_it(
    search_s: float | None, refine_s: float, said: str
) -> None:
    output = StringIO()
    with TuneView(Terminal(file=output, width=300)) as view:
        view(Forecast(180.0, search_s, refine_s, 120.0))
    assert output.getvalue().splitlines() == [said]


def test_a_run_starts_with_how_long_its_decoding_may_take() -> None:
    output = StringIO()
    with TuneView(Terminal(file=output, width=200)) as view:
        view(LongestDecoding(token_s=0.1, prefill_s=1.2, n_prompt=60, n_texts=230, n_tokens=128))
    assert output.getvalue().splitlines() == [
        "a token takes 100 ms: race and final measurement take at most about 54 min (230 texts of "
        "up to 128 tokens), after the preparation and the search"
    ]


@pytest.mark.parametrize("doubtful", [True, False])
def test_predictions_of_an_unreliable_table_say_so(doubtful: bool) -> None:
    said, profile = StringIO(), load_profile(GOLDEN / "v3_speculate.yaml")
    with TuneView(Terminal(file=StringIO())) as view:
        view(Notice("the machine is what it is", doubtful))
        view(
            CandidateMeasured(
                profile.measured_recipe, 1.3, Estimate(1.2, 1.1, 1.3), "calibration", 6
            )
        )
    view.print_summary(Terminal(file=said, width=200), profile, Path("here.yaml"))
    assert ("predictions are unreliable" in said.getvalue()) == doubtful
    assert "1.30×" in said.getvalue()


def test_one_measurement_has_one_interval() -> None:
    said, profile = StringIO(), load_profile(GOLDEN / "v3_speculate.yaml")
    with TuneView(Terminal(file=StringIO())) as view:
        view(
            CandidateMeasured(
                profile.measured_recipe, 1.3, Estimate(1.2, 1.1, 1.3), "calibration", 6
            )
        )
        view(
            CandidateMeasured(
                profile.measured_recipe, None, Estimate(1.3372, 1.3101, 1.3664), "holdout", 32
            )
        )
    view.print_summary(Terminal(file=said, width=200), profile, Path("here.yaml"))
    assert said.getvalue().count("1.310–1.36") == 1


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("speculate", "next: skipsearch decode --profile here.yaml --prompt '…' --check"),
        ("lost", "what may help: more prompts, a quiet machine, or a trained draft"),
    ],
)
def test_the_last_line_says_what_to_do_next(name: str, next_step: str) -> None:
    said = StringIO()
    TuneView(Terminal(file=StringIO())).print_summary(
        Terminal(file=said, width=200), load_profile(GOLDEN / f"v3_{name}.yaml"), Path("here.yaml")
    )
    assert next_step in said.getvalue().splitlines()[-1]


def test_a_race_of_many_shows_the_chosen_one_and_those_that_came_closest() -> None:
    said, profile = StringIO(), load_profile(GOLDEN / "v3_speculate.yaml")
    with TuneView(Terminal(file=StringIO())) as view:
        for prompts, speedup, recipe in [
            (6, 1.3, "unmeasured"),
            (6, 1.1, "streamed"),
            (6, 1.2, "speculate"),
            (2, 1.5, "mixed"),
        ]:
            view(
                CandidateMeasured(
                    load_profile(GOLDEN / f"v3_{recipe}.yaml").measured_recipe,
                    1.3,
                    Estimate(speedup, 1.0, 1.9),
                    "calibration",
                    prompts,
                )
            )
    view.print_summary(Terminal(file=said, width=200), profile, Path("here.yaml"))
    rows = [line for line in said.getvalue().splitlines() if "(1.00–1.90)" in line]
    assert rows[0].startswith("→")
    assert [row.split("(1.00")[0].split()[-1] for row in rows] == ["1.20×", "1.30×"]
    assert "→ chosen; 2 more raced, which `skipsearch report` shows" in said.getvalue()
