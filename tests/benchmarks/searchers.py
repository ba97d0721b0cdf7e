r"""Compare searchers on one task, each with the same time to search.

The calibration text, the latency table and the evidence are prepared once and shared. Each searcher
then searches, its finalists race on calibration prompts as in `tune`, and its winner takes part in
one interleaved run with plain decoding and the other winners on hold-out prompts:

    python tests/benchmarks/searchers.py --task pycode --budget 15 \
        --published build/published-pycode.json --out build/searchers-pycode.json

Thirty prompts cannot tell the best winners apart. They can be measured again on several hundred
other prompts:

    python tests/benchmarks/searchers.py --task pycode --searchers '' \
        --winners build/searchers-pycode.json --of auto,clasp,published \
        --holdout tests/benchmarks/many/pycode/task.yaml --repeats 1 --out build/again-pycode.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from options import load_chosen_model, make_parser

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.decoding.draft_models import load_draft_models
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.reference_text import MIN_TEXTS
from skipsearch.replay.segments import MAX_POSITIONS
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.searchers import SearchProblem, searcher_names
from skipsearch.tasks import Task, load_task
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import DEFAULT_TEXT_S, CalibrationLimits, build_replay_objective
from skipsearch.tuning.driver import REFINED_MASKS, study_fingerprint
from skipsearch.tuning.events import ignore_event
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.race import drop_hopeless, race_candidates, select_finalists
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.study import StudyStore

Winner = tuple[str, Recipe, dict[str, Any]]  # (name, recipe, further columns of its row)


def run_searchers(
    names: Sequence[str], model: ModelAdapter, task: Task, args: argparse.Namespace
) -> Iterator[Winner]:
    """Yield the winner of each searcher. No searcher uses what another one judged."""
    began = perf_counter()
    calibration = make_workload(model, task, task.calibration)
    objective = build_replay_objective(
        model,
        calibration,
        ignore_event,
        shapes=args.shapes.split(";"),
        limits=CalibrationLimits(args.text_s, args.texts, args.positions),
    )
    calibration = calibration.head(len(objective.replay.texts))
    evidence = collect_evidence(objective.replay, objective.costs)
    print(f"prepared in {perf_counter() - began:.1f} s", flush=True)
    for name in names:
        own_objective = objective.fresh_copy()
        store = open_study(args.studies, name, model, task) if args.studies else None
        problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=args.seed)
        began = perf_counter()
        search = Search(problem, own_objective, store, (), ignore_event, began, args.budget, None)
        search.run(name)
        searched_s = perf_counter() - began
        finalists = select_finalists(
            search.best_trials(REFINED_MASKS), JointObjective([own_objective]), own_objective
        )
        winner = finalists[0]
        if not args.no_race:
            winner, _ = race_candidates(
                model, calibration, drop_hopeless(finalists), args.seed, ignore_event
            )
        best = search.best_trials(1)[0]
        columns = {
            "predicted_alpha": best.alpha,
            "beta": best.beta,
            "trials": len(search.judged_trials),
            "search_seconds": searched_s,
            "race_seconds": perf_counter() - began - searched_s,
            "predicted": winner.predicted_speedup,
            **describe_recipe(winner.recipe, model.spec.n_layers),
        }
        print(f"{name}: {columns}", flush=True)
        yield name, winner.recipe, columns


def open_study(folder: Path, name: str, model: ModelAdapter, task: Task) -> StudyStore:
    """Open a new journal for a searcher."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{task.name}-{name}.journal"
    path.unlink(missing_ok=True)
    return StudyStore(path, study_fingerprint(model, task, "replay", False, "skip"))


def read_published_winner(path: Path, n_layers: int) -> Winner:
    """Return the winner in a file of published_method.py."""
    data = json.loads(path.read_text())
    mask = SkipMask(n_layers, tuple(data["answer"]["attn"]), tuple(data["answer"]["mlp"]))
    exit_policy = make_exit("adaptive", **data["exit"])
    recipe = Recipe((Skip.from_mask(mask, data["draft_length"], exit_policy),))
    columns = {
        "trials": len(data["evaluations"]),
        "distinct": data["distinct"],
        "search_seconds": data["seconds"],
        **describe_recipe(recipe, n_layers),
    }
    return "published", recipe, columns


def read_profile(path: Path) -> Winner:
    """Return the recipe of a profile."""
    profile = load_profile(path)
    columns = {
        "trials": profile.provenance.trials,
        "search_seconds": profile.provenance.search_seconds,
        **describe_recipe(profile.recipe, profile.model.n_layers),
    }
    return path.stem, profile.recipe, columns


def read_winners(path: Path, names: Sequence[str]) -> list[Winner]:
    """Return winners that an earlier run of this script wrote."""
    rows = {row["searcher"]: row for row in json.loads(path.read_text())["rows"]}
    missing = [name for name in names if "drafters" not in rows.get(name, {})]
    assert not missing, f"{path} has no winner of {missing}"
    kept = ("trials", "search_seconds", "skipped", "recipe")
    return [
        (name, Recipe.from_data(rows[name]["drafters"]), {key: rows[name][key] for key in kept})
        for name in names
    ]


def describe_recipe(recipe: Recipe, n_layers: int) -> dict[str, Any]:
    """Return the columns of a recipe."""
    mask = recipe.mask(n_layers)
    return {"skipped": mask.n_skipped if mask else 0, "recipe": str(recipe)}


def compare(ours: Timings, theirs: Timings) -> tuple[float, float, float]:
    """Return by how many per cent ours is faster, with its paired 95 % interval over prompts."""
    speedup = ours.speedup_over(theirs)
    return 100 * (speedup.mean - 1), 100 * (speedup.low - 1), 100 * (speedup.high - 1)


def measure(
    model: ModelAdapter, holdout: Workload, winners: Sequence[Winner], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Return a row for each winner, the fastest first. Equal recipes are measured once."""
    recipes = [recipe for _, recipe, _ in winners]
    distinct = [recipe for i, recipe in enumerate(recipes) if recipe not in recipes[:i]]
    _draft_models = [load_draft_models(recipe, model) for recipe in distinct]
    decoders = [Decoder(model), *(Decoder(model, recipe) for recipe in distinct)]
    plain, *measured = time_interleaved(decoders, holdout, repeats, seed)
    timings = [measured[distinct.index(recipe)] for recipe in recipes]
    single = [
        i for i, (name, *_) in enumerate(winners) if name in searcher_names() and name != "auto"
    ]
    best = max(single, key=lambda i: timings[i].speedup_over(plain).mean, default=None)
    reference = {s.prompt_index: s.generation.tokens for s in plain.samples}
    rows = []
    for (name, recipe, columns), timing in zip(winners, timings, strict=True):
        row = {
            "searcher": name,
            **columns,
            "ms_per_token": asdict(timing.estimate()),
            "speedup": asdict(timing.speedup_over(plain)),
            "alpha": timing.stats.alpha,
            "tau": timing.stats.tau,
            "identical": all(
                s.generation.tokens == reference[s.prompt_index] for s in timing.samples
            ),
            "drafters": recipe.as_data(),
        }
        if best is not None:
            row["over_best_single"] = compare(timing, timings[best])
            row["best_single"] = winners[best][0]
        rows.append(row)
    rows.append(
        {
            "searcher": "plain decoding",
            "ms_per_token": asdict(plain.estimate()),
            "speedup": {"mean": 1.0, "low": 1.0, "high": 1.0},
        }
    )
    return sorted(rows, key=lambda row: -row["speedup"]["mean"])


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows."""
    print(
        f"{'searcher':14} {'ms/token':>22} {'speedup':>20} {'predicted':>9} {'α':>5} {'β':>5} "
        f"{'trials':>7} {'search s':>9} {'skipped':>8} {'over the best single one':>28}  recipe"
    )
    for row in rows:
        ms, speedup, over_best = row["ms_per_token"], row["speedup"], ""
        if "over_best_single" in row:
            over_best = "{:+.1f} % ({:+.1f} … {:+.1f})".format(*row["over_best_single"])
        print(
            f"{row['searcher']:14} {1e3 * ms['mean']:6.2f} "
            f"({1e3 * ms['low']:5.2f}–{1e3 * ms['high']:5.2f}) "
            f"{speedup['mean']:6.3f} ({speedup['low']:.3f}–{speedup['high']:.3f}) "
            f"{row.get('predicted') or float('nan'):9.3f} {row.get('alpha', float('nan')):5.2f} "
            f"{row.get('beta', float('nan')):5.2f} "
            f"{row.get('trials', ''):>7} {row.get('search_seconds', float('nan')):9.1f} "
            f"{row.get('skipped', ''):>8}  {over_best:>28}  {row.get('recipe', '')}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, engine="auto")
    parser.add_argument("--searchers", default=",".join(searcher_names()))
    parser.add_argument("--budget", type=float, default=15, help="seconds of each search")
    parser.add_argument("--data", help="a file with the text of a published task")
    parser.add_argument("--chat", action="store_true", help="prompts are requests to a chat model")
    parser.add_argument(
        "--shapes", default="skip", help='allowed recipes, such as "lookup,skip;skip"'
    )
    parser.add_argument(
        "--text-s", type=float, default=DEFAULT_TEXT_S, help="seconds of reference text"
    )
    parser.add_argument("--texts", type=int, default=MIN_TEXTS, help="texts at least")
    parser.add_argument("--positions", type=int, default=MAX_POSITIONS, help="to judge masks on")
    parser.add_argument("--no-race", action="store_true", help="the best prediction wins")
    parser.add_argument("--n-holdout", type=int, help="measure so many hold-out prompts at most")
    parser.add_argument("--published", type=Path, help="the --out of published_method.py")
    parser.add_argument(
        "--profile", type=Path, action="append", default=[], help="a profile to measure, too"
    )
    parser.add_argument("--winners", type=Path, help="the --out of an earlier run")
    parser.add_argument("--of", default="auto", help="which of its winners, separated by commas")
    parser.add_argument("--holdout", help="a task whose hold-out prompts replace the task's own")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--studies", type=Path, help="a folder for journals")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = load_chosen_model(args)
    task = load_task(args.task, data=args.data, chat=args.chat)
    winners = list[Winner]()
    if args.published:
        winners.append(read_published_winner(args.published, model.spec.n_layers))
    if args.winners:
        winners += read_winners(args.winners, args.of.split(","))
    winners += [read_profile(path) for path in args.profile]
    if names := [name for name in args.searchers.split(",") if name]:
        winners += run_searchers(names, model, task, args)
    measured_task = load_task(args.holdout) if args.holdout else task
    assert not {p.text for p in task.calibration} & {p.text for p in measured_task.holdout}
    holdout = make_workload(model, task, measured_task.holdout[: args.n_holdout])
    rows = measure(model, holdout, winners, args.repeats, args.seed)
    conditions = {
        "model": args.model,
        "task": task.name,
        "threads": args.threads,
        "budget": args.budget,
        "prompts": len(holdout.prompt_ids),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(conditions | {"rows": rows}))
    print_table(rows)


if __name__ == "__main__":
    main()
