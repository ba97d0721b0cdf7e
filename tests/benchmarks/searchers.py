"""Every searcher on one task with the same time to search, and the answers of all of them measured
beside one another on hold-out prompts.

The calibration text, the latency table and the evidence are prepared once and shared; each searcher
then searches, its finalists are raced on calibration prompts as `skipsearch tune` does it, and its
winner goes into one interleaved run with plain decoding and the others.

    python tests/benchmarks/searchers.py --task pycode --budget 15 --published
    build/published-pycode.json --out build/searchers-pycode.json

Thirty prompts cannot tell the best answers apart. The same answers can be measured again on several
hundred others, of the same modules:

    python tests/benchmarks/searchers.py --task pycode --searchers '' --answers
    build/searchers-pycode.json --of auto,clasp,published \
        --holdout tests/benchmarks/many/pycode/task.yaml --repeats 1 --out build/again-pycode.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from options import loaded, options

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.replay.evidence import gather
from skipsearch.replay.workload import Workload, workload
from skipsearch.searchers import Evidence, SearchProblem, searcher_names
from skipsearch.tasks import Task, load_task
from skipsearch.timing.interleaved import Timings, race
from skipsearch.tuning.calibration import build_replay_objective
from skipsearch.tuning.driver import REFINED_MASKS, study_fingerprint
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.race import race_candidates, select_finalists
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.study import StudyStore

Entry = tuple[str, Recipe, dict[str, Any]]


def silent(_: object) -> None:
    pass


def search(
    name: str,
    model: ModelAdapter,
    task: Task,
    evidence: Evidence,
    by_replay: ReplayObjective,
    calibration: Workload,
    budget: float,
    seed: int,
    studies: Path | None,
) -> Entry:
    """What `tune` does between its preparation and its confirmation. The objective is a searcher's
    own: it drops masks that are behind the best one that it has judged, and nobody may lean on what
    another searcher found."""
    by_replay = by_replay.afresh()
    ledger = None
    if studies:
        studies.mkdir(parents=True, exist_ok=True)
        where = studies / f"{task.name}-{name}.journal"
        where.unlink(missing_ok=True)
        ledger = StudyStore(where, study_fingerprint(model, task, "replay", False, "skip"))
    began = perf_counter()
    problem = SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed)
    found = Search(problem, by_replay, ledger, (), silent, began, budget, None)
    found.run(name)
    searched = perf_counter() - began
    finalists = select_finalists(found.best_trials(REFINED_MASKS), by_replay)
    winner, _ = race_candidates(model, calibration, finalists, seed, silent)
    about = {
        "trials": len(found.seen),
        "search_seconds": searched,
        "race_seconds": perf_counter() - began - searched,
        "predicted": winner.predicted,
        **described(winner.recipe, model.spec.n_layers),
    }
    print(f"{name}: {about}", flush=True)
    return name, winner.recipe, about


def published(path: Path, n_layers: int) -> Entry:
    """The answer of published_method.py."""
    found = json.loads(path.read_text())
    answer = found["answer"]
    mask = SkipMask(n_layers, tuple(answer["attn"]), tuple(answer["mlp"]))
    recipe = Recipe((Skip.of(mask, found["draft_length"], make_exit("adaptive", **found["exit"])),))
    return (
        "published",
        recipe,
        {
            "trials": len(found["evaluations"]),
            "distinct": found["distinct"],
            "search_seconds": found["seconds"],
            **described(recipe, n_layers),
        },
    )


def from_profile(path: Path) -> Entry:
    profile = load_profile(path)
    return (
        path.stem,
        profile.candidate,
        {
            "trials": profile.provenance.trials,
            "search_seconds": profile.provenance.search_seconds,
            **described(profile.candidate, profile.model.n_layers),
        },
    )


def answers(path: Path, names: Sequence[str], n_layers: int) -> list[Entry]:
    """What an earlier run of this script found."""
    found = {row["searcher"]: row for row in json.loads(path.read_text())["rows"]}
    missing = [name for name in names if "drafters" not in found.get(name, {})]
    assert not missing, f"{path} has no answer of {missing}"
    return [
        (
            name,
            Recipe.from_data(found[name]["drafters"]),
            {k: found[name][k] for k in ("trials", "search_seconds", "skipped", "recipe")},
        )
        for name in names
    ]


def described(recipe: Recipe, n_layers: int) -> dict[str, Any]:
    mask = recipe.mask(n_layers)
    return {"skipped": mask.n_skipped if mask else 0, "recipe": str(recipe)}


def difference(ours: Timings, theirs: Timings) -> tuple[float, float, float]:
    """How much faster ours is, in per cent, with its paired 95 % interval over prompts."""
    found = ours.speedup_over(theirs)
    return 100 * (found.mean - 1), 100 * (found.low - 1), 100 * (found.high - 1)


def measure(
    model: ModelAdapter, holdout: Workload, entries: Sequence[Entry], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """A row an entry. Where several searchers have the same answer, it is measured once."""
    found = [recipe for _, recipe, _ in entries]
    distinct = [answer for i, answer in enumerate(found) if answer not in found[:i]]
    plain, *measured = race(
        [Decoder(model), *(Decoder(model, answer) for answer in distinct)], holdout, repeats, seed
    )
    timings = [measured[distinct.index(answer)] for answer in found]
    single = [
        i for i, (name, *_) in enumerate(entries) if name in searcher_names() and name != "auto"
    ]
    best = max(single, key=lambda i: timings[i].speedup_over(plain).mean, default=None)
    rows = []
    for (name, recipe, about), t in zip(entries, timings, strict=True):
        reference = {s.prompt: s.generation.tokens for s in plain.samples}
        rows.append(
            {
                "searcher": name,
                **about,
                "ms_per_token": asdict(t.estimate()),
                "speedup": asdict(t.speedup_over(plain)),
                "alpha": t.stats.alpha,
                "tau": t.stats.tau,
                "identical": all(s.generation.tokens == reference[s.prompt] for s in t.samples),
                "drafters": recipe.as_data(),
            }
        )
        if best is not None:
            rows[-1] |= {
                "over_best_single": difference(t, timings[best]),
                "best_single": entries[best][0],
            }
    rows.append(
        {
            "searcher": "plain decoding",
            "ms_per_token": asdict(plain.estimate()),
            "speedup": {"mean": 1.0, "low": 1.0, "high": 1.0},
        }
    )
    return sorted(rows, key=lambda r: -r["speedup"]["mean"])


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'searcher':14} {'ms/token':>22} {'speedup':>20} {'trials':>7} {'search s':>9} "
        f"{'skipped':>8} "
        f"{'against the best single one':>28}  recipe"
    )
    for r in rows:
        ms, s = r["ms_per_token"], r["speedup"]
        apart = (
            "{:+.1f} % ({:+.1f} … {:+.1f})".format(*r["over_best_single"])
            if "over_best_single" in r
            else ""
        )
        print(
            f"{r['searcher']:14} {1e3 * ms['mean']:6.2f} "
            f"({1e3 * ms['low']:5.2f}–{1e3 * ms['high']:5.2f}) "
            f"{s['mean']:6.3f} ({s['low']:.3f}–{s['high']:.3f}) {r.get('trials', ''):>7} "
            f"{r.get('search_seconds', float('nan')):9.1f} "
            f"{r.get('skipped', ''):>8}  {apart:>28}  {r.get('recipe', '')}"
        )


def main() -> None:
    parser = options(__doc__, engine="auto")
    parser.add_argument("--searchers", default=",".join(searcher_names()))
    parser.add_argument("--budget", type=float, default=15, help="seconds of each search")
    parser.add_argument("--published", type=Path, help="what published_method.py wrote")
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        help="a profile to measure beside them, by its file's name",
    )
    parser.add_argument(
        "--answers", type=Path, help="what an earlier run wrote, whose answers are measured again"
    )
    parser.add_argument(
        "--of", default="auto", help="the searchers whose answers are, parted by commas"
    )
    parser.add_argument(
        "--holdout",
        default=None,
        help="a task whose hold-out prompts are measured on, the task's own by default: "
        "tests/benchmarks/many/TASK/task.yaml has more of them",
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--studies", type=Path, help="a folder for the journals, for `skipsearch report`"
    )
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    model, task = loaded(chosen), load_task(chosen.task)
    entries = [published(chosen.published, model.spec.n_layers)] if chosen.published else []
    entries += (
        answers(chosen.answers, chosen.of.split(","), model.spec.n_layers) if chosen.answers else []
    )
    entries += [from_profile(path) for path in chosen.profile]
    names = [name for name in chosen.searchers.split(",") if name]
    began = perf_counter()
    if names:
        calibration = workload(model, task, task.calibration)
        by_replay = build_replay_objective(model, calibration, silent)
        evidence = gather(by_replay.replay, by_replay.costs)
        print(f"prepared in {perf_counter() - began:.1f} s", flush=True)
        entries += [
            search(
                name,
                model,
                task,
                evidence,
                by_replay,
                calibration,
                chosen.budget,
                chosen.seed,
                chosen.studies,
            )
            for name in names
        ]
    measured_on = load_task(chosen.holdout) if chosen.holdout else task
    assert not {p.text for p in task.calibration} & {p.text for p in measured_on.holdout}
    rows = measure(
        model, workload(model, task, measured_on.holdout), entries, chosen.repeats, chosen.seed
    )
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(
        json.dumps(
            {
                "model": chosen.model,
                "task": task.name,
                "threads": chosen.threads,
                "budget": chosen.budget,
                "prompts": len(measured_on.holdout),
                "rows": rows,
            }
        )
    )
    show(rows)


if __name__ == "__main__":
    main()
