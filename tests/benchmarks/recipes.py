"""Recipes of every shape on several tasks: the gain of each on hold-out prompts.

For each task, the search of `tune` runs once. Then the best recipe of each shape and plain decoding
decode the same hold-out prompts in turn:

    lookup               copies from the text alone
    skip                 skips sub-layers and reads the others and the head completely; with
                         `--masks-alone`, after a search of its own
    skip, reading less   fewer bits, fewer tokens of the vocabulary or fewer sub-layers
    lookup, then …       lookup first, then one of the two

    python tests/benchmarks/recipes.py --model FOLDER --dtype bfloat16 --threads 2 --budget 15 \
        --task gsm8k --data gsm8k.jsonl --spec-bench question.jsonl --out docs/results/FILE.json

`--task` may be given several times. `--data FILE` is the text of the task before it.
`--spec-bench FILE` adds a task for each part of Spec-Bench. `--also NAME=FOLDER` adds the trained
drafts of a folder. `--predictions 24` decodes calibration prompts with that many recipes instead,
and compares measured with predicted times. `--guard PROFILE` decodes text that a profile was not
made for, with the guard and without: the task's own, its words shuffled, and random tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from options import load_chosen_model, make_parser
from scipy.stats import spearmanr

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL
from skipsearch.decoding import Decoder
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.searchers import SearchProblem
from skipsearch.tasks import Task, load_task
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import Calibration, calibrate, load_trained_drafts
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.driver import REFINED_MASKS, SearchOutcome, search_masks
from skipsearch.tuning.events import Notice, ignore_event
from skipsearch.tuning.race import estimate_longest_decoding
from skipsearch.tuning.schedule import Schedule
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.settings import TuneSettings
from skipsearch.tuning.trained_candidates import TrainedCandidates

# Spec-Bench's file names a category for each question. The eight of MT-bench are one part.
SPEC_BENCH_PARTS = ("translation", "summarization", "qa", "math_reasoning", "rag")
SPEC_BENCH_MANIFEST = """\
name: {name}
version: 1
description: the part {part} of Spec-Bench, first turns
source: {{kind: jsonl, path: prompts.jsonl}}
template: "{{prompt}}"
chat: true
max_new_tokens: 128
max_prompt_tokens: 3072
sampling: {{temperature: 0.0, top_p: 1.0, top_k: 0}}
calibration: 20
holdout: 20
seed: 0
end_on_repeat: loop
"""


def write_spec_bench_tasks(questions: Path, folder: Path) -> Iterator[Path]:
    """Write a task folder for each part of Spec-Bench's question file; yield the folders."""
    parts = defaultdict[str, list[str]](list)
    for line in questions.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        part = row["category"] if row["category"] in SPEC_BENCH_PARTS else "chat"
        parts[part].append(row["turns"][0])
    for part, prompts in parts.items():
        name = f"specbench-{part}"
        task_folder = folder / name
        task_folder.mkdir(parents=True, exist_ok=True)
        (task_folder / "task.yaml").write_text(SPEC_BENCH_MANIFEST.format(name=name, part=part))
        rows = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (task_folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
        yield task_folder


def print_notice(event: object) -> None:
    """Print a notice of the search; say nothing of other events."""
    if isinstance(event, Notice):
        print(f"  {event.sentence}", flush=True)


def search(
    model: ModelAdapter,
    workload: Workload,
    seed: int,
    drafters: str = "auto",
    budget_s: float | None = None,
    trials: int | None = None,
) -> tuple[Calibration, SearchOutcome]:
    """Do what `tune --drafters` does before its race. workload: calibration prompts."""
    settings = TuneSettings(
        "auto", trials, budget_s, "replay", seed, False, drafters, frozenset(), None, False
    )
    schedule = Schedule(budget_s, perf_counter())
    longest = estimate_longest_decoding(model, workload, n_holdout=0)
    calibration = calibrate(model, workload, (), settings, print_notice, schedule, longest)
    outcome = search_masks(
        model, calibration, settings, schedule, None, print_notice, lambda search_s, refine_s: None
    )
    return calibration, outcome


def search_masks_alone(calibration: Calibration, budget_s: float, seed: int) -> list[SkipMask]:
    """Return the best masks of drafts that read the rest of the model completely."""
    objective = calibration.objective.fresh_copy()
    n_layers = objective.replay.model.spec.n_layers
    evidence = collect_evidence(objective.replay, objective.costs)
    problem = SearchProblem(n_layers, evidence=evidence, seed=seed)
    alone = Search(problem, objective, None, (), ignore_event, perf_counter(), budget_s, None)
    alone.run("auto")
    return [trial.mask for trial in alone.best_trials(REFINED_MASKS)]


def list_best_recipes(
    calibration: Calibration, outcome: SearchOutcome, masks_alone: Sequence[SkipMask] = ()
) -> dict[str, Candidate]:
    """Return the recipe of each shape that is predicted to be the fastest.

    masks_alone: those of `search_masks_alone`; (): no recipe skips sub-layers alone.
    """
    everything, n_layers = calibration.objective, calibration.objective.replay.model.spec.n_layers
    search = outcome.objective
    searched = {SkipMask(n_layers): search.leading}
    searched |= {trial.mask: search.objective_of(trial.recipe) for trial in outcome.best}
    recipes = {"lookup": everything.best_lookup()}
    for after_lookup in (False, True):
        prefix = "lookup, then " if after_lookup else ""
        skipping = [
            everything.best_recipe(mask, after_lookup, fine=True)
            for mask in masks_alone
            if mask.n_skipped
        ]
        reading_less = [
            objective.best_recipe(mask, after_lookup, fine=True)
            for mask, objective in searched.items()
            if mask.n_skipped or not objective.reading.is_everything
        ]
        for candidate in outcome.other_readings:
            last, is_after_lookup = (
                candidate.recipe.drafters[-1],
                len(candidate.recipe.drafters) > 1,
            )
            reads_less = isinstance(last, Skip) and last.reading != READ_ALL
            if reads_less and is_after_lookup == after_lookup:
                reading_less.append(candidate)
        for name, candidates in (("skip", skipping), ("skip, reading less", reading_less)):
            if candidates:
                recipes[prefix + name] = min(candidates, key=lambda c: c.seconds_per_token)
    return recipes


def list_trained_recipes(
    model: ModelAdapter, calibration: Calibration, folders: Sequence[str]
) -> dict[str, Candidate]:
    """Return the best recipes of trained drafts. folders: `NAME=FOLDER` of each."""
    recipes = dict[str, Candidate]()
    candidates = TrainedCandidates(calibration.objective)
    for name, _, folder in (entry.partition("=") for entry in folders):
        for draft in load_trained_drafts(model, Path(folder), print_notice):
            for after_lookup in (False, True):
                candidate = candidates.best(draft, after_lookup)
                recipes[f"{name}: {candidate.recipe.shape}"] = replace(
                    candidate, module_folders=(Path(folder),)
                )
    return recipes


def measure(
    model: ModelAdapter, task: Task, recipes: Mapping[str, Candidate], repeats: int, seed: int
) -> dict[str, Any]:
    """Decode the hold-out prompts with all recipes in turn. Equal recipes decode once."""
    workload = make_workload(model, task, task.holdout)
    distinct = list(dict.fromkeys(candidate.recipe for candidate in recipes.values()))
    first = {candidate.recipe: candidate for candidate in reversed(recipes.values())}
    plain, *timings = time_interleaved(
        [Decoder(model), *(first[recipe].make_decoder(model) for recipe in distinct)],
        workload,
        repeats,
        seed,
    )
    by_recipe = dict(zip(distinct, timings, strict=True))
    rows = [
        describe(name, candidate, by_recipe[candidate.recipe], plain)
        for name, candidate in recipes.items()
    ]
    return {
        "task": task.name,
        "prompts": plain.n_prompts,
        "plain_ms_per_token": {k: 1e3 * v for k, v in asdict(plain.estimate()).items()},
        "rows": rows,
    }


def describe(name: str, candidate: Candidate, timings: Timings, plain: Timings) -> dict[str, Any]:
    """Return a row of the table, for JSON."""
    texts = {sample.prompt_index: sample.generation.tokens for sample in plain.samples}
    last = candidate.recipe.drafters[-1]
    return {
        "name": name,
        "recipe": str(candidate.recipe),
        "reads": str(last.reading) if isinstance(last, Skip) else None,
        "predicted": candidate.predicted_speedup,
        "speedup": asdict(timings.speedup_over(plain)),
        "alpha": timings.stats.alpha,
        "tau": timings.stats.tau,
        "identical": sum(s.generation.tokens == texts[s.prompt_index] for s in timings.samples),
        "of": len(timings.samples),
    }


def compare_predictions(
    model: ModelAdapter, calibration: Calibration, outcome: SearchOutcome, count: int, seed: int
) -> dict[str, Any]:
    """Compare measured with predicted times of recipes, on the prompts they were predicted on."""
    objectives = (calibration.objective, outcome.objective.leading)
    best = outcome.best[0].mask
    masks = [trial.mask for trial in outcome.best[:4]]
    masks += [best.flip(*range(k, len(best.bits), 9)) for k in range(max(0, count // 4 - 4))]
    candidates = [
        objective.best_recipe(mask, after_lookup)
        for objective in objectives
        for after_lookup in (False, True)
        for mask in masks
        if mask.n_skipped or not objective.reading.is_everything
    ][: count - 2]
    candidates += [
        calibration.objective.predict_lookup(spec)
        for spec, _ in calibration.objective.ranked_lookups[:2]
    ]
    plain, *timings = time_interleaved(
        [Decoder(model), *(candidate.make_decoder(model) for candidate in candidates)],
        calibration.workload,
        1,
        seed,
    )
    rows = [describe(str(c.recipe), c, t, plain) for c, t in zip(candidates, timings, strict=True)]
    errors = sorted(abs(row["speedup"]["mean"] / row["predicted"] - 1) for row in rows)
    rank = spearmanr(
        [row["predicted"] for row in rows], [row["speedup"]["mean"] for row in rows]
    ).statistic
    print(
        f"{len(rows)} recipes: predictions miss by {100 * errors[len(errors) // 2]:.1f} % in the "
        f"median and {100 * errors[-1]:.1f} % at most; rank correlation {rank:.3f}"
    )
    return {"rows": rows, "rank_correlation": float(rank)}


def measure_guard(model: ModelAdapter, task: Task, path: Path, seed: int) -> dict[str, Any]:
    """Decode text that a profile was not made for, with its guard and without."""
    profile, chance = load_profile(path), random.Random(seed)
    own = make_workload(model, task, task.holdout)
    shuffled = [
        replace(prompt, text=" ".join(chance.sample(words := prompt.text.split(), len(words))))
        for prompt in task.holdout
    ]
    random_ids = tuple(
        tuple(chance.randrange(model.spec.vocab_size) for _ in range(60)) for _ in own.prompt_ids
    )
    result = {}
    for name, workload in (
        (task.name, own),
        ("shuffled words", make_workload(model, task, shuffled)),
        ("random tokens", replace(own, prompt_ids=random_ids)),
    ):
        decoders = [Decoder(model), Decoder(model, profile)]
        decoders.append(Decoder(model, profile, drafter_costs=()))
        plain, guarded, unguarded = time_interleaved(decoders, workload, 1, seed)
        result[name] = {
            "guarded": asdict(guarded.speedup_over(plain)),
            "unguarded": asdict(unguarded.speedup_over(plain)),
            "prompts": plain.n_prompts,
        }
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    return result


def format_interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:.3f} ({estimate['low']:.3f}–{estimate['high']:.3f})"


def print_table(measured: Mapping[str, Any]) -> None:
    """Print the rows of one task."""
    plain = measured["plain_ms_per_token"]["mean"]
    print(f"{measured['task']}: {measured['prompts']} prompts, plain {plain:.2f} ms a token")
    for row in measured["rows"]:
        print(
            f"  {row['name']:32} {format_interval(row['speedup'])}"
            f"  predicted {row['predicted']:.2f}  α {row['alpha'] or 0:.2f}  "
            f"identical {row['identical']}/{row['of']}  {row['recipe'][:90]}",
            flush=True,
        )


class AddTask(argparse.Action):
    """Collects (task, data) pairs: `--data` belongs to the `--task` before it."""

    def __call__(self, parser: Any, args: Any, value: Any, option: str | None = None) -> None:
        tasks: list[tuple[str, Path | None]] = list(getattr(args, "tasks", None) or [])
        if option == "--task":
            tasks.append((value, None))
        elif tasks:
            tasks[-1] = (tasks[-1][0], Path(value))
        else:
            parser.error("--data comes after the --task that it is text for")
        args.tasks = tasks


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, engine="native", task=False)
    parser.add_argument("--task", action=AddTask, default=None)
    parser.add_argument("--data", action=AddTask, default=None)
    parser.add_argument("--spec-bench", type=Path, metavar="FILE")
    parser.add_argument("--budget", type=float, default=120, help="seconds of each `tune`")
    parser.add_argument("--prompts", type=int, help="hold-out prompts of a task, all if not given")
    parser.add_argument("--max-new-tokens", type=int, help="instead of the task's own")
    parser.add_argument("--greedy", action="store_true", help="decode tasks that sample greedily")
    parser.add_argument(
        "--masks-alone", action="store_true", help="measure drafts that skip and read the rest, too"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--predictions", type=int, default=0)
    parser.add_argument("--guard", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def load_tasks(args: argparse.Namespace) -> Iterator[Task]:
    """Yield the tasks, with the lengths and the number of prompts that the options name."""
    tasks = [(name, data) for name, data in getattr(args, "tasks", None) or []]
    if args.spec_bench:
        folders = write_spec_bench_tasks(args.spec_bench, Path("build/spec-bench"))
        tasks += [(str(folder), None) for folder in folders]
    for name, data in tasks or [("pycode", None)]:
        task = load_task(name, data=data)
        task = replace(task, holdout=task.holdout[: args.prompts])
        if args.max_new_tokens:
            task = replace(task, max_new_tokens=args.max_new_tokens)
        if args.greedy:
            task = replace(task, sampling=task.sampling.model_copy(update={"temperature": 0.0}))
        yield task


def run_task(model: ModelAdapter, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options ask for, for one task."""
    if args.guard:
        return measure_guard(model, task, args.guard, args.seed)
    started = perf_counter()
    workload = make_workload(model, task, task.calibration)
    calibration, outcome = search(model, workload, args.seed, budget_s=args.budget)
    print(f"{task.name}: searched for {perf_counter() - started:.0f} s", flush=True)
    if args.predictions:
        return compare_predictions(model, calibration, outcome, args.predictions, args.seed)
    masks_alone = (
        search_masks_alone(calibration, args.budget, args.seed) if args.masks_alone else ()
    )
    recipes = list_best_recipes(calibration, outcome, masks_alone)
    recipes |= list_trained_recipes(model, calibration, args.also)
    measured = measure(model, task, recipes, args.repeats, args.seed)
    print_table(measured)
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    model = load_chosen_model(args)
    result: dict[str, Any] = {
        "model": model.spec.id,
        "dtype": model.spec.dtype_name,
        "quantization": model.spec.quantization,
        "engine": model.spec.engine,
        "threads": args.threads,
        "tasks": [],
    }
    for task in load_tasks(args):
        result["tasks"].append(run_task(model, task, args))
        if args.out:  # after each task: an interrupted run leaves what it measured
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
