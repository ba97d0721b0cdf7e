"""The table of methods: every way to draft that works here, each at its best settings, beside plain decoding in one interleaved run.

Settings are chosen on a task's calibration half and measured on its hold-out half. What was published stands beside it: on other models,
machines and text, so the columns are not to be compared, only read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from skipsearch import tuning
from skipsearch.decoding import Decoder
from skipsearch.drafters.skip import Skip
from skipsearch.evaluation.evidence import gather
from skipsearch.evaluation.objectives import SHAPES, TRAINED, Found, ReplayObjective
from skipsearch.evaluation.prompts import workload
from skipsearch.evaluation.wall import Timings, race
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.files import read_header
from skipsearch.recipe import Recipe
from skipsearch.search import Listener, Progress, Search, Stage
from skipsearch.searchers import SearchProblem
from skipsearch.stats import Estimate
from skipsearch.tasks.values import Task

TRIALS = 60   # masks that each searcher may judge
# Searchers of the papers, as offline searches, and what their own systems report.
SEARCHED = {"clasp": "1.24–1.67× (8B–70B, in context)", "asd": "1.44× (13B, one mask a prompt)", "s3d": "1.76× (7B int8, trained)",
            "gp": "1.5–1.6× (13B)", "auto": ""}
PUBLISHED = {"draft & verify": "1.5–1.6× (13B)", "lookup": "1.66× (Spec-Bench, 7B)", "kangaroo": "1.50× (7B)",
             "s3d, trained": "1.76× (7B int8)", "adapted": ""}


@dataclass(frozen=True)
class MethodRow:
    """One method. needs: what it takes before the first token, in words. beta: a draft step over a plain pass, as it was measured.

    published: what its paper reports, on other models and machines.
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


def methods(model: ModelAdapter, task: Task, modules: Path | None = None, prompts: int | None = None, seed: int = 0,
            listen: Listener = lambda event: None) -> list[MethodRow]:
    """prompts: of the hold-out half, all if None. modules: a folder of trained parts, which take part alone and, the best of them, behind
    lookup. Raises: SearchError, TaskError, ModuleError."""
    trained = tuning.trained_drafts(model, modules, listen) if modules else []
    shapes = (*SHAPES["auto"], *(shape for kind in TRAINED for shape in (kind, f"lookup,{kind}")))
    objective = tuning.prepare(model, workload(model, task, task.calibration), listen, shapes=shapes)
    chosen: dict[str, tuple[Recipe, str]] = {"plain": (Recipe(), "nothing"), "lookup": (objective.best_lookup().recipe, "nothing")}
    everything = [objective.best_lookup()]
    evidence = gather(objective.replay, objective.costs)
    for name in SEARCHED:
        listen(Stage(f"searching a mask with {name}"))
        began = perf_counter()
        mask = _searched(model, objective, name, evidence, seed)
        needs = f"{perf_counter() - began:.0f} s of search"
        found = objective.best_recipe(mask, "skip", fine=True)
        chosen[f"mask by {name}"] = (found.recipe, needs)
        everything += [found, objective.best_recipe(mask, "lookup,skip", fine=True)]
        if name == "gp":
            adaptive = make_exit("adaptive", across_requests=True)
            chosen["draft & verify"] = (Recipe((Skip.of(mask, tuning.MAX_DRAFT, adaptive),)), needs)
    for draft in trained:
        card = read_header(modules / draft.ref.file).card if modules else None
        needs = f"{card.trained.seconds / 60:.0f} min of training, {draft.ref.parameters / 1e6:.2g} M values" if card else ""
        alone = objective.best_trained(draft, draft.kind)
        chosen[_name(draft.kind, draft.ref.file)] = (alone.recipe, needs)
        everything += [alone, objective.best_trained(draft, f"lookup,{draft.kind}")]
    best = min(everything, key=lambda found: found.seconds_per_token)
    chosen["best recipe"] = (best.recipe, "all of these")
    return _measured(model, task, chosen, everything, objective, modules, prompts, seed, listen)


def _name(kind: str, file: str) -> str:
    return f"{'s3d, trained' if kind == 's3d' else kind} ({Path(file).stem})"


def _searched(model: ModelAdapter, objective: ReplayObjective, name: str, evidence: Any, seed: int) -> SkipMask:
    problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed)
    search = Search(problem, objective.afresh(), None, (), lambda event: None, perf_counter(), None, TRIALS)
    search.run(name)
    return search.finalists(1)[0].mask


def _measured(model: ModelAdapter, task: Task, chosen: dict[str, tuple[Recipe, str]], everything: list[Found], objective: ReplayObjective,
              modules: Path | None, prompts: int | None, seed: int, listen: Listener) -> list[MethodRow]:
    listen(Stage("decoding hold-out prompts with every method in turn"))
    recipes = list(dict.fromkeys(recipe for recipe, _ in chosen.values()))
    prices = {found.recipe: found.prices(objective.costs.verify[0]) for found in everything}
    decoders = [Decoder(model, recipe, prices=prices.get(recipe), modules=[modules] if modules else []) for recipe in recipes]
    timings = dict(zip(recipes, race(decoders, workload(model, task, task.holdout[:prompts]), 1, seed,
                                     lambda done, total: listen(Progress(done, total))), strict=True))
    plain = timings[Recipe()]
    return [_row(name, recipe, needs, timings[recipe], plain) for name, (recipe, needs) in chosen.items()]


def _row(name: str, recipe: Recipe, needs: str, ours: Timings, plain: Timings) -> MethodRow:
    reference = {sample.prompt: sample.generation.tokens for sample in plain.samples}
    stats = ours.stats
    beta = stats.draft_seconds / stats.drafted / plain.seconds_per_token if stats.drafted else None
    published = PUBLISHED.get(name.partition(" (")[0]) or SEARCHED.get(name.removeprefix("mask by "), "")
    return MethodRow(name, str(recipe), needs, ours.speedup_over(plain), stats.alpha, stats.tau, beta,
                     sum(sample.generation.tokens == reference[sample.prompt] for sample in ours.samples), ours.prompts, published)


def as_markdown(rows: list[MethodRow]) -> str:
    """For a README."""
    lines = ["| method | speedup (95 %) | α | τ | β | needs | identical | as published, elsewhere |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        s, figures = row.speedup, " | ".join("" if value is None else f"{value:.2f}" for value in (row.alpha, row.tau, row.beta))
        lines.append(f"| {row.method} | {s.mean:.2f}× ({s.low:.2f}–{s.high:.2f}) | {figures} | {row.needs} | "
                     f"{row.identical} of {row.prompts} | {row.published} |")
    return "\n".join(lines) + "\n"
