"""The driver, end to end on a tiny model: what it judges, keeps, resumes, tells, and never looks at
too early.
"""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.full_disk import limit_file_size
from helpers.gguf_files import write_model
from helpers.marks import thorough
from helpers.modules import SMALL_MASK, make_card, noisy_copies
from helpers.threads import one_thread
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial, TrialState
from skipsearch.decoding import Decoder
from skipsearch.drafters.trained.module_weights import save_module
from skipsearch.engine.sampler import GREEDY
from skipsearch.errors import DecodeError, ModelError, ModuleError, SearchError
from skipsearch.models import ModelAdapter
from skipsearch.profile import Profile, dump_profile, parse_profile
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.simulate import simulate
from skipsearch.replay.sweep import coarse_policies
from skipsearch.replay.workload import make_workload
from skipsearch.searchers import SearchProblem
from skipsearch.tasks import Prompt, TaskSampling
from skipsearch.timing.latency import LatencyEntry
from skipsearch.timing.latency_table import LatencyTable
from skipsearch.tuning import calibration, driver, race
from skipsearch.tuning.driver import study_fingerprint, tune
from skipsearch.tuning.events import (
    CandidateMeasured,
    Forecast,
    LongestDecoding,
    Notice,
    StageProgress,
    StageStarted,
    TuneEvent,
)
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.race import MAX_FINALISTS
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.settings import parse_duration
from skipsearch.tuning.study import StudyStore
from skipsearch.tuning.wall_objective import WallObjective
from tuning.small_search import COSTS, made_up_times, small_model, small_task

__all__ = ["one_thread"]

SEEDED = {"middle": 3, "uniform": 3, "sensitivity": 5}


@pytest.fixture(autouse=True)
def _no_clock_in_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that do not depend on the moment make a search repeatable."""
    monkeypatch.setattr(calibration, "measure_task_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr("skipsearch.tuning.search_loop.INITIAL_DESIGN", SEEDED)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[SkipMask]:
    """Every mask that is judged by replay, in order."""
    masks: list[SkipMask] = []
    judge = ReplayObjective.judge

    def noting(self: ReplayObjective, mask: SkipMask, others: Any = ()) -> Any:
        masks.append(mask)
        return judge(self, mask, others)

    monkeypatch.setattr(ReplayObjective, "judge", noting)
    return masks


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real race and no real confirmation."""
    made_up_times(monkeypatch, lambda _: 0.5)


def searched(**options: Any) -> Profile:
    return tune(
        small_model(fuse="draft_models" not in options),
        options.pop("task", small_task()),
        **{"trials": 5, "drafters": "skip", **options},
    )


def interrupt_after(n: int) -> Callable[[TuneEvent], None]:
    heard: list[Trial] = []

    def listen(event: TuneEvent) -> None:
        if isinstance(event, StageProgress) and event.judged:
            heard.append(event.judged)
            if len(heard) == n:
                raise KeyboardInterrupt

    return listen


def kept(journal: Path, objective: str = "replay", **options: Any) -> list[Trial]:
    arguments = {"whole_layers": False, "drafters": "skip", **options}
    return StudyStore(
        journal, study_fingerprint(small_model(), small_task(), objective, **arguments), resume=True
    ).trials()


# --- end to end


@pytest.mark.parametrize("objective", ["replay", *thorough("wall")])
def test_a_search_ends_in_a_profile_that_can_be_written_read_and_decoded_with(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real latency table, and all of the clock
    profile = searched(objective=objective, trials=3)
    assert parse_profile(dump_profile(profile).encode(), "a profile") == profile
    assert profile.verdict in ("speculate", "plain")
    assert profile.mask.n_skipped > 0
    assert (profile.provenance.trials, profile.provenance.objective, profile.task.name) == (
        3,
        objective,
        "words",
    )
    assert profile.measured is not None
    assert (
        profile.measured.lossless.identical
        == profile.measured.lossless.prompts
        == profile.measured.prompts
        == 3
    )
    model = small_model()
    assert (
        Decoder(model, profile).generate([1, 2, 3], 12).tokens
        == Decoder(model).generate([1, 2, 3], 12).tokens
    )


def modules_of(model: ModelAdapter, folder: Path, noise: float = 0.0) -> Path:
    save_module(
        folder / "good.safetensors",
        make_card(model, SMALL_MASK),
        noisy_copies(model, SMALL_MASK, noise),
    )
    other = make_card(model, SMALL_MASK)
    save_module(
        folder / "zoo.safetensors",
        other.model_copy(
            update={"base": other.base.model_copy(update={"weights_sha256": "aa" * 32})}
        ),
        noisy_copies(model, SMALL_MASK, noise),
    )
    return folder


def test_modules_are_weighed_alone_and_behind_lookup_and_those_of_other_models_are_left_out(
    tmp_path: Path,
) -> None:
    told = list[TuneEvent]()
    profile = searched(
        drafters="auto", trials=3, modules=modules_of(small_model(), tmp_path), on_event=told.append
    )
    raced = {event.recipe.shape for event in told if isinstance(event, CandidateMeasured)}
    assert raced >= {"skip", "adapted", "lookup,adapted"}
    [noted] = [
        event.sentence
        for event in told
        if isinstance(event, Notice) and "left out" in event.sentence
    ]
    assert "zoo.safetensors: this module was trained for tiny, which has other weights" in noted
    assert profile.measured is not None
    assert profile.measured.lossless.identical == profile.measured.prompts


@pytest.fixture
def small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model that may draft: the tiny model in fewer bits."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    write_model(tiny_llama(), tmp_path / "small.gguf", "Q4_0")
    return tmp_path / "small.gguf"


def test_a_draft_model_is_weighed_alone_and_behind_lookup_with_a_mask_and_without(
    small_file: Path, judged: list[SkipMask]
) -> None:
    told = list[TuneEvent]()
    profile = searched(
        drafters="auto", trials=3, draft_models=[str(small_file)], on_event=told.append
    )
    raced = [event.recipe for event in told if isinstance(event, CandidateMeasured)]
    assert {"draft-model", "lookup,draft-model"} & {recipe.shape for recipe in raced}
    assert len(judged) == 3 + 3, "of the model, and of the draft model"
    assert profile.measured is not None
    assert profile.measured.lossless.identical == profile.measured.prompts


@pytest.mark.parametrize("drafters", ["draft-model", "lookup,draft-model"])
def test_a_choice_of_drafters_may_be_the_draft_model_alone(drafters: str, small_file: Path) -> None:
    profile = searched(drafters=drafters, trials=2, draft_models=[str(small_file)])
    recipe = profile.measured_recipe
    assert recipe.shape == drafters
    [ref] = recipe.draft_models
    assert (ref.id, ref.n_layers, ref.quantization) == (
        "small.gguf",
        LAYERS,
        "gguf-q4_0-float-activations",
    )
    assert profile.measured is not None
    assert profile.measured.draft_bytes >= ref.weight_bytes
    assert parse_profile(dump_profile(profile).encode(), "a profile") == profile
    model = small_model(fuse=False)
    gc.collect()  # the draft model is loaded again, from where the search recorded it
    tokens = Decoder(model, recipe).generate([1, 2, 3], 12).tokens
    assert tokens == Decoder(model).generate([1, 2, 3], 12).tokens


def test_draft_models_that_are_not_named_or_have_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="name one or several with --draft-models"):
        searched(drafters="draft-model")
    write_model(tiny_llama(vocab=96), tmp_path / "other.gguf", "F32")
    with pytest.raises(ModelError, match="other cannot draft for tiny"):
        searched(draft_models=[str(tmp_path / "other.gguf")])
    with pytest.raises(ModelError, match="no folder"):
        searched(draft_models=["./nowhere"])


def test_a_choice_of_drafters_may_be_the_module_alone(tmp_path: Path) -> None:
    model = small_model()
    profile = searched(
        drafters="lookup,adapted",
        modules=modules_of(model, tmp_path),
        study=tmp_path / "its.journal",
    )
    assert [drafter.kind for drafter in profile.measured_recipe.drafters] == ["lookup", "adapted"]
    assert profile.provenance.trials == 0
    tokens = (
        Decoder(model, profile.measured_recipe, module_folders=[tmp_path])
        .generate([1, 2, 3], 12)
        .tokens
    )
    assert tokens == Decoder(model).generate([1, 2, 3], 12).tokens


@pytest.mark.parametrize("drafters", ["asd", *thorough("lookup,clasp", "swift")])
def test_drafters_that_choose_their_masks_are_tuned_and_say_what_that_takes(drafters: str) -> None:
    told = list[TuneEvent]()
    profile = searched(drafters=drafters, on_event=told.append)
    raced = [event for event in told if isinstance(event, CandidateMeasured)]
    assert {event.recipe.shape for event in raced} == {drafters}
    assert len({event.recipe for event in raced if event.split == "calibration"}) > 2
    assert [drafter.kind for drafter in profile.measured_recipe.drafters] == drafters.split(",")
    assert parse_profile(dump_profile(profile).encode(), "a profile") == profile
    found = profile.measured
    assert found is not None
    assert found.choosing_share
    assert found.lossless.identical == found.prompts
    # of a drafter that learns from one prompt for the next, unless the race's winner names so many
    # tokens that its search ends at once
    assert found.stream is None or drafters == "swift"
    if found.stream is not None:
        assert found.stream.learning
        assert 0 < found.stream.learning.prompts <= found.prompts == 3
    model = small_model()
    assert (
        Decoder(model, profile.measured_recipe).generate([1, 2, 3], 12).tokens
        == Decoder(model).generate([1, 2, 3], 12).tokens
    )


def test_recipes_with_modules_are_judged_on_prompts_that_no_training_reads(tmp_path: Path) -> None:
    words = tuple(Prompt(f"word/{i}", f"{i:03d} words") for i in range(30))
    told = list[TuneEvent]()
    task = replace(small_task(), calibration=words)
    modules = modules_of(small_model(), tmp_path)
    searched(task=task, drafters="auto", trials=1, modules=modules, on_event=told.append)
    notices = [event.sentence for event in told if isinstance(event, Notice)]
    assert any("judged on 10 of 30 calibration prompts" in text for text in notices)


def test_modules_that_are_not_there_or_fit_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="skipsearch train adapted"):
        searched(drafters="adapted")
    with pytest.raises(ModuleError, match="holds no module"):
        searched(drafters="auto", modules=tmp_path)
    (modules_of(small_model(), tmp_path) / "good.safetensors").unlink()
    with pytest.raises(ModuleError, match="trained for tiny, which has other weights"):
        searched(drafters="auto", modules=tmp_path)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "searcher", ["middle", "gp", *thorough("auto", "random", "uniform", "sensitivity")]
)
def test_every_searcher_finds_its_masks_without_measuring_one_twice(
    searcher: str, judged: list[SkipMask]
) -> None:
    trials = 10 if searcher in ("middle", "uniform", "sensitivity") else 14
    profile = searched(searcher=searcher, trials=trials)
    assert len(judged) == len(set(judged)) == profile.provenance.trials == trials
    assert SkipMask(LAYERS) not in judged
    assert profile.provenance.searcher == searcher
    assert profile.mask in judged


@pytest.mark.usefixtures("fast")
def test_a_searcher_that_runs_out_of_ideas_ends_the_search(judged: list[SkipMask]) -> None:
    assert searched(searcher="middle", trials=1000).provenance.trials == len(judged) == 2 * LAYERS


@pytest.mark.usefixtures("fast")
def test_a_search_is_seeded_by_searchers_that_need_no_experience(judged: list[SkipMask]) -> None:
    alone: dict[str, list[SkipMask]] = {}
    for name, count in SEEDED.items():
        searched(searcher=name, trials=count)
        alone[name] = judged.copy()
        judged.clear()
    in_turns = [mask for turn in zip_longest(*alone.values()) for mask in turn if mask]
    searched(searcher="random", trials=1 + len(set(in_turns)))
    assert judged[:-1] == list(dict.fromkeys(in_turns))


@pytest.mark.thorough
@pytest.mark.usefixtures("fast")
def test_the_same_search_finds_the_same(judged: list[SkipMask]) -> None:
    first, second = (
        searched(searcher="random", trials=14, seed=4),
        searched(searcher="random", trials=14, seed=4),
    )
    assert judged[:14] == judged[14:]
    assert first.measured_recipe == second.measured_recipe
    searched(searcher="random", trials=14, seed=5)
    assert judged[28:] != judged[:14]


@pytest.mark.usefixtures("fast")
def test_whole_layers_are_skipped_whole(judged: list[SkipMask]) -> None:
    profile = searched(searcher="random", trials=8, whole_layers=True)
    assert all(mask.attn == mask.mlp for mask in judged)
    assert profile.mask.attn == profile.mask.mlp


def test_a_budget_is_that_of_all_stages() -> None:
    events: list[TuneEvent] = []
    profile = searched(budget="0.01s", trials=None, on_event=events.append)
    assert not any(isinstance(event, LongestDecoding) for event in events)
    (forecast,) = (event for event in events if isinstance(event, Forecast))
    assert forecast.search_s == pytest.approx(0.001), "a tenth for a stage that begins late"
    assert forecast.decode_s <= 0.005
    notices = [event.sentence for event in events if isinstance(event, Notice)]
    assert any("too short for a race" in sentence for sentence in notices)
    (confirmed,) = (event for event in events if isinstance(event, CandidateMeasured))
    assert confirmed.split == "holdout"
    assert profile.measured is not None
    assert profile.measured.prompts == 3, "there are no more"


@pytest.mark.parametrize(("limit_s", "n"), [(1e-9, 1), (37.0, 1), (38.0, 2), (1e9, 4)])
def test_as_many_recipes_race_as_there_is_time_for(limit_s: float, n: int) -> None:
    candidates = [made_up_candidate(seconds) for seconds in (0.5, 0.6, 0.4, 0.8)]
    events: list[TuneEvent] = []
    kept, n_plain = race.limit_racers(candidates, limit_s, text_s=5.0, on_event=events.append)
    assert [candidate.seconds_per_token for candidate in kept] == [0.4, 0.5, 0.6, 0.8][:n]
    assert n_plain == (8 if n == 4 else 3), "plain decoding needs few prompts of a race"
    assert len(events) == (n < 4)


def test_the_best_recipe_that_runs_fewer_models_has_a_place_in_a_short_race() -> None:
    candidates = [
        made_up_candidate(0.4, "skip"),
        made_up_candidate(0.41, "skip"),
        made_up_candidate(0.45, "lookup"),
    ]
    kept, _ = race.limit_racers(candidates, 38.0, text_s=5.0, on_event=lambda _: None)
    assert [candidate.seconds_per_token for candidate in kept] == [0.4, 0.45]


def test_without_a_race_the_simplest_of_nearly_equal_predictions_is_chosen() -> None:
    candidates = [
        made_up_candidate(0.4, "skip"),
        made_up_candidate(0.41, "lookup"),
        made_up_candidate(0.42, "lookup"),
    ]
    kept, _ = race.limit_racers(candidates, 1e-9, text_s=5.0, on_event=lambda _: None)
    assert [candidate.seconds_per_token for candidate in kept] == [0.41]


def made_up_candidate(seconds: float, kind: str = "skip") -> Any:
    return SimpleNamespace(
        seconds_per_token=seconds,
        predicted_speedup=1 / seconds,
        recipe=SimpleNamespace(drafters=[SimpleNamespace(kind=kind)]),
    )


@pytest.mark.usefixtures("fast")
def test_the_first_mask_is_judged_however_short_the_budget(judged: list[SkipMask]) -> None:
    assert (
        searched(searcher="gp", budget="0.000001s", trials=None).provenance.trials
        == len(judged)
        == 1
    )


def test_a_task_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_times(monkeypatch, lambda _: 0.5)
    monkeypatch.setattr(driver, "load_task", lambda name: small_task(name=name))
    assert tune(small_model(), "sums", trials=1).task.name == "sums"


# --- verdict


@pytest.fixture(autouse=True)
def everyone_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all finalists race: the predictions of these small models lie far apart."""
    monkeypatch.setattr(race, "HOPELESS_RATIO", math.inf)


@pytest.mark.parametrize(
    ("drafting_takes", "verdict"), [(0.5, "speculate"), (1.0, "plain"), (2.0, "plain")]
)
def test_drafting_is_only_advised_where_it_beat_plain_decoding_on_hold_out_prompts(
    drafting_takes: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_times(monkeypatch, lambda _: drafting_takes)
    profile = searched()
    assert profile.measured is not None
    assert profile.measured.speedup.mean == pytest.approx(1 / drafting_takes)
    assert profile.verdict == verdict
    assert parse_profile(dump_profile(profile).encode(), "a profile") == profile


def test_the_winner_is_who_was_fastest_in_the_race_and_not_who_was_predicted_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[Recipe] = []

    def later_is_faster(recipe: Recipe) -> float:
        decoded.append(recipe)
        return 0.9 - 0.1 * list(dict.fromkeys(decoded)).index(recipe)

    made_up_times(monkeypatch, later_is_faster)
    profile = searched(trials=8)
    raced = list(dict.fromkeys(decoded))
    assert len(raced) == MAX_FINALISTS
    assert set(decoded[-3:]) == {raced[-1]}, "only the winner is measured on hold-out prompts"
    assert profile.measured_recipe == raced[-1]


# --- hold-out


def test_hold_out_prompts_are_used_once_the_winner_is_known_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, task = small_model(), small_task()
    used: list[tuple[int, ...]] = []
    before: list[list[tuple[int, ...]]] = []
    stream = Decoder.stream

    def noting(self: Decoder, input_ids: Any, *arguments: Any, **request: Any) -> Any:
        used.append(tuple(input_ids))
        return stream(self, input_ids, *arguments, **request)

    def listen(event: TuneEvent) -> None:
        if isinstance(event, StageStarted) and "hold-out" in event.title:
            before.append(used.copy())

    monkeypatch.setattr(Decoder, "stream", noting)
    tune(model, task, trials=2, objective="wall", on_event=listen)
    held = {tuple(model.tokenizer(p.text)["input_ids"]) for p in task.holdout}
    (seen,) = before
    assert seen
    assert not held & set(seen)
    assert set(used[len(seen) :]) == held, "and nothing else is measured then"


# --- resume


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("searcher", ["random", *thorough("gp", "auto")])
def test_an_interrupted_search_keeps_every_finished_trial_and_goes_on_where_it_was(
    searcher: str, judged: list[SkipMask], tmp_path: Path
) -> None:
    searched(searcher=searcher, trials=14)
    uninterrupted = judged.copy()
    judged.clear()

    journal = tmp_path / "search.journal"
    with pytest.raises(KeyboardInterrupt):
        searched(searcher=searcher, trials=14, study=journal, on_event=interrupt_after(12))
    assert [t.mask for t in kept(journal)] == judged == uninterrupted[:12]
    profile = searched(searcher=searcher, trials=14, study=journal, resume=True)
    assert judged == uninterrupted
    assert [t.mask for t in kept(journal)] == uninterrupted
    assert profile.provenance.trials == 14


@pytest.mark.usefixtures("fast")
def test_resuming_a_finished_search_judges_nothing_and_gives_the_same_answer(
    judged: list[SkipMask], tmp_path: Path
) -> None:
    first = searched(study=tmp_path / "search.journal")
    judged.clear()
    again = searched(study=tmp_path / "search.journal", resume=True)
    assert judged == []
    assert (again.measured_recipe, again.provenance.trials) == (first.measured_recipe, 5)


@pytest.mark.usefixtures("fast")
def test_a_study_of_another_search_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "search.journal"
    searched(study=journal)
    monkeypatch.setattr(calibration, "build_replay_objective", unreachable)
    with pytest.raises(SearchError, match="already holds a search"):
        searched(study=journal)
    with pytest.raises(SearchError, match="objective = replay"):
        searched(study=journal, resume=True, objective="wall")
    with pytest.raises(SearchError, match="whole_layers = False"):
        searched(study=journal, resume=True, whole_layers=True)
    with pytest.raises(SearchError, match="holds no search yet"):
        searched(study=tmp_path / "other.journal", resume=True)


@pytest.mark.usefixtures("fast")
def test_a_study_in_a_data_base_is_joined_and_its_masks_are_not_judged_again(
    judged: list[SkipMask], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'search.db'}"
    first = searched(study=url)
    judged.clear()
    again = searched(study=url, trials=7)
    assert len(judged) == 2, "trials counts the masks of the whole study"
    assert (first.provenance.trials, again.provenance.trials) == (5, 7)
    with pytest.raises(SearchError, match="objective = replay"):
        searched(study=url, objective="wall")


@pytest.mark.usefixtures("fast")
def test_without_a_study_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    searched()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from replay.fabricated import drafting, plain
from tuning.small_search import COSTS, small_model, small_task
from skipsearch.tuning import calibration, driver
from skipsearch.tuning import wall_objective

races = []

def deadly(*arguments, race=wall_objective.time_interleaved, **options):
    races.append(None)
    if len(races) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return race(*arguments, **options)

calibration.measure_task_costs = lambda *_, **__: COSTS
wall_objective.time_interleaved = deadly
driver.tune(
    small_model(), small_task(), searcher="random", trials=4, objective="wall",
    study=sys.argv[1], drafters="skip",
)
"""


@pytest.mark.thorough
def test_a_search_killed_in_the_middle_of_a_wall_measurement_loses_that_one_and_no_finished_trial(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "search.journal"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)])
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(journal)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    *finished, killed = kept(journal, "wall")
    assert [t.state for t in finished] == [TrialState.COMPLETE] * 2
    assert killed.state is TrialState.FAILED
    profile = searched(searcher="random", trials=4, objective="wall", study=journal, resume=True)
    after = kept(journal, "wall")
    assert after[:3] == [*finished, killed]
    complete = [t.mask for t in after if t.state is TrialState.COMPLETE]
    assert len(complete) == len(set(complete)) == profile.provenance.trials == 4
    assert killed.mask in complete, "its mask is asked for again"


KILLED_WRITING = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from tuning.small_search import COSTS, small_model, small_task
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import get_lock_file
from skipsearch.tuning import calibration, driver

append, lines = JournalFileBackend.append_logs, []

def torn(self, logs):
    lines.append(logs)
    if len(lines) < int(sys.argv[2]):
        return append(self, logs)
    with get_lock_file(self._lock), open(self._file_path, "ab") as file:
        file.write(b'{"op_code":4,"worker_id":"half a li')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

JournalFileBackend.append_logs = torn
calibration.measure_task_costs = lambda *_, **__: COSTS
driver.tune(
    small_model(), small_task(), searcher="random", trials=9, study=sys.argv[1], drafters="skip"
)
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("fast")
def test_a_search_killed_while_it_writes_keeps_all_that_was_judged_and_its_resumed_profile_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Path("profiles", "search.journal")  # as by default, relative to where one works
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)])
    monkeypatch.chdir(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", KILLED_WRITING, str(journal), "7"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    left = journal.read_bytes()
    assert not left.endswith(b"\n")
    told: list[TuneEvent] = []
    profile = searched(
        searcher="random", trials=9, study=journal, resume=True, on_event=told.append
    )
    assert journal.read_bytes().startswith(left[: left.rindex(b"\n") + 1])
    assert any(
        isinstance(e, Notice)
        and "was half written when its process ended, and was cut off" in e.sentence
        for e in told
    )
    assert len([e for e in told if isinstance(e, StageProgress) and e.judged]) == 9 - 4, (
        "two lines made the study, four were masks"
    )
    assert profile.provenance.trials == len(kept(journal)) == 9
    assert parse_profile(dump_profile(profile).encode(), "a profile") == profile


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("objective", ["replay", *thorough("wall")])
def test_a_disk_that_runs_full_during_a_search_is_one_sentence_and_what_was_judged_is_kept(
    objective: str, tmp_path: Path
) -> None:
    journal, full = tmp_path / "search.journal", ExitStack()
    judged: list[Trial] = []

    def listen(event: TuneEvent) -> None:
        if isinstance(event, StageProgress) and event.judged:
            judged.append(event.judged)
            if len(judged) == 2:
                full.enter_context(limit_file_size(journal.stat().st_size + 50))

    with full, pytest.raises(SearchError) as caught:
        searched(objective=objective, searcher="random", trials=4, study=journal, on_event=listen)
    assert str(caught.value) == (
        f"the study {journal} cannot be written ([Errno 27] File too large): the trials in it are "
        "kept; make "
        "room, then go on with --resume"
    )
    told: list[TuneEvent] = []
    assert (
        searched(
            objective=objective,
            searcher="random",
            trials=4,
            study=journal,
            resume=True,
            on_event=told.append,
        ).provenance.trials
        == 4
    )
    complete = [t for t in kept(journal, objective) if t.state is TrialState.COMPLETE]
    assert complete[:2] == judged
    assert len(complete) == 4
    assert not any(isinstance(e, Notice) and "half written" in e.sentence for e in told), (
        "nothing had to be cut off"
    )


# --- events


def test_listeners_hear_of_each_stage_and_of_what_it_did_in_order() -> None:
    events: list[TuneEvent] = []
    searched(trials=6, on_event=events.append)
    stages = [e.title for e in events if isinstance(e, StageStarted)]
    assert [t.split()[0] for t in stages] == [
        "writing",
        "measuring",
        "searching",
        "racing",
        "measuring",
    ]
    longest, *events = events
    assert isinstance(longest, LongestDecoding)
    assert longest.token_s > 0
    assert longest.prefill_s > 0
    assert longest.n_tokens == 14
    raced = 4 / 16 * (8 + 4 * MAX_FINALISTS + 12 * 2)  # of a close race, for want of prompts
    assert longest.n_texts == raced + 2 * 3, "and each hold-out prompt, once plainly and once not"
    assert longest.total_s == longest.n_texts * (longest.prefill_s + 14 * longest.token_s)
    assert isinstance(events[0], StageStarted)

    parts: list[list[Any]] = []
    for event in events:
        if isinstance(event, StageStarted):
            parts.append([])
        else:
            parts[-1].append(event)
    for part in parts:
        progress = [e for e in part if isinstance(e, StageProgress)]
        assert all(0 <= e.done <= e.total for e in progress)
        assert [e.done for e in progress] == sorted(e.done for e in progress)
    assert parts[0][-1] == StageProgress(4 * 14, 4 * 14), "tokens of the reference text"
    forecast = parts[1][-1]
    assert isinstance(forecast, Forecast)
    assert forecast.prepared_s > 0
    assert forecast.search_s is None, "6 masks, however long they take"
    assert forecast.refine_s >= 0
    assert forecast.decode_s > 0

    *search, rate = parts[2]
    assert isinstance(rate, Notice)
    assert re.match(r"masks judged in \d+ s: 6, ", rate.sentence)
    assert [e.done for e in search] == [1, 2, 3, 4, 5, 6]
    best = [e.best.speedup for e in search]
    assert best == sorted(best)
    assert all(
        e.best.speedup == max(x.judged.speedup for x in search[: i + 1])
        for i, e in enumerate(search)
    )

    raced = [e for e in parts[3] if isinstance(e, CandidateMeasured)]
    assert [e.split for e in raced] == ["calibration"] * MAX_FINALISTS
    assert all(e.predicted_speedup for e in raced)
    assert all(1 <= e.n_prompts <= 4 for e in raced)
    confirmed = [e for e in parts[4] if isinstance(e, CandidateMeasured)]
    assert [(e.split, e.n_prompts, e.stopped_early) for e in confirmed] == [("holdout", 3, False)]
    assert confirmed[0].recipe in [e.recipe for e in raced]
    assert isinstance(events[-1], CandidateMeasured)


def test_a_study_keeps_who_proposed_each_mask_and_the_race(tmp_path: Path) -> None:
    journal = tmp_path / "search.journal"
    profile = searched(trials=6, searcher="tpe", study=journal)
    assert {t.searcher for t in kept(journal)} == SEEDED.keys()
    assert all(t.search_seconds and t.search_seconds > 0 for t in kept(journal))
    same = study_fingerprint(
        small_model(), small_task(), "replay", whole_layers=False, drafters="skip"
    )
    notes = StudyStore(journal, same, resume=True).study.user_attrs
    assert [r["split"] for r in notes["raced"]] == ["calibration"] * MAX_FINALISTS + ["holdout"]
    winner = notes["raced"][-1]
    assert Recipe.from_data(winner["recipe"]) == profile.measured_recipe
    assert profile.measured is not None
    low, high = profile.measured.speedup.ci95  # rounded as far as the clock was sure
    assert low <= winner["speedup"]["mean"] <= high
    sample, model = notes["sample"], small_model()
    assert (sample["prompt"], sample["kinds"]) == ("word/4", ["skip"])
    workload = make_workload(model, small_task(), small_task().holdout)
    answer = workload.generate(Decoder(model), 0, seed=0).tokens
    pieces = [piece for _, accepted, own in sample["rounds"] for piece in (accepted, own)]
    assert "".join(pieces) == model.tokenizer.decode(answer)


@pytest.mark.usefixtures("fast")
def test_without_budget_and_trials_a_search_ends_after_a_number_of_masks_or_of_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "DEFAULT_TRIALS", 7)
    assert searched(searcher="random", trials=None).provenance.trials == 7
    monkeypatch.setattr(driver, "DEFAULT_BUDGET_S", 1e-6)
    assert searched(searcher="random", trials=None).provenance.trials == 1


def test_a_task_that_samples_is_replayed_on_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = calibration.Replay

    def noting(*arguments: Any, **options: Any) -> Any:
        asked.append(real(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(calibration, "Replay", noting)
    profile = searched(task=small_task(sampling=TaskSampling(temperature=0.8, top_p=0.9)), trials=3)
    assert asked[0].sampling.temperature == 0.8
    assert asked[0](profile.mask)[0].acceptance.dtype != bool
    assert profile.measured is not None
    assert profile.measured.lossless.prompts == 0, "no two samples are compared token by token"


@pytest.mark.parametrize(
    ("error", "spread", "said"),
    [
        (0.3, 0.05, "predictions are rough"),
        (0.03, 0.05, None),
        (0.03, 0.62, "busy with something else"),
        (0.3, 0.62, "busy with something else"),
    ],
)
def test_a_machine_too_busy_for_predictions_is_named_and_so_are_rough_ones(
    error: float, spread: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    table = LatencyTable(LatencyEntry(20, COSTS, spread, (error,) * 20))
    monkeypatch.setattr(calibration, "load_or_measure_latency_table", lambda *_: table)
    events: list[TuneEvent] = []
    costs = calibration.measure_task_costs(
        small_model(), 20, GREEDY, lambda done, total: None, events.append
    )
    assert costs == COSTS
    _, *noted = [event for event in events if isinstance(event, Notice)]
    assert [
        said in event.sentence and "the table is not kept" in event.sentence
        for event in noted
        if said
    ] == [True] * bool(said)
    assert any(event.casts_doubt for event in noted) == (spread > 0.5), (
        "what is measured is in doubt on a busy machine alone"
    )


@pytest.mark.parametrize("fresh", [True, *thorough(False)])
def test_the_table_is_measured_again_on_request(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def table_costs(
        model: Any, contexts: Any, sampling: Any, progress: Any, listen: Any, fresh: bool
    ) -> Any:
        asked.append(fresh)
        return COSTS

    monkeypatch.setattr(calibration, "measure_task_costs", table_costs)
    searched(searcher="middle", trials=1, remeasure=fresh)
    assert asked == [fresh]


# --- refused before any work


def unreachable(*_: Any, **__: Any) -> Any:
    raise AssertionError("work was done for a request that makes no sense")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"searcher": "randm"}, "randm.*random"),
        ({"searcher": ""}, "searcher"),
        ({"objective": "clock"}, "objective 'clock'; use replay or wall"),
        ({"trials": 0}, "trials is 0"),
        ({"trials": -3}, "trials is -3"),
        ({"budget": "soon"}, "budget 'soon' is not a time"),
        ({"budget": 0}, "budget"),
        ({"budget": "-5s"}, "budget"),
        ({"budget": math.nan}, "budget"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_senseless_requests_are_one_sentence_before_any_work(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("make_workload", "load_task", "StudyStore"):
        monkeypatch.setattr(driver, work, unreachable)
    for work in ("measure_task_costs", "Replay"):
        monkeypatch.setattr(calibration, work, unreachable)
    with pytest.raises(SearchError, match=sentence) as caught:
        tune(small_model(), "words", **options)
    assert "\n" not in str(caught.value)


def test_a_model_whose_weights_a_profile_could_not_name_is_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "make_workload", unreachable)
    with pytest.raises(SearchError, match="was not loaded from files"):
        tune(tiny_model_and_reference()[0], small_task(), trials=1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_new_tokens": 2}, "generates 2 tokens, too few to draft"),
        ({"holdout": ()}, "4 prompts to search on and 0 to measure on"),
        ({"calibration": ()}, "0 prompts to search on and 3"),
    ],
)
def test_a_task_that_nothing_could_be_measured_on_is_refused_before_the_search(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "make_workload", unreachable)
    with pytest.raises(SearchError, match=sentence):
        tune(small_model(), small_task(**changes), trials=1)


def test_the_shortest_task_that_can_be_drafted_on_is_searched() -> None:
    profile = tune(small_model(), small_task(max_new_tokens=3), trials=2)
    assert profile.measured is not None
    assert profile.measured.alpha is not None


@pytest.mark.parametrize(
    ("written", "value"),
    [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45), (45, 45), (0.5, 0.5), (None, None)],
)
def test_a_budget_is_a_time_with_or_without_a_unit(written: Any, value: float | None) -> None:
    assert parse_duration(written) == value


@pytest.mark.parametrize("written", ["", "m", "1 day", "1e3", "0s", "0", "-1", "2m30s", "ten"])
def test_what_is_not_a_time_is_no_budget(written: str) -> None:
    with pytest.raises(SearchError, match=r"write 90s, 20m or 1\.5h"):
        parse_duration(written)


# --- failures and slower days


class Scripted:
    """Judges by a function of the mask."""

    fidelity = "wall"

    def __init__(self, judge: Callable[[SkipMask], Trial]):
        self._judge = judge

    def judge(self, mask: SkipMask) -> Trial:
        return self._judge(mask)


def search_over(
    judge: Callable[[SkipMask], Trial], told: tuple[Trial, ...] = (), trials: int = 6
) -> Search:
    return Search(
        SearchProblem(LAYERS), Scripted(judge), None, told, lambda event: None, 0.0, None, trials
    )


def failed(mask: SkipMask) -> Trial:
    return Trial(mask, math.inf, state=TrialState.FAILED)


def test_a_mask_that_cannot_be_measured_is_never_among_the_finalists() -> None:
    search = search_over(
        lambda mask: failed(mask) if mask.n_skipped > 3 else Trial(mask, 1.0 / mask.n_skipped)
    )
    search.run("middle")
    finalists = search.best_trials(99)
    assert 0 < len(finalists) < len(search.judged_trials) == 6
    assert [t.mask.n_skipped for t in finalists] == sorted(
        (t.mask.n_skipped for t in finalists), reverse=True
    )
    assert all(t.state is TrialState.COMPLETE for t in finalists)


def test_a_search_in_which_nothing_could_be_measured_says_so() -> None:
    with pytest.raises(SearchError, match="no mask could be judged"):
        search_over(failed).run("middle")


def test_a_mask_that_failed_in_an_earlier_process_is_judged_again() -> None:
    mask = SkipMask(LAYERS, (), (2,))
    search = search_over(lambda m: Trial(m, 1.0), told=(failed(mask),), trials=2 * LAYERS)
    assert mask not in search.judged_trials
    search.run("middle")
    assert len(search.judged_trials) == 2 * LAYERS


def test_masks_judged_on_a_slower_day_are_compared_by_their_ratio_to_that_days_baseline() -> None:
    fast_day = Trial(
        SkipMask(LAYERS, (1,)), 0.010, baseline_seconds_per_token=0.011
    )  # 1.1 times plain decoding
    slow_day = Trial(
        SkipMask(LAYERS, (2,)), 0.020, baseline_seconds_per_token=0.030
    )  # 1.5 times, on a machine three times slower
    search = search_over(lambda m: Trial(m, 1.0), told=(fast_day, slow_day))
    assert search.best_trials(2) == [slow_day, fast_day]


def test_a_mask_that_real_decoding_refuses_is_a_failed_trial_and_the_search_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, judged = driver.WallObjective, []

    class Sometimes(real):  # type: ignore[misc, valid-type]
        def judge(self, mask: SkipMask) -> Any:
            judged.append(mask)
            with pytest.MonkeyPatch.context() as patched:
                if len(judged) == 2:
                    patched.setattr("skipsearch.tuning.wall_objective.time_interleaved", refusing)
                return super().judge(mask)

    def refusing(*_: Any) -> Any:
        raise DecodeError("no room")

    monkeypatch.setattr(driver, "WallObjective", Sometimes)
    searched(objective="wall", trials=3, study=tmp_path / "search.journal")
    assert [t.state for t in kept(tmp_path / "search.journal", "wall")] == [
        TrialState.COMPLETE,
        TrialState.FAILED,
        TrialState.COMPLETE,
    ]


def test_a_wall_trial_is_measured_against_plain_decoding_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, task = small_model(), small_task()
    work = make_workload(model, task, task.calibration)
    by_replay = ReplayObjective(Replay(model, work.prompt_ids, 14, 6), COSTS)
    made_up_times(monkeypatch, lambda _: 0.8)
    trial = WallObjective(model, work, JointObjective([by_replay]), baseline_s=0.02).judge(
        SkipMask(LAYERS, (1, 3))
    )
    assert trial.speedup == pytest.approx(1 / 0.8)
    assert (trial.seconds_per_token, trial.baseline_seconds_per_token) == (
        pytest.approx(0.02 * 0.8),
        0.02,
    )
    assert trial.fidelity == "wall"
    assert trial.recipe == by_replay.best_recipe(SkipMask(LAYERS, (1, 3))).recipe
    assert trial.tau == pytest.approx(2.5)
    assert trial.stderr == pytest.approx(0)


def test_a_replay_trial_is_the_best_policys_prediction() -> None:
    model, task = small_model(), small_task()
    replay = Replay(model, make_workload(model, task, task.calibration).prompt_ids, 14, 6)
    mask = SkipMask(LAYERS, (1, 3))
    trial = ReplayObjective(replay, COSTS).judge(mask)
    predictions = {
        p: simulate(rounds_from_replay(replay(mask)), mask, p, COSTS) for p in coarse_policies(8)
    }
    assert trial.seconds_per_token == min(p.seconds_per_token for p in predictions.values())
    assert trial.seconds_per_token == min(p.seconds_per_token for p in predictions.values())
    assert trial.baseline_seconds_per_token == COSTS.verify[0]
    assert trial.beta == pytest.approx(COSTS.draft_step_seconds(mask) / COSTS.verify[0])
    assert trial.recipe is not None
    assert trial.recipe.drafters[-1].draft_length <= 8, (
        "no verify pass is longer than those in the table"
    )


# --- recipes


def raced_with(
    drafters: str, judged_by: Callable[[TuneEvent], None] = lambda event: None
) -> tuple[Profile, list[CandidateMeasured]]:
    raced: list[CandidateMeasured] = []

    def listen(event: TuneEvent) -> None:
        judged_by(event)
        if isinstance(event, CandidateMeasured):
            raced.append(event)

    return searched(drafters=drafters, on_event=listen, trials=7), raced


@pytest.mark.usefixtures("fast")
def test_what_is_predicted_to_be_much_slower_does_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    _, everyone = raced_with("auto")
    monkeypatch.setattr(race, "HOPELESS_RATIO", 1.0)
    _, nearest = raced_with("auto")
    predicted = [sorted(r.predicted_speedup or 0 for r in raced) for raced in (everyone, nearest)]
    assert len(everyone) == MAX_FINALISTS + 1, "and the winner on hold-out prompts"
    assert predicted[1][1:] == predicted[0][-2:], "the two fastest race"


@pytest.mark.usefixtures("fast")
def test_auto_races_the_best_recipe_of_each_shape() -> None:
    profile, raced = raced_with("auto")
    shapes = [r.recipe.shape for r in raced if r.split == "calibration"]
    assert {"lookup", "skip", "lookup,skip"} == set(shapes)
    assert len(shapes) == MAX_FINALISTS
    [confirmed] = [r for r in raced if r.split == "holdout"]
    assert confirmed.recipe in [r.recipe for r in raced if r.split == "calibration"]
    assert profile.measured_recipe == confirmed.recipe
    assert all(r.predicted_speedup for r in raced if r.split == "calibration")


@pytest.mark.thorough
def test_each_choice_of_drafters_is_kept_to(judged: list[SkipMask]) -> None:
    for drafters in ("skip", "lookup,skip"):
        profile, raced = raced_with(drafters)
        assert {r.recipe.shape for r in raced} == {drafters}
        assert profile.measured_recipe.shape == drafters
    judged.clear()
    profile, raced = raced_with("lookup")
    assert {r.recipe.shape for r in raced} == {"lookup"}
    assert profile.provenance.trials == len(judged) == 0, (
        "no mask is searched where none may be used"
    )


def test_a_choice_of_drafters_that_is_none_is_refused_before_any_work() -> None:
    with pytest.raises(
        SearchError,
        match="--drafters skip,lookup: lookup stands before the other drafter; write --drafters "
        "lookup,skip",
    ):
        searched(drafters="skip,lookup")


def test_a_mask_is_judged_in_the_recipe_that_it_would_be_used_in() -> None:
    """Behind lookup where lookup pays alone, else by itself; and that is what its trial says."""
    model, work = (
        small_model(),
        make_workload(small_model(), small_task(), small_task().calibration),
    )
    replay = Replay(model, work.prompt_ids, work.max_new_tokens, work.end_on_repeat)
    mask = SkipMask(LAYERS, (1, 3))
    for shapes in (("skip",), ("lookup", "skip", "lookup,skip"), ("lookup,skip",)):
        objective = ReplayObjective(replay, COSTS, shapes)
        trial = objective.judge(mask)
        assert trial.recipe is not None
        assert trial.recipe.shape == str(objective.searched_shape)
        assert trial.recipe.mask(LAYERS) == mask
    free = ReplayObjective(
        replay, replace(COSTS, verify=(COSTS.verify[0],) * 9), ("lookup", "skip", "lookup,skip")
    )
    assert free.lookup_pays, (
        "a verify pass of many rows costs nothing here, so any right guess is won"
    )
    assert str(free.searched_shape) == "lookup,skip"
