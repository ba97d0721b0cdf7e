"""Recipes of every shape on one task: what each brings on hold-out prompts, and how far predictions
can be trusted.

Masks are searched twice: for the positions that lookup leaves over, and for all positions
(`alone`). The best recipe of each shape, and the one that `tune` would choose, then decode hold-out
prompts beside plain decoding, in one interleaved run:

    python tests/benchmarks/recipes.py --task pycode --threads 1 --holdout
    tests/benchmarks/many/pycode/task.yaml --out build/pycode.json

`--also bundled=skipsearch/demo/profiles/demo/modules` adds what lies trained in a folder, alone and
behind lookup; it may be given again. `--predictions 24` decodes calibration prompts with so many
recipes of all shapes instead, and compares measured with predicted times. `--guard pycode.yaml`
decodes other text with the recipe of a profile: the task's own prompts, their words shuffled, and
random tokens."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from options import loaded, options
from scipy.stats import spearmanr

from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial
from skipsearch.decoding import Decoder
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.replay import Replay
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.searchers import SearchProblem
from skipsearch.tasks import Task, load_task
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import build_replay_objective, load_trained_drafts
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.driver import REFINED_MASKS
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.race import race_candidates, select_finalists
from skipsearch.tuning.recipe_shape import RECIPE_SHAPES
from skipsearch.tuning.search_loop import Search

BASELINES = (
    "lookup",
    "skip alone",
    "lookup,skip",
    "auto",
)  # over which every recipe is compared, beside plain decoding


def silent(_: object) -> None:
    pass


@dataclass(frozen=True)
class Searched:
    objective: ReplayObjective
    trials: list[Trial]
    seconds: float


def searched(
    model: ModelAdapter, calibration: Workload, drafters: str, trials: int, seed: int
) -> Searched:
    """What `tune --drafters` does before its race."""
    began = perf_counter()
    objective = build_replay_objective(model, calibration, silent, shapes=RECIPE_SHAPES[drafters])
    evidence = collect_evidence(objective.replay, objective.costs)
    search = Search(
        SearchProblem(model.spec.n_layers, evidence=evidence, seed=seed),
        objective,
        None,
        (),
        silent,
        began,
        None,
        trials,
    )
    search.run("auto")
    return Searched(objective, search.best_trials(REFINED_MASKS), perf_counter() - began)


def row(
    name: str, recipe: Recipe, ours: Timings, plain: Timings, others: dict[str, Timings]
) -> dict[str, Any]:
    reference = {s.prompt_index: s.generation.tokens for s in plain.samples}
    found: dict[str, Any] = {
        "name": name,
        "recipe": str(recipe),
        "speedup": asdict(ours.speedup_over(plain)),
        "ms_per_token": asdict(ours.estimate()),
        "alpha": ours.stats.alpha,
        "tau": ours.stats.tau,
        "prompts": ours.n_prompts,
        "identical": sum(s.generation.tokens == reference[s.prompt_index] for s in ours.samples),
        "of": len(ours.samples),
        "by_drafter": [
            {
                "kind": spec.kind,
                "rounds": d.rounds,
                "drafted": d.drafted,
                "accepted": d.accepted,
                "copied": d.copied,
            }
            for spec, d in zip(recipe.drafters, ours.stats.by_drafter, strict=True)
        ],
        "copied_from_prompt": sum(d.copied for d in ours.stats.by_drafter)
        / max(1, ours.stats.tokens),
    }
    return found | {
        f"over {other}": asdict(ours.speedup_over(theirs)) for other, theirs in others.items()
    }


def with_modules(
    model: ModelAdapter, objective: ReplayObjective, also: Sequence[str]
) -> dict[str, Candidate]:
    """The best recipes of trained drafts, alone and behind lookup. also: NAME=FOLDER of each."""
    entries = dict[str, Candidate]()
    for name, _, folder in (entry.partition("=") for entry in also):
        for draft in load_trained_drafts(model, Path(folder), print):
            for after_lookup in (False, True):
                found = objective.best_trained(draft, after_lookup)
                title = f"{name}: {found.recipe.shape}"
                entries[title] = replace(found, module_folders=(Path(folder),))
                alpha = draft.measure_alpha(objective.replay)
                print(
                    f"{title}: α {alpha:.3f} by replay, {entries[title].predicted_speedup:.2f}× "
                    f"predicted, {found.recipe}",
                    flush=True,
                )
    return entries


def measure(
    model: ModelAdapter, holdout: Workload, entries: dict[str, Candidate], repeats: int, seed: int
) -> dict[str, Any]:
    """One interleaved run; equal recipes are measured once."""

    def progress(done: int, total: int) -> None:
        if not done % 20:
            print(f"{done} of {total} prompts", flush=True)

    distinct = list(dict.fromkeys(f.recipe for f in entries.values()))
    first = {f.recipe: f for f in reversed(entries.values())}
    plain, *found = time_interleaved(
        [Decoder(model), *(first[recipe].make_decoder(model) for recipe in distinct)],
        holdout,
        repeats,
        seed,
        progress,
    )
    by_name = {name: found[distinct.index(f.recipe)] for name, f in entries.items()}
    copying = {
        s.prompt_index
        for t in found
        for s in t.samples
        if any(d.copied for d in s.stats.by_drafter)
    }
    result = {}
    for part, keep in (
        ("all", lambda prompt: True),
        ("nothing copied", lambda prompt: prompt not in copying),
    ):

        def only(t: Timings, keep: Any = keep) -> Timings:
            return Timings([s for s in t.samples if keep(s.prompt_index)])

        if not only(plain).samples:
            continue
        others = {name: only(by_name[name]) for name in by_name if name in BASELINES or ":" in name}
        result[part] = [
            row(
                name,
                f.recipe,
                only(by_name[name]),
                only(plain),
                {other: t for other, t in others.items() if entries[other].recipe != f.recipe},
            )
            for name, f in entries.items()
        ]
    return {"rows": result, "plain_ms_per_token": asdict(plain.estimate())}


def predictions(
    model: ModelAdapter, calibration: Workload, found: Searched, count: int, prompts: int, seed: int
) -> dict[str, Any]:
    """Measured against predicted seconds per token, of recipes of every shape, on the calibration
    prompts they were predicted on.
    """
    objective, n = found.objective, count // 3
    work = calibration.head(prompts)
    some = ReplayObjective(
        Replay(model, work.prompt_ids, work.max_new_tokens, work.end_on_repeat),
        objective.costs,
        RECIPE_SHAPES["auto"],
    )
    best = found.trials[0].mask
    masks = [trial.mask for trial in found.trials[:4]] + [
        best.flip(*range(k, 2 * model.spec.n_layers, 9)) for k in range(n)
    ]
    chosen = [
        some.best_recipe(mask, after_lookup) for after_lookup in (False, True) for mask in masks[:n]
    ]
    chosen += [
        some.predict_lookup(spec)
        for spec, _ in some.ranked_lookups[:: max(1, len(some.ranked_lookups) // n)][
            : count - len(chosen)
        ]
    ]
    plain_seconds = objective.costs.verify[0]
    plain, *real = time_interleaved(
        [Decoder(model), *(Decoder(model, f.recipe) for f in chosen)], work, 2, seed
    )
    lines = []
    for f, t in zip(chosen, real, strict=True):
        lines.append(
            {
                "recipe": str(f.recipe),
                "predicted": plain_seconds / f.seconds_per_token,
                "measured": t.speedup_over(plain).mean,
            }
        )
        print(f"{lines[-1]['predicted']:6.3f} {lines[-1]['measured']:6.3f}  {lines[-1]['recipe']}")
    off = sorted(abs(x["measured"] / x["predicted"] - 1) for x in lines)
    rank = spearmanr([x["predicted"] for x in lines], [x["measured"] for x in lines]).statistic
    print(
        f"{len(lines)} recipes: time off by {100 * off[len(off) // 2]:.1f} % (median), "
        f"{100 * off[-1]:.1f} % (most); rank correlation "
        f"{rank:.3f}"
    )
    return {"lines": lines, "rank": float(rank)}


def guarded(
    model: ModelAdapter, task: Task, path: Path, count: int | None, seed: int
) -> dict[str, Any]:
    """A profile's recipe on text that it was not made for, with its guard and without."""
    profile, chance = load_profile(path), random.Random(seed)
    prompts = [*task.holdout, *task.calibration][:count]
    own = make_workload(model, task, prompts)
    shuffled = [
        replace(p, text=" ".join(chance.sample(words := p.text.split(), len(words))))
        for p in prompts
    ]
    noise = replace(
        own,
        prompt_ids=tuple(
            tuple(chance.randrange(model.spec.vocab_size) for _ in range(60))
            for _ in own.prompt_ids
        ),
    )
    result = {}
    for name, work in (
        (task.name, own),
        ("shuffled words", make_workload(model, task, shuffled)),
        ("random tokens", noise),
    ):
        plain, with_guard, without = time_interleaved(
            [Decoder(model), Decoder(model, profile), Decoder(model, profile, drafter_costs=())],
            work,
            1,
            seed,
        )
        result[name] = {
            "guarded": asdict(with_guard.speedup_over(plain)),
            "unguarded": asdict(without.speedup_over(plain)),
            "prompts": plain.n_prompts,
            "identical": [s.generation.tokens for s in plain.samples]
            == [s.generation.tokens for s in with_guard.samples],
        }
        print(
            f"{name:16} guarded {interval(result[name]['guarded'])}, unguarded "
            f"{interval(result[name]['unguarded'])}, "
            f"{plain.n_prompts} prompts, tokens identical: {result[name]['identical']}",
            flush=True,
        )
    return result


def interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} ({estimate['low']:.3f}–{estimate['high']:.3f})"


def show(found: dict[str, Any]) -> None:
    for part, rows in found["rows"].items():
        print(f"\n{part}: {rows[0]['prompts']} prompts")
        for r in rows:
            over = ", ".join(f"{key} {interval(r[key])}" for key in r if key.startswith("over "))
            print(
                f"  {r['name']:12} {interval(r['speedup'])}  α {r['alpha'] or 0:.2f} τ "
                f"{r['tau'] or 0:.2f}  "
                f"copied {100 * r['copied_from_prompt']:.0f} %  identical "
                f"{r['identical']}/{r['of']}  {over}\n"
                f"               {r['recipe']}"
            )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="hold-out prompts, all if not given")
    parser.add_argument("--holdout", type=Path)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--predictions", type=int, default=0)
    parser.add_argument("--guard", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    model, task = loaded(args), load_task(args.task)
    if args.guard:
        found: dict[str, Any] = guarded(model, task, args.guard, args.prompts, args.seed)
    else:
        calibration = make_workload(model, task, task.calibration)
        auto = searched(model, calibration, "auto", args.trials, args.seed)
        print(f"searched for {auto.seconds:.1f} s", flush=True)
        if args.predictions:
            found = predictions(model, calibration, auto, args.predictions, 24, args.seed)
        else:
            alone = searched(model, calibration, "skip", args.trials, args.seed)
            finalists = select_finalists(auto.trials, auto.objective)
            winner, _ = race_candidates(model, calibration, finalists, args.seed, silent)
            entries = {f.recipe.shape: f for f in reversed(finalists) if f.recipe.shape != "skip"}
            entries["skip alone"] = select_finalists(alone.trials, alone.objective)[0]
            entries["auto"] = winner
            entries |= with_modules(model, auto.objective, args.also)
            holdout = load_task(str(args.holdout.parent)) if args.holdout else task
            found = measure(
                model,
                make_workload(model, holdout, holdout.holdout[: args.prompts]),
                entries,
                args.repeats,
                args.seed,
            )
            show(found)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
