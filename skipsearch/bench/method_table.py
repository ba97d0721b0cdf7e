"""The table of methods: every drafter that runs on this model, at its best settings.

All methods and plain decoding are measured in one interleaved run. Settings are tuned on the
calibration split of a task, and measured on its hold-out split. The published speedups in the last
column are from other models, hardware and prompts, so they are not comparable with ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from skipsearch.bench.hugging_face import HFGenerate
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
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import (
    build_replay_objective,
    load_shipped_drafts,
    load_trained_drafts,
)
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import StageProgress, StageStarted, TuneListener
from skipsearch.tuning.objective import MAX_DRAFT, ReplayObjective
from skipsearch.tuning.online_candidates import list_online_candidates
from skipsearch.tuning.race import MAX_FINALISTS, ONLINE_RACE_RUNGS, race_candidates
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

DEFAULT_TRIALS_PER_SEARCHER = 60  # masks that each searcher may judge
# Searchers that are measured as offline searches, with the speedup that their paper reports.
OFFLINE_SEARCHERS = {"clasp": "", "asd": "", "s3d": "", "gp": "1.5–1.6× (13B)", "auto": ""}
EXTERNAL_SYSTEMS = {
    "hf-generate": "Hugging Face, plain",
    "hf-early-exit": "Hugging Face, early exit",
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
    hf_model: ModelAdapter | None = None,
    trials: int = DEFAULT_TRIALS_PER_SEARCHER,
) -> list[MethodRow]:
    """Tune every method on the calibration split, then measure all of them on the hold-out split.

    module_folders: folders of trained modules. Each module is measured alone. Alone and after
    lookup, it is also a candidate for the best recipe.
    n_prompts: hold-out prompts to measure; None: all.
    hf_model: the same model on engine `hf`, to measure transformers' `generate` too.
    trials: masks that each searcher may judge.

    Raises: SearchError, TaskError, ModuleError.
    """
    trained = [
        draft for folder in module_folders for draft in load_trained_drafts(model, folder, on_event)
    ]
    shapes = (
        *RECIPE_SHAPES["auto"],
        *(shape for kind in TRAINED_DRAFTERS for shape in list_shapes(kind)),
    )
    calibration = make_workload(model, task, task.calibration)
    objective = build_replay_objective(model, calibration, on_event, shapes=shapes)

    def with_modules(candidate: Candidate) -> Candidate:
        return replace(candidate, module_folders=tuple(module_folders))

    chosen = {
        "plain": (Candidate(Recipe()), "nothing"),
        "lookup": (objective.best_lookup(), "nothing"),
    }
    everything = [objective.best_lookup()]
    evidence = collect_evidence(objective.replay, objective.costs)
    for name in OFFLINE_SEARCHERS:
        on_event(StageStarted(f"searching a mask with {name}"))
        began = perf_counter()
        mask = _search_mask(model, objective, name, evidence, seed, trials)
        needs = f"{perf_counter() - began:.0f} s of search"
        alone = objective.best_recipe(mask, after_lookup=False, fine=True)
        chosen[f"mask by {name}"] = (alone, needs)
        everything += [alone, objective.best_recipe(mask, after_lookup=True, fine=True)]
        if name == "gp":
            adaptive = make_exit("adaptive", across_requests=True)
            chosen["draft & verify"] = (
                Candidate(Recipe((Skip.from_mask(mask, MAX_DRAFT, adaptive),))),
                needs,
            )
    if reading_less := _best_reading_less(objective, on_event):
        chosen["skip, reading less"] = reading_less[0], "seconds of measuring and replay"
        everything += reading_less
    for kind in ONLINE_DRAFTERS:
        racing = list_online_candidates(RecipeShape(kind), objective)
        on_event(StageStarted(f"racing settings of {kind}"))
        fastest, _ = race_candidates(model, calibration, racing, seed, on_event, ONLINE_RACE_RUNGS)
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
    best = sorted(everything, key=lambda candidate: candidate.seconds_per_token)[:MAX_FINALISTS]
    on_event(StageStarted("racing the best recipes"))
    chosen["best recipe"] = (
        race_candidates(
            model, calibration, [with_modules(candidate) for candidate in best], seed, on_event
        )[0],
        "all of these",
    )
    return _measure_methods(
        model,
        chosen,
        make_workload(model, task, task.holdout[:n_prompts]),
        seed,
        on_event,
        hf_model,
    )


def _best_reading_less(objective: ReplayObjective, on_event: TuneListener) -> list[Candidate]:
    """Return the best recipes, alone and after lookup, whose drafts skip nothing and read less.

    [] if no draft of this model can read less.
    """
    readings = ReadingSearch(objective, objective.replay.mean_context(), on_event)
    nothing_skipped = SkipMask(objective.replay.model.spec.n_layers)
    judged = readings.judge(nothing_skipped)
    if not judged:
        return []
    best = readings.objective_for(judged[0].reading)
    return [best.best_recipe(nothing_skipped, after, fine=True) for after in (False, True)]


def _search_mask(
    model: ModelAdapter,
    objective: ReplayObjective,
    name: str,
    evidence: Any,
    seed: int,
    trials: int,
) -> SkipMask:
    """Return the best mask that a searcher proposes within `trials` trials."""
    problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed)
    search = Search(
        problem, objective.fresh_copy(), None, (), lambda event: None, perf_counter(), None, trials
    )
    search.run(name)
    return search.best_trials(1)[0].mask


class _ExternalDecoder:
    """A decoder that runs transformers' `generate`.

    `generate` does not stop at a repetition, as our decoder does. It therefore generates as many
    tokens as plain decoding did.
    """

    is_learning = False

    def __init__(self, name: str, model: ModelAdapter, plain: Decoder):
        self.generator, self.plain = HFGenerate(name, model), plain

    def generate(self, prompt: Sequence[int], max_tokens: int, **settings: Any) -> Generation:
        count = len(self.plain.generate(prompt, max_tokens, **settings).tokens)
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
    hf_model: ModelAdapter | None,
) -> list[MethodRow]:
    """Decode the hold-out prompts with every method in turn and return the rows."""
    on_event(StageStarted("decoding hold-out prompts with every method in turn"))
    recipes = {
        finalist.recipe: finalist for finalist, _ in reversed(candidates.values())
    }  # of equal recipes one is measured
    decoders = [finalist.make_decoder(model) for finalist in recipes.values()]
    foreign = (
        [_ExternalDecoder(name, hf_model, Decoder(model)) for name in EXTERNAL_SYSTEMS]
        if hf_model is not None
        else []
    )
    timings = time_interleaved(
        [*decoders, *cast("list[Decoder]", foreign)],
        holdout,
        1,
        seed,
        lambda done, total: on_event(StageProgress(done, total)),
    )
    ours = dict(zip(recipes, timings[: len(recipes)], strict=True))
    rows = [
        _make_method_row(name, str(finalist.recipe), needs, ours[finalist.recipe], ours[Recipe()])
        for name, (finalist, needs) in candidates.items()
    ]
    others = [
        _make_method_row(title, name, "nothing", timing, ours[Recipe()])
        for (name, title), timing in zip(
            EXTERNAL_SYSTEMS.items(), timings[len(recipes) :], strict=False
        )
    ]
    return [*rows[:-1], *others, rows[-1]]


def _make_method_row(
    name: str, recipe: str, needs: str, ours: Timings, plain: Timings
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
    """Return the table in Markdown."""
    lines = [
        "| method | speedup (95 %) | α | τ | β | needs | identical | as published, elsewhere |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        s, figures = (
            row.speedup,
            " | ".join(
                "" if value is None else f"{value:.2f}" for value in (row.alpha, row.tau, row.beta)
            ),
        )
        lines.append(
            f"| {row.method} | {s.mean:.2f}× ({s.low:.2f}–{s.high:.2f}) | {figures} | {row.needs} "
            "| "
            f"{row.identical} of {row.prompts} | {row.published} |"
        )
    return "\n".join(lines) + "\n"
