"""The table of methods: every drafter that runs on this model, at its best settings.

All methods and plain decoding are measured in one interleaved run. Settings are tuned on the
calibration split of a task, and measured on its hold-out split. The published speedups in the last
column are from other models, hardware and prompts, so they are not comparable with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from skipsearch.bench.hugging_face import HFGenerate
from skipsearch.bench.llama_cpp import LlamaGenerate
from skipsearch.bench.systems import ExternalSystem
from skipsearch.core.machine import describe_machine
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats, Estimate
from skipsearch.decoding import Decoder, Generation
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.trained.module_files import (
    find_module_file,
    hash_module_file,
    list_modules,
    read_module_header,
)
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.searchers import SearchProblem
from skipsearch.tasks.task import Task
from skipsearch.timing.elimination import MIN_COMPARED_PROMPTS
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import (
    build_replay_objective,
    choose_limits,
    load_shipped_drafts,
    load_trained_drafts,
)
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.draft_model_search import (
    TriedDraftModel,
    load_tried_models,
    make_draft_model_objective,
)
from skipsearch.tuning.events import StageProgress, StageStarted, TuneListener, ignore_event
from skipsearch.tuning.objective import MAX_DRAFT, ReplayObjective
from skipsearch.tuning.online_candidates import list_online_candidates
from skipsearch.tuning.race import (
    MAX_FINALISTS,
    ONLINE_RACE_RUNGS,
    estimate_longest_decoding,
    predict_text_s,
    race_candidates,
)
from skipsearch.tuning.readings import ReadingSearch
from skipsearch.tuning.recipe_shape import (
    ONLINE_DRAFTERS,
    RECIPE_SHAPES,
    TRAINED_DRAFTERS,
    RecipeShape,
    list_shapes,
)
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.trained_candidates import TrainedCandidates

DEFAULT_SEARCH_S = 30.0  # of each searcher, and of each race
PREDICTED_TIME = attrgetter("seconds_per_token")
TEXT_RATIO = 2.0  # of the time of the text that all of them use to that time
# Searchers that are measured as offline searches, with the speedup that their paper reports.
OFFLINE_SEARCHERS = {
    "clasp": "",
    "asd": "",
    "s3d": "",
    "tpe": "",
    "gp": "1.5–1.6× (13B)",
    "auto": "",
}
PROGRAM_TITLES = {
    "hf-generate": "Hugging Face, plain",
    "hf-early-exit": "Hugging Face, early exit",
    "hf-lookup": "Hugging Face, lookup",
    "llama-cpp": "llama.cpp, plain",
    "llama-cpp-lookup": "llama.cpp, lookup",
}
PUBLISHED_SPEEDUPS = {
    "draft & verify": "1.5–1.6× (13B)",
    "lookup": "1.66× (7B, Spec-Bench)",
    "clasp": "1.24× (8B) to 1.67× (70B)",
    "asd": "1.44× (13B, one mask a prompt)",
    "swift": "1.41× (13B), 1.48× (70B)",
    "kangaroo": "1.50× (7B), 1.44× (13B)",
    "s3d": "1.76× (7B int8)",
    "mtp": "2.03× (FastMTP)",
}


@dataclass(frozen=True)
class MethodRow:
    """The result of one method.

    needs: what the method takes before the first token, such as a search or a training, in words.
    beta: measured time of a draft step over the time of a plain pass.
    published: the speedup that its paper reports, on other models and machines.
    predicted: the speedup that replay predicts; None if it predicts none.
    Figures that only our engines know are None for other programs.
    """

    method: str
    recipe: str
    needs: str
    speedup: Estimate
    alpha: float | None
    tau: float | None
    beta: float | None
    identical: int
    prompts: int
    published: str
    predicted: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> MethodRow:
        """Make a row from the dictionary that `as_dict` returned."""
        return cls(**row | {"speedup": Estimate(**row["speedup"])})


def compare_methods(
    model: ModelAdapter,
    task: Task,
    module_folders: Sequence[Path] = (),
    n_prompts: int | None = None,
    seed: int = 0,
    on_event: TuneListener = lambda event: None,
    programs: Sequence[ExternalSystem] = (),
    search_s: float = DEFAULT_SEARCH_S,
    draft_models: Sequence[str] = (),
) -> list[MethodRow]:
    """Tune every method on the calibration split, then measure all of them on the hold-out split.

    module_folders: folders of trained modules. Each module is measured alone. Alone and after
    lookup, it is also a candidate for the best recipe.
    n_prompts: hold-out prompts to measure; None: all.
    programs: other programs that take part, with the same model.
    search_s: seconds that each searcher may judge masks, and each race may decode prompts. If they
    are too few to race all settings of a drafter, its published ones take part.
    draft_models: names of smaller models that may draft, as `load_model` takes them. Each is
    measured as it is, with a searched mask, and with drafts that read less of it.

    Raises: SearchError, TaskError, ModuleError, ModelError.
    """
    tried_models = load_tried_models(model, draft_models, on_event)
    trained = [
        draft for folder in module_folders for draft in load_trained_drafts(model, folder, on_event)
    ]
    shapes = (
        *RECIPE_SHAPES["auto"],
        *(shape for kind in TRAINED_DRAFTERS for shape in list_shapes(kind)),
    )
    judged = task.keep_unseen() if trained else task
    calibration = make_workload(model, judged, judged.calibration)
    on_event(StageStarted("writing reference text: the model continues calibration prompts"))
    longest = estimate_longest_decoding(model, calibration, len(task.holdout))
    limits = choose_limits(longest, TEXT_RATIO * search_s, search_s)
    objective = build_replay_objective(model, calibration, on_event, shapes=shapes, limits=limits)
    calibration = calibration.head(len(objective.replay.texts))
    n_racers = int(search_s / (MIN_COMPARED_PROMPTS * predict_text_s(objective, longest))) or 1

    def with_modules(candidate: Candidate) -> Candidate:
        return replace(candidate, module_folders=tuple(module_folders))

    chosen = {
        "plain": (Candidate(Recipe()), "nothing"),
        "lookup": (objective.best_lookup(), "nothing"),
    }
    everything = [objective.best_lookup()]
    masks = list[Candidate]()
    evidence = collect_evidence(objective.replay, objective.costs)
    for name in OFFLINE_SEARCHERS:
        on_event(StageStarted(f"searching a mask with {name}"))
        began = perf_counter()
        mask = _search_mask(model, objective, name, evidence, seed, search_s)
        needs = f"{perf_counter() - began:.0f} s of search"
        alone = objective.best_recipe(mask, after_lookup=False, fine=True)
        chosen[f"mask by {name}"] = (alone, needs)
        masks.append(alone)
        everything += [alone, objective.best_recipe(mask, after_lookup=True, fine=True)]
        if name == "gp":
            adaptive = make_exit("adaptive", across_requests=True)
            chosen["draft & verify"] = (
                Candidate(Recipe((Skip.from_mask(mask, MAX_DRAFT, adaptive),))),
                needs,
            )
    fastest_mask = min(masks, key=PREDICTED_TIME).recipe.mask(model.spec.n_layers)
    assert fastest_mask is not None
    if reading_less := _list_reading_less(objective, fastest_mask, on_event):
        fastest = _find_fastest_alone(reading_less)
        chosen["skip, reading less"] = fastest, "seconds of measuring and replay"
        everything += reading_less
    for tried in tried_models:
        by_name = _tune_draft_model(tried, objective, seed, on_event, search_s)
        chosen |= {name: (alone, needs) for name, (alone, _, needs) in by_name.items()}
        everything += [c for alone, others, _ in by_name.values() for c in (alone, *others)]
    for kind in ONLINE_DRAFTERS:
        racing = list_online_candidates(RecipeShape(kind), objective)[:n_racers]
        on_event(StageStarted(f"racing settings of {kind}"))
        fastest, _ = race_candidates(
            model, calibration, racing, seed, on_event, ONLINE_RACE_RUNGS, search_s
        )
        chosen[kind] = (fastest, fastest.recipe.drafters[-1].info.requires)
    trained_candidates = TrainedCandidates(objective)
    for draft in [*load_shipped_drafts(model, on_event), *trained]:
        name, needs = "mtp (shipped)", "a head that the model ships"
        if draft.ref is not None:
            card = read_module_header(find_module_file(draft.ref, draft.folders)).card
            name = f"{draft.kind} ({Path(draft.ref.file).stem})"
            needs = (
                f"{card.trained.seconds / 60:.0f} min of training, "
                f"{draft.ref.parameters / 1e6:.2g} M values beside the model's"
            )
        alone = trained_candidates.best(draft, after_lookup=False)
        chosen[name] = (with_modules(alone), needs)
        everything += [alone, trained_candidates.best(draft, after_lookup=True)]
    best = sorted(everything, key=PREDICTED_TIME)
    finalists = [with_modules(candidate) for candidate in best[: min(MAX_FINALISTS, n_racers)]]
    on_event(StageStarted("racing the best recipes"))
    winner, _ = race_candidates(model, calibration, finalists, seed, on_event, limit_s=search_s)
    chosen["best recipe"] = winner, "all of these"
    return _measure_methods(
        model,
        chosen,
        make_workload(model, task, task.holdout[:n_prompts]),
        seed,
        on_event,
        programs,
    )


def _tune_draft_model(
    tried: TriedDraftModel,
    full: ReplayObjective,
    seed: int,
    on_event: TuneListener,
    search_s: float,
) -> dict[str, tuple[Candidate, list[Candidate], str]]:
    """Return the best recipes of a draft model by the name of their method.

    Each name has the best recipe of the draft model alone, others with it, and what it needs.
    full: the objective of the full model.
    """
    name, needs = f"draft-model {tried.ref.id}", "a smaller model with the same tokens"
    on_event(StageStarted(f"replaying the draft model {tried.ref.id}"))
    objective = make_draft_model_objective(tried, full, on_event)

    def judge(mask: SkipMask, needs: str) -> tuple[Candidate, list[Candidate], str]:
        alone, after_lookup = (
            objective.best_recipe(mask, after_lookup, fine=True) for after_lookup in (False, True)
        )
        return alone, [after_lookup], needs

    whole = SkipMask(tried.model.spec.n_layers)
    by_name = {name: judge(whole, needs)}
    if tried.model.spec.is_recurrent:  # a mask would not have its own states
        return by_name
    on_event(StageStarted(f"searching a mask of {tried.ref.id}"))
    began = perf_counter()
    evidence = collect_evidence(objective.replay, objective.costs)
    mask = _search_mask(tried.model, objective, "auto", evidence, seed, search_s)
    masked_needs = f"{needs}, {perf_counter() - began:.0f} s of search"
    by_name[f"{name}, masked"] = judge(mask, masked_needs)
    if reading_less := _list_reading_less(objective, mask, on_event):
        by_name[f"{name}, reading less"] = _find_fastest_alone(reading_less), reading_less, needs
    return by_name


def _find_fastest_alone(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with a single drafter that is predicted to be the fastest."""
    return min((c for c in candidates if len(c.recipe.drafters) == 1), key=PREDICTED_TIME)


def _list_reading_less(
    objective: ReplayObjective, mask: SkipMask, on_event: TuneListener
) -> list[Candidate]:
    """Return the best recipes whose drafts read less and skip nothing, or what the mask skips.

    They draft alone and after lookup. [] if no draft of this model can read less.
    """
    readings = ReadingSearch(objective, objective.replay.mean_context(), on_event)
    nothing_skipped = SkipMask(objective.replay.model.spec.n_layers)
    judged = readings.judge(nothing_skipped)
    if not judged:
        return []
    best = readings.objective_for(judged[0].reading)
    return [
        best.best_recipe(skipped, after, fine=True)
        for skipped in (nothing_skipped, mask)
        for after in (False, True)
    ]


def _search_mask(
    model: ModelAdapter,
    objective: ReplayObjective,
    name: str,
    evidence: Any,
    seed: int,
    search_s: float,
) -> SkipMask:
    """Return the best mask that a searcher proposes within `search_s` seconds."""
    problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed)
    search = Search(
        problem, objective.fresh_copy(), None, (), ignore_event, perf_counter(), search_s, None
    )
    search.run(name)
    return search.best_trials(1)[0].mask


class _ExternalDecoder:
    """A decoder that runs another program.

    Other programs do not stop where our decoder does. They therefore generate as many tokens as
    plain decoding did. count_tokens: returns that number for a prompt.
    """

    is_learning = False

    def __init__(self, generator: HFGenerate | LlamaGenerate, count_tokens: Callable[..., int]):
        self.generator, self.count_tokens = generator, count_tokens

    def generate(self, prompt: Sequence[int], max_tokens: int, **settings: Any) -> Generation:
        count = self.count_tokens(tuple(prompt), max_tokens, **settings)
        tokens, first, others = self.generator.run(prompt, count)
        return Generation(
            tokens,
            "length",
            DecodeStats(
                tokens=len(tokens),
                round_tokens=len(tokens) - 1,
                prefill_seconds=first,
                decode_seconds=others,
            ),
        )


def _measure_methods(
    model: ModelAdapter,
    candidates: dict[str, tuple[Candidate, str]],
    holdout: Workload,
    seed: int,
    on_event: TuneListener,
    programs: Sequence[ExternalSystem],
) -> list[MethodRow]:
    """Decode the hold-out prompts with every method in turn and return the rows."""
    on_event(StageStarted("decoding hold-out prompts with every method in turn"))
    recipes = {
        finalist.recipe: finalist for finalist, _ in reversed(candidates.values())
    }  # of equal recipes one is measured
    decoders = [finalist.make_decoder(model) for finalist in recipes.values()]
    n_tokens, plain = dict[tuple[tuple[int, ...], int], int](), Decoder(model)

    def count_tokens(prompt: tuple[int, ...], max_tokens: int, **settings: Any) -> int:
        request = prompt, max_tokens
        if request not in n_tokens:
            n_tokens[request] = len(plain.generate(prompt, max_tokens, **settings).tokens)
        return n_tokens[request]

    external = [_ExternalDecoder(program.generator, count_tokens) for program in programs]
    timings = time_interleaved(
        [*decoders, *cast("list[Decoder]", external)],
        holdout,
        1,
        seed,
        lambda done, total: on_event(StageProgress(done, total)),
    )
    ours = dict(zip(recipes, timings[: len(recipes)], strict=True))
    plain_timings = ours[Recipe()]
    rows = [
        _make_method_row(
            name,
            str(finalist.recipe),
            needs,
            ours[finalist.recipe],
            plain_timings,
            finalist.predicted_speedup if finalist.recipe.drafters else None,
        )
        for name, (finalist, needs) in candidates.items()
    ]
    rows[-1:-1] = [
        _make_method_row(
            PROGRAM_TITLES.get(program.name, program.name),
            program.name,
            "nothing",
            timing,
            plain_timings,
        )
        for program, timing in zip(programs, timings[len(recipes) :], strict=True)
    ]
    return rows


def _make_method_row(
    name: str,
    recipe: str,
    needs: str,
    ours: Timings,
    plain: Timings,
    predicted: float | None = None,
) -> MethodRow:
    """Return the row of a method from its timings and those of plain decoding."""
    reference = {sample.prompt_index: sample.generation.tokens for sample in plain.samples}
    stats = ours.stats
    beta = stats.draft_seconds / stats.drafted / plain.seconds_per_token if stats.drafted else None
    published = PUBLISHED_SPEEDUPS.get(name.partition(" (")[0]) or OFFLINE_SEARCHERS.get(
        name.removeprefix("mask by "), ""
    )
    return MethodRow(
        name,
        recipe,
        needs,
        ours.speedup_over(plain),
        stats.alpha,
        stats.tau if stats.rounds else None,
        beta,
        sum(sample.generation.tokens == reference[sample.prompt_index] for sample in ours.samples),
        ours.n_prompts,
        published,
        predicted,
    )


def to_report_data(
    model: ModelAdapter, task: str, folders: Sequence[Path], rows: Sequence[MethodRow]
) -> dict[str, Any]:
    """Return the table as plain data, together with the conditions of its measurement.

    A reader of the data can compare these conditions with the present ones.
    """
    machine, spec = describe_machine(model.spec.device), model.spec
    return {
        "model": spec.id,
        "weights_sha256": spec.weights_sha256,
        "dtype": spec.dtype_name,
        "engine": spec.engine,
        "task": task,
        "machine": machine.description,
        "modules": {
            path.name: hash_module_file(path) for folder in folders for path in list_modules(folder)
        },
        "rows": [row.as_dict() for row in rows],
    }


def to_markdown(rows: Sequence[MethodRow]) -> str:
    """Return the table in Markdown. It has predictions if a row has one."""
    with_predictions = any(row.predicted is not None for row in rows)
    heads = ["method", "speedup (95 %)", *(["predicted"] if with_predictions else [])]
    heads += ["α", "τ", "β", "needs", "identical", "as published, elsewhere"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        figures = [*([row.predicted] if with_predictions else []), row.alpha, row.tau, row.beta]
        cells = [
            row.method,
            f"{row.speedup.mean:.2f}× ({row.speedup.low:.2f}–{row.speedup.high:.2f})",
            *("" if value is None else f"{value:.2f}" for value in figures),
            row.needs,
            f"{row.identical} of {row.prompts}",
            row.published,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
