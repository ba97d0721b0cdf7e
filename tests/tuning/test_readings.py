"""What drafts read is chosen by measured costs and replay, before and after the mask search."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from helpers.tiny import LAYERS, tiny_model_and_reference, use_engine
from pydantic import TypeAdapter

from skipsearch.core.cost_model import Costs, ReadingCosts
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.core.stats import Trial
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import SearchError
from skipsearch.replay.replay import Replay
from skipsearch.report.recorded import StoredReading
from skipsearch.timing.reading_costs import FormatCosts, price_reading
from skipsearch.tuning import readings
from skipsearch.tuning.events import Notice, TuneEvent, ignore_event
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.race import select_finalists
from skipsearch.tuning.readings import ReadingSearch, choose_leading_readings, find_other_readings
from skipsearch.tuning.settings import parse_draft_memory

from .small_search import COSTS

pytestmark = pytest.mark.xdist_group("native")
PROMPTS = ((5, 17, 40, 3), (0,), (40, 2, 2, 31, 8, 44, 21, 13, 7))
NOTHING = SkipMask(LAYERS)
# A draft step in int8 takes half of the time, in int4 a quarter; the rest is nearly free.
FORMATS: dict[Reading, FormatCosts] = {
    Reading("stored"): FormatCosts(0.9, 0.1, 0.0, 0.0, 0.0),
    Reading("int8"): FormatCosts(0.45, 0.05, 0.0, 0.0, 0.1),
    Reading("int6"): FormatCosts(0.4, 0.05, 0.0, 0.0, 0.1),
    Reading("int5"): FormatCosts(0.4, 0.05, 0.0, 0.0, 0.1),
    Reading("int4"): FormatCosts(0.2, 0.05, 0.0, 0.0, 0.1),
}


@pytest.fixture
def objective() -> Iterator[ReplayObjective]:
    with (
        use_engine("native"),
        patch.object(readings, "measure_format_costs", lambda *args: FORMATS),
    ):
        model, _ = tiny_model_and_reference()
        replay = Replay(model, PROMPTS, 24, end_on_repeat=None)
        yield ReplayObjective(replay, COSTS, ["lookup", "skip", "lookup,skip"])


def search_of_two(objective: ReplayObjective) -> JointObjective:
    """A search of masks with drafts in int8, which lead, and in int4."""
    search = ReadingSearch(objective, 16, ignore_event)
    return search.joint_objective([Reading("int8"), Reading("int4")])


def test_the_combination_with_the_best_prediction_comes_first(objective: ReplayObjective) -> None:
    events: list[TuneEvent] = []
    search = ReadingSearch(objective, 16, events.append)
    judged = search.judge(NOTHING)
    speedups = [one.candidate.predicted_speedup or 0 for one in judged]
    assert speedups == sorted(speedups, reverse=True)
    assert {one.reading.weights for one in judged} == {"int8", "int6", "int5", "int4"}
    by_weights = {one.reading.weights: one for one in judged}
    assert by_weights["int4"].beta < by_weights["int8"].beta < 1
    assert by_weights["int8"].alpha >= by_weights["int4"].alpha
    assert by_weights["int4"].draft_bytes < by_weights["int8"].draft_bytes
    leading = choose_leading_readings(search, None, LAYERS, events.append)
    assert leading == [one.reading for one in judged[: len(leading)]]
    least = readings.LEADING_SHARE * speedups[0]
    assert all(speedup >= least for speedup in speedups[: len(leading)])
    assert all(speedup < least for speedup in speedups[len(leading) : readings.MAX_LEADING])
    assert any(isinstance(e, Notice) and "copies of the weights" in e.sentence for e in events)


def test_recipes_of_the_search_read_what_was_chosen(objective: ReplayObjective) -> None:
    search = ReadingSearch(objective, 16, lambda event: None)
    chosen = search.objective_for(Reading("int4"))
    trial = chosen.judge(NOTHING)
    assert trial.recipe is not None
    skip = trial.recipe.drafters[-1]
    assert isinstance(skip, Skip)
    assert skip.weights == "int4"
    assert skip.reading == Reading("int4")
    assert chosen.best_recipe(NOTHING, fine=True).recipe.drafters[-1].reading == Reading("int4")
    assert objective.best_recipe(SkipMask(LAYERS, (1,))).recipe.drafters[-1].reading.is_everything


def test_other_combinations_race_too(objective: ReplayObjective) -> None:
    search = ReadingSearch(objective, 16, lambda event: None)
    mask = SkipMask(LAYERS, (1,))
    searched = [Reading("int4"), Reading("int5")]
    others = find_other_readings(search, searched, mask, lambda event: None)
    assert len(others) == readings.OTHER_FINALISTS
    assert all(c.recipe.drafters[-1].reading not in searched for c in others)


def test_a_mask_is_judged_with_every_leading_combination(objective: ReplayObjective) -> None:
    search = ReadingSearch(objective, 16, lambda event: None)
    leading = [Reading("int4"), Reading("int8"), Reading("int5")]
    for mask in (NOTHING, SkipMask(LAYERS, (1,)), SkipMask(LAYERS, (0, 2), (1,))):
        trial = search.joint_objective(leading).judge(mask)
        times = {reading: search.objective_for(reading).judge(mask) for reading in leading}
        fastest = min(times.values(), key=lambda one: one.seconds_per_token)
        assert trial.recipe is not None
        assert trial.recipe == fastest.recipe
        assert trial.seconds_per_token == pytest.approx(fastest.seconds_per_token)
        best = search.joint_objective(leading).best_recipe(mask)
        assert best.recipe.drafters[-1].reading in leading


def test_other_combinations_are_judged_if_a_sample_speaks_for_them(
    objective: ReplayObjective,
) -> None:
    joint = search_of_two(objective)
    first, second = joint.by_reading.values()
    judged: list[SkipMask] = []

    def judge(mask: SkipMask, others: object) -> Trial:
        judged.append(mask)
        return Trial(mask, 0.99)

    near, worse, far = (SkipMask(LAYERS, (i,)) for i in range(3))
    times = {NOTHING: 1.0, near: 1.08, worse: 1.08, far: 1.2}
    samples = {NOTHING: 0.9, near: 0.9, worse: 1.1}

    with (
        patch.object(first, "judge", lambda mask, others: Trial(mask, times[mask])),
        patch.object(first, "predict_sample_s", lambda mask, others: 1.0),
        patch.object(second, "predict_sample_s", lambda mask, others: samples[mask]),
        patch.object(second, "judge", judge),
    ):
        trials = [joint.judge(mask).seconds_per_token for mask in times]
    assert judged == [NOTHING, near], "where the sample speaks for the second"
    assert trials == [0.99, 0.99, 1.08, 1.2]


def test_vocabularies_of_the_same_weights_are_judged_by_the_same_passes(
    objective: ReplayObjective,
) -> None:
    search, mask = ReadingSearch(objective, 16, ignore_event), SkipMask(LAYERS, (1,))
    leading = [Reading("int8"), Reading("int8", Vocabulary.from_ids([1, 2, 3], 4))]
    alone = [search.objective_for(reading).judge(mask) for reading in leading]
    assert alone[0].seconds_per_token != alone[1].seconds_per_token
    for order in (leading, leading[::-1]):
        with patch.object(Replay, "judge", autospec=True, side_effect=Replay.judge) as judge:
            trial = search.joint_objective(order).judge(mask)
        assert judge.call_count == 1
        assert trial == min(alone, key=lambda one: one.seconds_per_token)


def test_combinations_are_compared_with_the_best_trial_of_any_of_them(
    objective: ReplayObjective,
) -> None:
    joint = search_of_two(objective)
    first, second = joint.by_reading.values()
    assert first._leader is second._leader
    joint.judge(NOTHING)
    assert second._leader
    assert not objective._leader, "the search of another reading has masks of its own"


def test_a_recipe_is_refined_with_what_its_drafts_read(objective: ReplayObjective) -> None:
    search = ReadingSearch(objective, 16, ignore_event)
    joint = search_of_two(objective)
    for reading in joint.readings:
        recipe = search.objective_for(reading).best_recipe(NOTHING).recipe
        assert joint.objective_of(recipe).reading == reading
    unknown = search.objective_for(Reading("int6")).best_recipe(NOTHING).recipe
    for other in (unknown, objective.best_lookup().recipe, None):
        assert joint.objective_of(other) is joint.leading


def test_finalists_read_what_their_trials_read(objective: ReplayObjective) -> None:
    search = ReadingSearch(objective, 16, ignore_event)
    joint = search_of_two(objective)
    trials = [
        search.objective_for(reading).judge(mask)
        for reading, mask in zip(joint.readings, (NOTHING, SkipMask(LAYERS, (1,))), strict=True)
    ]
    finalists = select_finalists(trials, joint, objective)
    drafted = {
        (drafter.weights, drafter.attn)
        for finalist in finalists
        for drafter in finalist.recipe.drafters
        if isinstance(drafter, Skip)
    }
    assert drafted <= {("int8", ()), ("int4", (1,))}
    assert drafted


@pytest.mark.parametrize("limit", [0, 10**12])
def test_a_memory_limit_leaves_out_copies(objective: ReplayObjective, limit: int) -> None:
    events: list[TuneEvent] = []
    search = ReadingSearch(objective, 16, events.append, limit)
    left_out = [e for e in events if isinstance(e, Notice) and "left out" in e.sentence]
    assert (search.formats == [Reading()]) == (limit == 0)
    assert len(left_out) == (4 if limit == 0 else 0)
    if limit == 0:
        assert search.judge(NOTHING) == []
        assert choose_leading_readings(search, None, LAYERS, events.append) == [Reading()]


class Attributes:
    """Stands for a study of which only the attributes matter."""

    def __init__(self) -> None:
        self.stored: dict[str, object] = {}

    def get_attr(self, key: str) -> object:
        return self.stored.get(key)

    def set_attr(self, key: str, value: object) -> None:
        self.stored[key] = value


def test_a_resumed_search_reads_what_it_read_before(objective: ReplayObjective) -> None:
    search, study = ReadingSearch(objective, 16, lambda event: None), Attributes()
    first = choose_leading_readings(search, study, LAYERS, ignore_event)  # type: ignore[arg-type]
    records = TypeAdapter(tuple[StoredReading, ...]).validate_python(study.stored["readings"])
    assert max(records, key=lambda record: record.speedup).weights == first[0].weights
    with patch.object(ReadingSearch, "judge", side_effect=AssertionError):
        assert choose_leading_readings(search, study, LAYERS, ignore_event) == first  # type: ignore[arg-type]
    few = Reading("int8", Vocabulary(lowest=3, tokens="9 12-14"))
    study.stored["leading_readings"] = [readings._dump_reading(few)]
    assert choose_leading_readings(search, study, LAYERS, ignore_event) == [few]  # type: ignore[arg-type]


def test_costs_are_those_of_the_format_and_of_the_rows_of_the_head() -> None:
    costs = Costs((2.0, 1.0), 1.0, (4.0, 4.4), cold=0.5)
    formats = {
        Reading("stored"): FormatCosts(0.75, 0.05, 1e-5, 0.0, 0.0),
        Reading("int8"): FormatCosts(0.3, 0.1, 1e-5, 0.2, 0.1),
    }
    few = Vocabulary(lowest=11_024, tokens="")
    stored = price_reading(costs, formats, Reading(vocabulary=few), 50_000)
    # 10,000 rows more than the small head whose cost was measured
    assert stored.overhead == pytest.approx((0.05 + 0.1) * 4)
    assert sum(stored.sublayers) == pytest.approx(3.0)
    assert stored.verify == costs.verify
    int8 = price_reading(costs, formats, Reading("int8", few), 50_000)
    assert sum(int8.sublayers) == pytest.approx(1.2)
    assert int8.sublayers[0] == pytest.approx(2 * int8.sublayers[1])
    assert isinstance(int8, ReadingCosts)
    assert int8.skipped_share(SkipMask(1)) == 1
    assert 0 < stored.skipped_share(SkipMask(1)) < 1
    assert price_reading(costs, formats, Reading(), 50_000) is costs


@pytest.mark.parametrize(("text", "n_bytes"), [("2GB", 2 * 10**9), ("0", 0), ("1.5MiB", 1572864)])
def test_an_amount_of_memory_is_read(text: str, n_bytes: int) -> None:
    assert parse_draft_memory(text) == n_bytes
    assert parse_draft_memory(None) is None


@pytest.mark.parametrize("text", ["much", "10%", "5", "-1GB", ""])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(SearchError, match=r"--draft-memory .* write 200MB, 2GB or 0"):
        parse_draft_memory(text)
