"""The driver of a search, from a task's prompts to a profile.

    prepare   calibration text is continued by the full model; the latency table is measured
    search    ask, judge, tell, until budget, trials or ideas run out (`search.py`)
    refine    the best few are given every draft policy
    race      the best recipe of each shape (lookup, skip, lookup before skip), under real decoding on calibration prompts, interleaved
              with plain decoding
    confirm   the winner alone, on hold-out prompts that no step before has seen; plain decoding wins unless it is beaten there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from skipsearch import compiler
from skipsearch.costs import Costs
from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted import Adapted
from skipsearch.drafters.skip import Skip
from skipsearch.errors import ModuleError, SearchError
from skipsearch.evaluation.brought import brought
from skipsearch.evaluation.evidence import gather
from skipsearch.evaluation.moved import moved
from skipsearch.evaluation.objectives import (
    CHOOSING,
    LOOKUP_SKIP,
    MAX_DRAFT,
    SHAPES,
    TRAINED,
    Found,
    Objective,
    ReplayObjective,
    WallObjective,
)
from skipsearch.evaluation.prompts import Workload, template_sha256, workload
from skipsearch.evaluation.replay import RECURRENT, Replay
from skipsearch.evaluation.table import latency_table, main_context
from skipsearch.evaluation.trained import TrainedDraft, trained_draft
from skipsearch.evaluation.wall import race
from skipsearch.finals import CHOOSING_PROMPTS, RACE_PROMPTS, Finalist, choosing, run_off
from skipsearch.ledger import Ledger
from skipsearch.machine import software, this_machine
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.files import modules_in, reference
from skipsearch.names import unknown
from skipsearch.profile import Profile
from skipsearch.search import Listener, Noted, Progress, Raced, Search, Stage, ToBeat
from skipsearch.searchers import SearchProblem, searcher_names
from skipsearch.stats import Trial
from skipsearch.tasks import Task, load_task

DEFAULT_SEARCHER = "auto"
DEFAULT_TRIALS = 200     # masks: on any model a small multiple of the time that its calibration prompts took
WALL_PROMPTS = 6         # of one evaluation under the wall objective
REFINED, FINALISTS = 8, 4   # masks that are given every setting; recipes that are raced
HOLDOUT_REPEATS = 2


def seconds(budget: str | float | None) -> float | None:
    """`20m`, `90s`, `1.5h` or a number of seconds. Raises: SearchError."""
    if budget is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(budget).strip())
    value = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not value > 0:
        raise SearchError(f"budget {budget!r} is not a time: write 90s, 20m or 1.5h")
    return value


def tune(model: ModelAdapter, task: Task | str, searcher: str = DEFAULT_SEARCHER, budget: str | float | None = None,
         trials: int | None = None, objective: str = "replay", seed: int = 0, study: str | Path | None = None, resume: bool = False,
         whole_layers: bool = False, listen: Listener = lambda event: None, fresh_table: bool = False, drafters: str = "auto",
         keep: Collection[int] = (), modules: Path | None = None) -> Profile:
    """Search the fastest recipe for `model` on `task`, and measure it here.

    drafters: which a recipe may have: "lookup", "skip", "lookup,skip" (in this order), "adapted", "lookup,adapted", or "auto", which weighs
    all of them; or "clasp", "asd", "swift", each alone or behind "lookup,", which choose their masks while they decode. modules: a folder
    of trained parts; each that fits the model is weighed alone and behind lookup.
    budget: of the search itself (the race and the confirmation come on top); trials: masks judged. The first to run out ends the
    search; with neither, 200 masks. study: a journal file or storage URL that keeps every judged mask; None keeps nothing.
    listen: told of progress. fresh_table: measure the latency table also where a kept one would do.
    keep: flat numbers of sub-layers that no draft skips (attention of layer i is 2i, its MLP 2i + 1); `sub_layers` reads them from text.
    Raises: SearchError, TaskError, and KeyboardInterrupt through: what was judged is in the study.
    """
    limit = seconds(budget)
    if trials is not None and trials < 1:
        raise SearchError(f"trials is {trials}; judge at least 1 mask")
    if limit is None and trials is None:
        trials = DEFAULT_TRIALS
    check_objective(objective)
    if seed < 0:
        raise SearchError(f"seed is {seed}; a seed is a whole number from 0 up")
    check_searcher(searcher)
    check_drafters(drafters, modules)
    compiler.check_identifiable(model.spec)
    if model.spec.recurrent and (kind := drafters.rpartition(",")[2]) in CHOOSING:
        raise SearchError(f"--drafters {drafters}: {kind} reads hidden states while it decodes, and {model.spec.id}, whose layers keep a "
                          "recurrent state, shows none; tune skip or lookup")
    started = perf_counter()
    task = load_task(task) if isinstance(task, str) else task
    check_task(task)
    calibration = workload(model, task, task.calibration)  # before a study is begun that such a model could not go on with
    trained = trained_drafts(model, modules, listen) if modules else []
    if (kind := drafters.rpartition(",")[2]) in TRAINED and not any(draft.kind == kind for draft in trained):
        raise SearchError(f"--drafters {drafters}: no module in {modules} is of the kind {kind}; `skipsearch train {kind}` makes one")
    shapes = (*SHAPES[drafters], *_shapes_of(trained if drafters == "auto" else ()))
    ledger = Ledger(study, identity(model, task, objective, whole_layers, drafters, keep), resume) if study is not None else None
    if ledger and ledger.torn:
        listen(Noted(f"the last line of {ledger.where} was half written when its process ended, and was cut off; at most the mask judged "
                     "last is lost"))
    told = ledger.trials() if ledger else []

    listen(Stage(f"writing reference text: the model continues calibration prompts{RECURRENT if model.spec.recurrent else ''}"))
    by_replay = prepare(model, calibration, listen, fresh_table, shapes)
    found: list[Trial] = []
    judged = 0
    if "skip" in drafters or drafters == "auto":
        listen(Stage("ranking sub-layers by what skipping each alone costs"))
        evidence = gather(by_replay.replay, by_replay.costs, lambda done, total: listen(Progress(done, total)))
        problem = SearchProblem(model.spec.n_layers, frozenset(keep), evidence, seed, whole_layers)
        judge: Objective = by_replay
        if objective == "wall":
            judge = WallObjective(model, calibration.first(WALL_PROMPTS), by_replay, by_replay.costs.verify[0])
        elif by_replay.ranked_lookups:
            listen(ToBeat(by_replay.costs.verify[0] / by_replay.ranked_lookups[0][1]))
        listen(Stage(f"searching masks with {searcher} (α: chance that a draft is accepted)"))
        search = Search(problem, judge, ledger, told, listen, perf_counter(), limit, trials)
        search.run(searcher)
        found, judged = search.finalists(REFINED if objective == "replay" else FINALISTS), len(search.seen)
    elif ledger:
        ledger.close()
    if (kind := drafters.rpartition(",")[2]) in CHOOSING:
        racing = choosing(kind, drafters, by_replay, calibration, listen)
    else:
        racing = finalists(found, by_replay, trained, modules)
    listen(Stage("racing the best recipes under real decoding of calibration prompts"))
    winner, raced = run_off(model, calibration, racing, seed, listen, CHOOSING_PROMPTS if kind in CHOOSING else RACE_PROMPTS)
    searched = perf_counter() - started

    listen(Stage("measuring the winner on hold-out prompts"))
    holdout = workload(model, task, task.holdout)
    winning = winner.decoder(model)
    repeats = 1 if winning.learning else HOLDOUT_REPEATS   # a search that goes on is not to meet a text twice
    plain, ours = race([Decoder(model), winning], holdout, repeats, seed,
                       lambda done, total: listen(Progress(done, total)))
    confirmed = Raced(winner.recipe, None, ours.speedup_over(plain), "holdout", ours.prompts)
    listen(confirmed)
    if ledger:
        ledger.note("raced", [r.as_dict() for r in (*raced, confirmed)])
        if (mask := winner.recipe.mask(model.spec.n_layers)) is not None:
            ledger.note("surface", {"policies": by_replay.surface(mask)})
        if (masks := moved(model, winner.recipe, calibration)) is not None:
            ledger.note("moved", asdict(masks))
        ledger.note("brought", [asdict(group) for group in brought(winner.recipe, by_replay.replay, by_replay.lookups)])
    return compiler.compile_profile(model, task, holdout, winner.recipe, plain, ours,
                                    provenance=compiler.provenance(searcher, objective, seed, judged, searched))


def sub_layers(text: str | None) -> frozenset[int]:
    """`attn:0,mlp:3` -> {0, 7}: the flat numbers of sub-layers; none of None. Raises: SearchError."""
    found = set()
    for part in (text or "").split(",") if text else []:
        match = re.fullmatch(r"(attn|mlp):(\d{1,5})", part.strip())
        if match is None:
            raise SearchError(f"{part.strip()!r} names no sub-layer: write attn:0 for the attention of layer 0, mlp:3 for the MLP of layer "
                              "3, with commas between them")
        found.add(2 * int(match[2]) + (match[1] == "mlp"))
    return frozenset(found)


def check_searcher(name: str) -> None:
    """A wrong name should not cost a minute of preparation. Raises: SearchError."""
    if name not in searcher_names():
        raise SearchError(unknown("searcher", name, searcher_names()))


def check_objective(name: str) -> None:
    """Raises: SearchError."""
    if name not in ("replay", "wall"):
        raise SearchError(f"there is no objective {name!r}; use replay or wall")


def check_drafters(name: str, modules: Path | None = None) -> None:
    """Raises: SearchError."""
    if name not in SHAPES:
        turned = ",".join(reversed([kind.strip() for kind in name.split(",")]))
        raise SearchError(f"--drafters {name}: lookup stands before the other drafter; write --drafters {turned}" if turned in SHAPES else
                          unknown("choice of drafters", name, SHAPES))
    kind = name.rpartition(",")[2]
    if kind in TRAINED and modules is None:
        raise SearchError(f"--drafters {name} drafts with trained weights: name the folder of what `skipsearch train {kind}` made with "
                          "--modules")


def trained_drafts(model: ModelAdapter, folder: Path, listen: Listener) -> list[TrainedDraft]:
    """The modules of a folder that fit the model. Raises: ModuleError if none does, with the reason for the first."""
    found, refused = list[TrainedDraft](), list[ModuleError]()
    for path in modules_in(folder):
        try:
            ref = reference(path, path.name)
            found.append(trained_draft(model, ref, [folder]))
        except ModuleError as error:
            refused.append(error)
            listen(Noted(f"left out: {error}"))
    if not found:
        raise refused[0]
    return found


def _shapes_of(trained: Sequence[TrainedDraft]) -> list[str]:
    return [shape for kind in dict.fromkeys(draft.kind for draft in trained) for shape in (kind, f"lookup,{kind}")]


def check_task(task: Task) -> None:
    """A task that no draft can be measured on. Raises: SearchError."""
    if task.max_new_tokens < 3:  # the prefill's own, and a round of two: a round that may emit one token drafts none
        raise SearchError(f"task {task.name} generates {task.max_new_tokens} tokens, too few to draft any: let it generate at least 3")
    if not task.calibration or not task.holdout:
        raise SearchError(f"task {task.name} has {len(task.calibration)} prompts to search on and {len(task.holdout)} to measure on: "
                          "it needs some of both")


def identity(model: ModelAdapter, task: Task, objective: str, whole_layers: bool, drafters: str = "auto",
             keep: Collection[int] = ()) -> dict[str, Any]:
    """What must be equal for the trials of two processes to be comparable."""
    machine, spec = this_machine(model.spec.device), model.spec
    return {"model": spec.id, "n_layers": spec.n_layers, "config_sha256": spec.config_sha256, "weights_sha256": spec.weights_sha256,
            "dtype": spec.dtype_name, "quantization": spec.quantization, "device": machine.description, "engine": spec.engine,
            "task": task.name, "calibration_sha256": task.calibration_sha256,
            "chat_template_sha256": template_sha256(task, model.tokenizer),
            "generation": {"max_new_tokens": task.max_new_tokens, "max_prompt_tokens": task.max_prompt_tokens,
                           "end_on_repeat": task.end_on_repeat, "sampling": task.sampling.model_dump()},
            "objective": objective, "whole_layers": whole_layers, "drafters": drafters, "keep": sorted(keep) or None,
            "software": software()}


def prepare(model: ModelAdapter, calibration: Workload, listen: Listener, fresh_table: bool = False,
            shapes: Sequence[str] = ("skip",)) -> ReplayObjective:
    """Continuations and latency table: what any recipe is judged by."""
    def progress(done: int, total: int) -> None:
        listen(Progress(done, total))

    replay = Replay(model, calibration.prompts, calibration.max_new_tokens, calibration.end_on_repeat, progress, calibration.sampling)
    listen(Stage("measuring the latency table"))
    costs = table_costs(model, replay.contexts(), progress, listen, fresh_table)
    return ReplayObjective(replay, costs, shapes)


def table_costs(model: ModelAdapter, contexts: list[int], progress: Callable[[int, int], None], listen: Listener,
                fresh: bool = False) -> Costs:
    """The latency table's costs at the middle one of three context lengths of the calibration text."""
    table = latency_table(model, MAX_DRAFT, contexts, progress, fresh)
    listen(Noted(f"latency table{' (of an earlier search)' if table.kept else ''}: {table}"))
    if not table.steady:
        listen(Noted("so this machine is busy with something else: predictions are worth little now, the race has to tell the masks "
                     "apart, and the table is not kept", doubtful=True))
    elif not table.sound:
        listen(Noted("so predictions are rough here; the race, which decodes for real, tells the recipes apart, and the table is not kept"))
    return table.at(main_context(contexts))


def finalists(trials: Sequence[Trial], by_replay: ReplayObjective, trained: Sequence[TrainedDraft] = (),
              modules: Path | None = None) -> list[Finalist]:
    """The recipes to race, with the best settings for each: the best of each shape, so that a wrong prediction costs no more than the race,
    then whichever are predicted to be the fastest, and the best without siblings. trials: the best masks that were judged. trained: what
    lies in the folder `modules`."""
    by_shape: dict[str, list[Found]] = {shape: [] for shape in by_replay.shapes}
    if "lookup" in by_shape:
        by_shape["lookup"].append(by_replay.best_lookup())
    for trial in trials:
        for shape in by_shape.keys() & {"skip", LOOKUP_SKIP}:
            by_shape[shape].append(by_replay.best_recipe(trial.mask, shape, fine=True))
    for draft in trained:
        for shape in by_shape.keys() & set(_shapes_of([draft])):
            by_shape[shape].append(by_replay.best_trained(draft, shape))
    for of_shape in by_shape.values():
        of_shape.sort(key=lambda found: found.seconds_per_token)
    first = [found for of_shape in by_shape.values() for found in of_shape[:1]]
    best = min(first, key=lambda found: found.seconds_per_token).recipe
    for drafter in best.drafters:
        if isinstance(drafter, Adapted) and drafter.siblings:
            of_it = next(draft for draft in trained if draft.ref == drafter.module)
            first.append(by_replay.best_trained(of_it, best.shape, siblings=False))
        elif isinstance(drafter, Skip) and drafter.siblings:
            first.append(by_replay.best_recipe(drafter.mask(by_replay.replay.model.spec.n_layers), best.shape, fine=True, siblings=False))
    others = sorted((found for of_shape in by_shape.values() for found in of_shape[1:]), key=lambda found: found.seconds_per_token)
    chosen = sorted([*first, *others[:max(0, FINALISTS - len(first))]], key=lambda found: found.seconds_per_token)
    plain = by_replay.costs.verify[0]
    folders = () if modules is None else (modules,)
    return [Finalist(found.recipe, plain / found.seconds_per_token, tuple(found.prices(plain)), folders, found.prediction)
            for found in chosen]
