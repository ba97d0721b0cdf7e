"""`tune`: from a task's prompts to a profile, in six steps.

calibrate          the full model continues calibration prompts; the latency table is measured
search_masks       propose a mask, judge it, report it, until budget, trials or masks run out
select_candidates  try every draft policy with the best masks; choose the best recipe of each shape
race_candidates    these recipes and plain decoding decode calibration prompts in turn
confirm            the winner alone decodes hold-out prompts, which no earlier step has seen
build_profile      the verdict is `plain` unless the winner beats plain decoding on hold-out prompts
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.decoding import FORCED_KIND, Decoder
from skipsearch.decoding.recording import record_answer
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.reliability import compute_reliability
from skipsearch.replay.workload import Workload, make_workload, template_sha256
from skipsearch.searchers import SearchProblem
from skipsearch.tasks import Task, load_task
from skipsearch.timing.elimination import PLAIN_PROMPTS
from skipsearch.timing.interleaved import measure_speedup
from skipsearch.tuning.calibration import Calibration, calibrate, load_needed_modules
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.draft_model_search import (
    TriedDraftModel,
    load_tried_models,
    search_draft_models,
)
from skipsearch.tuning.events import (
    BaselinePredicted,
    Forecast,
    Notice,
    StageStarted,
    TuneListener,
    ignore_event,
    make_progress_callback,
)
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.objective import Objective, ReplayObjective
from skipsearch.tuning.online_candidates import list_online_candidates
from skipsearch.tuning.profile_builder import build_profile, make_provenance
from skipsearch.tuning.race import (
    MAX_FINALISTS,
    ONLINE_RACE_RUNGS,
    RACE_RUNGS,
    drop_hopeless,
    estimate_longest_decoding,
    limit_racers,
    predict_text_s,
    race_candidates,
    select_finalists,
)
from skipsearch.tuning.readings import ReadingSearch, choose_leading_readings, find_other_readings
from skipsearch.tuning.recipe_shape import DRAFT_MODEL
from skipsearch.tuning.schedule import RACE_END, SEARCH_END, Schedule
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.settings import (
    DEFAULT_BUDGET_S,
    DEFAULT_SEARCHER,
    DEFAULT_TRIALS,
    TuneSettings,
    check_task,
    parse_duration,
)
from skipsearch.tuning.study import StudyStore
from skipsearch.tuning.wall_objective import WallObjective

WALL_OBJECTIVE_PROMPTS = 6  # prompts of one evaluation under the wall objective
SAMPLE_TOKENS = 200  # of the answer that a report shows
REFINED_MASKS = 4  # masks that are tried with every setting


def tune(
    model: ModelAdapter,
    task: Task | str,
    searcher: str = DEFAULT_SEARCHER,
    budget: str | float | None = None,
    trials: int | None = None,
    objective: str = "replay",
    seed: int = 0,
    study: str | Path | None = None,
    resume: bool = False,
    whole_layers: bool = False,
    on_event: TuneListener = ignore_event,
    remeasure: bool = False,
    drafters: str = "auto",
    never_skip: Collection[int] = (),
    modules: Path | None = None,
    draft_memory: int | None = None,
    draft_models: Sequence[str] = (),
) -> Profile:
    """Search the fastest recipe for `model` on `task`, and measure it here.

    budget: time of all stages together, such as "20m". What cannot be shorter may take longer: a
    few texts, the latency table, one mask, a few hold-out prompts.
    trials: masks to judge. With trials alone, the time is not limited. Default: 10 minutes and 200
    masks.
    objective: "replay" predicts a mask's time, "wall" measures it.
    study: a journal file or storage URL that stores every judged mask.
    resume: continue the search that `study` holds.
    on_event: called with each event of the progress.
    remeasure: measure the latency table even if one is cached.
    drafters: which drafter a recipe may have: "lookup", "skip", "adapted", "kangaroo", "s3d",
    "mtp", "draft-model", "clasp", "asd", "swift", or one of them after lookup, such as
    "lookup,skip". "auto" tries lookup, skip, the drafters of `modules`, a draft head that the model
    ships and the `draft_models`, each alone and after lookup.
    never_skip: flat numbers of sub-layers that no draft skips: attention of layer i is 2i, its MLP
    2i + 1. `parse_sublayers` reads them from text.
    modules: a folder of trained drafters' modules.
    draft_memory: bytes that a draft's copy of the weights may take; None: half of the free memory
    for all formats together. 0: drafts read the weights as they are stored.
    draft_models: names of smaller models that may draft, as `load_model` takes them.

    Raises: SearchError, TaskError, ModuleError. After a KeyboardInterrupt, all judged masks are in
    the study.
    """
    budget_s = parse_duration(budget)
    if budget_s is None and trials is None:
        budget_s, trials = DEFAULT_BUDGET_S, DEFAULT_TRIALS
    settings = TuneSettings(
        searcher,
        trials,
        budget_s,
        objective,
        seed,
        whole_layers,
        drafters,
        frozenset(never_skip),
        modules,
        remeasure,
        draft_memory,
        bool(draft_models),
    )
    settings.check_model(model.spec)
    schedule = Schedule(budget_s, perf_counter())
    task = load_task(task) if isinstance(task, str) else task
    check_task(task)
    trained = load_needed_modules(model, settings, on_event)
    has_modules = any(draft.ref is not None for draft in trained)  # not only what a model ships
    judged = task.keep_unseen() if has_modules else task
    if len(judged.calibration) < len(task.calibration):
        on_event(
            Notice(
                f"recipes are judged on {len(judged.calibration)} of {len(task.calibration)} "
                "calibration prompts: a training reads the others"
            )
        )
    # Before the study is created: a model that cannot read the task could not resume it.
    prompts = make_workload(model, judged, judged.calibration)
    tried_models = load_tried_models(model, draft_models, on_event)
    store = _open_study(model, judged, settings, study, resume, on_event, tried_models)

    longest = estimate_longest_decoding(model, prompts, len(task.holdout))
    if budget_s is None:
        on_event(longest)
    calibration = calibrate(model, prompts, trained, settings, on_event, schedule, longest)
    text_s = predict_text_s(calibration.objective, longest)

    def report_forecast(search_s: float | None, refine_s: float) -> None:
        decoding_s = longest.n_texts * text_s
        if budget_s is not None:
            decoding_s = min(decoding_s, (1 - SEARCH_END) * budget_s)
        on_event(Forecast(perf_counter() - schedule.started, search_s, refine_s, decoding_s))

    n_searches = 1 + len(tried_models)
    search = search_masks(
        model, calibration, settings, schedule, store, on_event, report_forecast, n_searches
    )
    candidates = select_candidates(search, calibration, settings, schedule, tried_models, on_event)
    on_event(StageStarted("racing the best recipes under real decoding of calibration prompts"))
    rungs = ONLINE_RACE_RUNGS if settings.chooses_masks_online else RACE_RUNGS
    race_s, n_plain = schedule.seconds_until(RACE_END), PLAIN_PROMPTS
    if race_s is not None and not settings.chooses_masks_online:
        candidates, n_plain = limit_racers(candidates, race_s, text_s, on_event)
    winner, raced = race_candidates(
        model, calibration.workload, candidates, seed, on_event, rungs, race_s, n_plain
    )
    search_s = perf_counter() - schedule.started

    holdout = make_workload(model, task, task.holdout)
    winner = confirm(model, winner, holdout, seed, on_event, schedule.seconds_until(1.0))
    assert winner.measurement is not None
    if store:
        _store_findings(store, search.objective, raced, winner)
        if model.tokenizer is not None and winner.recipe.drafters:
            on_event(StageStarted("recording a sample answer for the report"))
            store.set_attr("sample", record_sample(winner.make_decoder(model), holdout, seed))
    return build_profile(
        model,
        task,
        holdout,
        winner.recipe,
        winner.measurement,
        provenance=make_provenance(searcher, objective, seed, search.n_judged, search_s),
    )


def _open_study(
    model: ModelAdapter,
    task: Task,
    settings: TuneSettings,
    location: str | Path | None,
    resume: bool,
    on_event: TuneListener,
    tried_models: Sequence[TriedDraftModel] = (),
) -> StudyStore | None:
    if location is None:
        return None
    identity = study_fingerprint(
        model,
        task,
        settings.objective,
        settings.whole_layers,
        settings.drafters,
        settings.never_skip,
        [tried.ref.weights_sha256 for tried in tried_models],
    )
    store = StudyStore(location, identity, resume)
    if store.truncated:
        on_event(
            Notice(
                f"the last line of {store.location} was half written when its process ended, and "
                "was cut off; at most the mask judged "
                "last is lost"
            )
        )
    return store


@dataclass(frozen=True)
class SearchOutcome:
    """The best masks of a search."""

    objective: JointObjective  # that judged them
    best: Sequence[Trial] = ()  # best first
    n_judged: int = 0  # masks
    # the best recipes whose drafts read something else
    other_readings: Sequence[Candidate] = ()


def search_masks(
    model: ModelAdapter,
    calibration: Calibration,
    settings: TuneSettings,
    schedule: Schedule,
    store: StudyStore | None,
    on_event: TuneListener,
    report_forecast: Callable[[float | None, float], None],
    n_searches: int = 1,
) -> SearchOutcome:
    """Search masks until the budget is spent. If no allowed recipe has a mask, do nothing.

    Closes the study. report_forecast: is called before the first trial with the time limit in
    seconds (None if only the number of trials is limited), and the seconds that refining the best
    masks will take. n_searches: those that share the time, of this model and of draft models.
    """
    history, n_layers = store.trials() if store else [], model.spec.n_layers
    if not settings.searches_masks:
        if store:
            store.close()
        report_forecast(0.0, 0.0)
        return SearchOutcome(JointObjective([calibration.objective]))
    readings = ReadingSearch(
        calibration.objective, calibration.context, on_event, settings.draft_memory
    )
    leading = choose_leading_readings(readings, store, n_layers, on_event)
    joint = readings.joint_objective(leading)
    by_replay = joint.leading
    evidence = collect_evidence(by_replay.replay, by_replay.costs)
    problem = SearchProblem(
        n_layers, settings.never_skip, evidence, settings.seed, settings.whole_layers
    )
    objective: Objective = joint
    if settings.objective == "wall":
        prompts = calibration.workload.head(WALL_OBJECTIVE_PROMPTS)
        objective = WallObjective(model, prompts, joint, by_replay.plain_pass_s)
    elif by_replay.ranked_lookups:
        on_event(BaselinePredicted(by_replay.plain_pass_s / by_replay.ranked_lookups[0][1]))
    max_trials = settings.max_trials
    if settings.objective == "replay" and not history:
        bound = by_replay.predict_bound(SkipMask.from_sublayers(n_layers, problem.skippable))
        if not bound.allows_gain:
            max_trials = 1
            on_event(
                Notice(
                    "masks cannot pay here, so one is judged, to compare: a draft that skips "
                    "everything, and is accepted as often as one that skips nothing, would take "
                    f"{bound.least_s * 1e3:.2f} ms a token; {bound.known_s * 1e3:.2f} ms are "
                    "reached without a mask"
                )
            )
    # The best mask is judged with every combination, and the best masks with every policy.
    refine_s = 2 * readings.judge_s
    limit_s = schedule.seconds_until(SEARCH_END, n_searches, refine_s)
    report_forecast(limit_s, refine_s)
    on_event(
        StageStarted(
            f"searching masks with {settings.searcher} (α: chance that a draft is accepted)"
        )
    )
    search = Search(
        problem, objective, store, history, on_event, perf_counter(), limit_s, max_trials
    )
    reads_all = all(reading.is_everything for reading in leading)
    search.run(settings.searcher, () if reads_all else (SkipMask(n_layers),))
    n_new, search_s = len(search.judged_trials) - len(history), perf_counter() - search.started
    if n_new > 0:
        rate = 60 * n_new / search_s
        on_event(Notice(f"masks judged in {search_s:.0f} s: {n_new}, {rate:.0f} a minute"))
    count = REFINED_MASKS if settings.objective == "replay" else MAX_FINALISTS
    best = search.best_trials(count)
    return SearchOutcome(
        joint,
        best,
        len(search.judged_trials),
        find_other_readings(readings, leading, best[0].mask, on_event),
    )


def select_candidates(
    search: SearchOutcome,
    calibration: Calibration,
    settings: TuneSettings,
    schedule: Schedule,
    tried_models: Sequence[TriedDraftModel],
    on_event: TuneListener,
) -> list[Candidate]:
    """Return the recipes to race. Searches masks of the draft models first."""
    if settings.shape is not None and settings.chooses_masks_online:
        return list_online_candidates(settings.shape, calibration.objective)

    def search_draft_model(
        model: ModelAdapter, calibration: Calibration, settings: TuneSettings, n_searches: int
    ) -> tuple[list[tuple[SkipMask, ReplayObjective]], list[Candidate]]:
        outcome = search_masks(
            model, calibration, settings, schedule, None, on_event, lambda *_: None, n_searches
        )
        objective = outcome.objective
        best = [(trial.mask, objective.objective_of(trial.recipe)) for trial in outcome.best]
        return best, [*outcome.other_readings]

    by_draft_model = search_draft_models(
        tried_models, calibration, settings, on_event, search_draft_model
    )
    if settings.kind == DRAFT_MODEL:
        return drop_hopeless(by_draft_model[:MAX_FINALISTS])
    finalists = select_finalists(
        search.best, search.objective, calibration.objective, calibration.trained, settings.modules
    )
    candidates = [*finalists, *search.other_readings, *by_draft_model[:MAX_FINALISTS]]
    return drop_hopeless(candidates)


def confirm(
    model: ModelAdapter,
    winner: Candidate,
    holdout: Workload,
    seed: int,
    on_event: TuneListener,
    limit_s: float | None = None,
) -> Candidate:
    """Return the winner with its measurement on hold-out prompts.

    limit_s: as in `measure_speedup`.
    """
    on_event(StageStarted("measuring the winner on hold-out prompts"))
    measurement = measure_speedup(
        Decoder(model, draft_forced=False),
        winner.make_decoder(model),
        holdout,
        seed,
        make_progress_callback(on_event),
        limit_s,
    )
    winner = replace(winner, measurement=measurement)
    on_event(winner.describe_measurement("holdout"))
    return winner


def _store_findings(
    store: StudyStore, search: JointObjective, raced: Sequence[Candidate], winner: Candidate
) -> None:
    """Store in the study what a report shows besides the trials."""
    measured = [candidate.describe_measurement("calibration") for candidate in raced]
    measured.append(winner.describe_measurement("holdout"))
    store.set_attr("raced", [event.as_dict() for event in measured])
    objective = search.objective_of(winner.recipe)
    bins = compute_reliability(winner.recipe, objective.replay, objective.lookup_replay)
    store.set_attr("brought", [asdict(group) for group in bins])


def record_sample(decoder: Decoder, workload: Workload, seed: int) -> dict[str, Any]:
    """Return the answer to the first prompt for a report, with the drafter of each token."""
    limit = min(SAMPLE_TOKENS, workload.max_new_tokens)
    recording = record_answer(
        decoder, workload.prompt_ids[0], workload.request_options(seed) | {"max_new_tokens": limit}
    )
    kinds = [spec.kind for spec in decoder.recipe.drafters]
    if workload.constraint is not None:
        kinds.append(FORCED_KIND)
    rounds = [(one.drafter, one.accepted, one.own) for one in recording.rounds]
    return {"prompt": workload.prompt_names[0], "kinds": kinds, "rounds": rounds}


def study_fingerprint(
    model: ModelAdapter,
    task: Task,
    objective: str,
    whole_layers: bool,
    drafters: str = "auto",
    never_skip: Collection[int] = (),
    draft_models: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the facts that all processes of a study must share, so that trials are comparable."""
    machine, spec = describe_machine(model.spec.device), model.spec
    return {
        "model": spec.id,
        "n_layers": spec.n_layers,
        "config_sha256": spec.config_sha256,
        "weights_sha256": spec.weights_sha256,
        "dtype": spec.dtype_name,
        "quantization": spec.quantization,
        "device": machine.description,
        "engine": spec.engine,
        "task": task.name,
        "calibration_sha256": task.calibration_sha256,
        "chat_template_sha256": template_sha256(task, model.tokenizer),
        "generation": {
            "max_new_tokens": task.max_new_tokens,
            "max_prompt_tokens": task.max_prompt_tokens,
            "end_on_repeat": task.end_on_repeat,
            "sampling": task.sampling.model_dump(),
        },
        "objective": objective,
        "whole_layers": whole_layers,
        "drafters": drafters,
        "keep": sorted(never_skip) or None,
        **({"draft_models": list(draft_models)} if draft_models else {}),
        "software": software_versions(),
    }
