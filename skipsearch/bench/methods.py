"""The table of methods: every way to draft that works here, each at its best settings, beside plain decoding in one interleaved run.

Settings are chosen on a task's calibration half and measured on its hold-out half. What was published stands beside it: on other models,
machines and text, so the columns are not to be compared, only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from skipsearch import tuning
from skipsearch.bench.hugging_face import HFGenerate
from skipsearch.decoding import Decoder, Generation
from skipsearch.drafters.skip import Skip
from skipsearch.evaluation.evidence import gather
from skipsearch.evaluation.objectives import CHOOSING, SHAPES, TRAINED, Found, ReplayObjective
from skipsearch.evaluation.prompts import Workload, workload
from skipsearch.evaluation.wall import Timings, race
from skipsearch.exits import make_exit
from skipsearch.finals import CHOOSING_PROMPTS, Finalist, choosing, run_off
from skipsearch.machine import this_machine
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.files import find, modules_in, read_header, sha256
from skipsearch.recipe import Recipe
from skipsearch.search import Listener, Progress, Search, Stage
from skipsearch.searchers import SearchProblem
from skipsearch.stats import DecodeStats, Estimate
from skipsearch.tasks.values import Task

TRIALS = 60   # masks that each searcher may judge
# Searchers of the papers, as offline searches, and what their own systems report.
SEARCHED = {"clasp": "", "asd": "", "s3d": "", "gp": "1.5–1.6× (13B)", "auto": ""}
THEIRS = {"hf-generate": "Hugging Face, plain", "hf-early-exit": "Hugging Face, early exit"}
PUBLISHED = {"draft & verify": "1.5–1.6× (13B)", "lookup": "1.66× (7B, Spec-Bench)", "clasp": "1.24× (8B) to 1.67× (70B)",
             "asd": "1.44× (13B, one mask a prompt)", "swift": "1.41× (13B), 1.48× (70B)", "kangaroo": "1.50× (7B), 1.44× (13B)",
             "s3d": "1.76× (7B int8)"}


@dataclass(frozen=True)
class MethodRow:
    """One method. needs: what it takes before the first token, in words. beta: a draft step over a plain pass, as it was measured.

    published: what its paper reports, on other models and machines. A method of another engine has None where only ours know a figure.
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
        """What `as_dict` gave, as JSON has it."""
        return cls(**row | {"speedup": Estimate(**row["speedup"])})


def methods(model: ModelAdapter, task: Task, folders: Sequence[Path] = (), prompts: int | None = None, seed: int = 0,
            listen: Listener = lambda event: None, theirs: ModelAdapter | None = None, trials: int = TRIALS) -> list[MethodRow]:
    """folders: of trained parts, which take part alone and, the best of them, behind lookup. prompts: of the hold-out half, all if None.
    theirs: the same model under the engine hf, by which Hugging Face's own ways to generate take part, too.
    trials: masks that each searcher may judge.

    Raises: SearchError, TaskError, ModuleError.
    """
    trained = [(folder, draft) for folder in folders for draft in tuning.trained_drafts(model, folder, listen)]
    shapes = (*SHAPES["auto"], *(shape for kind in TRAINED for shape in (kind, f"lookup,{kind}")))
    calibration = workload(model, task, task.calibration)
    objective = tuning.prepare(model, calibration, listen, shapes=shapes)
    plain = objective.costs.verify[0]

    def finalist(found: Found) -> Finalist:
        return Finalist(found.recipe, plain / found.seconds_per_token, tuple(found.prices(plain)), tuple(folders), found.prediction)

    chosen = {"plain": (Finalist(Recipe(), 1.0), "nothing"), "lookup": (finalist(objective.best_lookup()), "nothing")}
    everything = [objective.best_lookup()]
    evidence = gather(objective.replay, objective.costs)
    for name in SEARCHED:
        listen(Stage(f"searching a mask with {name}"))
        began = perf_counter()
        mask = _searched(model, objective, name, evidence, seed, trials)
        needs = f"{perf_counter() - began:.0f} s of search"
        found = objective.best_recipe(mask, "skip", fine=True)
        chosen[f"mask by {name}"] = (finalist(found), needs)
        everything += [found, objective.best_recipe(mask, "lookup,skip", fine=True)]
        if name == "gp":
            adaptive = make_exit("adaptive", across_requests=True)
            chosen["draft & verify"] = (Finalist(Recipe((Skip.of(mask, tuning.MAX_DRAFT, adaptive),)), None), needs)
    for kind in CHOOSING:
        racing = choosing(kind, kind, objective, calibration, listen)
        listen(Stage(f"racing settings of {kind}"))
        fastest, _ = run_off(model, calibration, racing, seed, listen, CHOOSING_PROMPTS)
        chosen[kind] = (fastest, fastest.recipe.drafters[-1].about.needs)
    for folder, draft in trained:
        card = read_header(find(draft.ref, [folder])).card
        needs = f"{card.trained.seconds / 60:.0f} min of training, {draft.ref.parameters / 1e6:.2g} M values beside the model's"
        alone = objective.best_trained(draft, draft.kind)
        chosen[f"{draft.kind} ({Path(draft.ref.file).stem})"] = (finalist(alone), needs)
        everything += [alone, objective.best_trained(draft, f"lookup,{draft.kind}")]
    best = sorted(everything, key=lambda found: found.seconds_per_token)[:tuning.FINALISTS]
    listen(Stage("racing the best recipes"))
    chosen["best recipe"] = (run_off(model, calibration, [finalist(found) for found in best], seed, listen)[0], "all of these")
    return _measured(model, chosen, workload(model, task, task.holdout[:prompts]), seed, listen, theirs)


def _searched(model: ModelAdapter, objective: ReplayObjective, name: str, evidence: Any, seed: int, trials: int) -> SkipMask:
    problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed)
    search = Search(problem, objective.afresh(), None, (), lambda event: None, perf_counter(), None, trials)
    search.run(name)
    return search.finalists(1)[0].mask


class _Theirs:
    """Hugging Face's `generate` in a race: as many tokens as plain decoding gives, since it knows no end at a repeat."""

    learning = False

    def __init__(self, name: str, model: ModelAdapter, plain: Decoder):
        self.generator, self.plain = HFGenerate(name, model), plain

    def generate(self, prompt: Sequence[int], most: int, **settings: Any) -> Generation:
        count = len(self.plain.generate(prompt, most, **settings).tokens)
        tokens, first, others = self.generator.run(prompt, count)
        return Generation(tokens, "length", DecodeStats(tokens=len(tokens), round_tokens=len(tokens) - 1, prefill_seconds=first,
                                                        decode_seconds=others))


def _measured(model: ModelAdapter, chosen: dict[str, tuple[Finalist, str]], holdout: Workload, seed: int, listen: Listener,
              theirs: ModelAdapter | None) -> list[MethodRow]:
    listen(Stage("decoding hold-out prompts with every method in turn"))
    recipes = {finalist.recipe: finalist for finalist, _ in reversed(chosen.values())}   # equal recipes are measured once
    decoders = [finalist.decoder(model) for finalist in recipes.values()]
    foreign = [_Theirs(name, theirs, Decoder(model)) for name in THEIRS] if theirs is not None else []
    timings = race([*decoders, *cast("list[Decoder]", foreign)], holdout, 1, seed, lambda done, total: listen(Progress(done, total)))
    ours = dict(zip(recipes, timings[:len(recipes)], strict=True))
    rows = [_row(name, str(finalist.recipe), needs, ours[finalist.recipe], ours[Recipe()]) for name, (finalist, needs) in chosen.items()]
    others = [_row(title, name, "nothing", found, ours[Recipe()])
              for (name, title), found in zip(THEIRS.items(), timings[len(recipes):], strict=False)]
    return [*rows[:-1], *others, rows[-1]]


def _row(name: str, recipe: str, needs: str, ours: Timings, plain: Timings) -> MethodRow:
    reference = {sample.prompt: sample.generation.tokens for sample in plain.samples}
    stats = ours.stats
    beta = stats.draft_seconds / stats.drafted / plain.seconds_per_token if stats.drafted else None
    published = PUBLISHED.get(name.partition(" (")[0]) or SEARCHED.get(name.removeprefix("mask by "), "")
    return MethodRow(name, recipe, needs, ours.speedup_over(plain), stats.alpha, stats.tau if stats.rounds else None, beta,
                     sum(sample.generation.tokens == reference[sample.prompt] for sample in ours.samples), ours.prompts, published)


def with_conditions(model: ModelAdapter, task: str, folders: Sequence[Path], rows: Sequence[MethodRow]) -> dict[str, Any]:
    """The table as plain data, with what it was measured with: whoever shows it later can tell whether that is still what there is."""
    machine, spec = this_machine(model.spec.device), model.spec
    return {"model": spec.id, "weights_sha256": spec.weights_sha256, "dtype": spec.dtype_name, "engine": spec.engine, "task": task,
            "machine": machine.description, "modules": {path.name: sha256(path) for folder in folders for path in modules_in(folder)},
            "rows": [row.as_dict() for row in rows]}


def as_markdown(rows: Sequence[MethodRow]) -> str:
    """For a README."""
    lines = ["| method | speedup (95 %) | α | τ | β | needs | identical | as published, elsewhere |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        s, figures = row.speedup, " | ".join("" if value is None else f"{value:.2f}" for value in (row.alpha, row.tau, row.beta))
        lines.append(f"| {row.method} | {s.mean:.2f}× ({s.low:.2f}–{s.high:.2f}) | {figures} | {row.needs} | "
                     f"{row.identical} of {row.prompts} | {row.published} |")
    return "\n".join(lines) + "\n"
