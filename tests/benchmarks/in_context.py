r"""Compare drafters that choose their masks while they decode with lookup and an offline mask.

Each runs alone and after lookup. Settings are chosen on calibration prompts alone, as `tune` does,
and measured on hold-out prompts in one interleaved run:

    python tests/benchmarks/in_context.py --task pycode --prompts 240 \
        --holdout tests/benchmarks/many/pycode/task.yaml --out build/in-context-pycode.json

`--long 448 --settings build/in-context-pycode.json --prompts 40` decodes 448 tokens with the same
settings, even if the text repeats itself, because these methods learn over long text.
`--model synthetic:32x256` takes the published settings and random prompts. Random weights say
nothing about acceptance, but they show which share of the time choosing masks takes.
`swift` reads the prompts as a stream, so their order is part of the result. The prompts on which it
searched have a row of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from options import load_chosen_model, make_parser
from recipes import describe, format_interval, search

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.synthetic import is_synthetic
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.tasks import load_task
from skipsearch.timing.interleaved import Timings, time_interleaved
from skipsearch.tuning.calibration import build_replay_objective
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import CandidateMeasured, Notice, StageStarted
from skipsearch.tuning.race import (
    ONLINE_RACE_RUNGS,
    race_candidates,
    select_finalists,
    select_online_candidates,
)
from skipsearch.tuning.recipe_shape import ONLINE_DRAFTERS, RecipeShape

PREFIXES = ("", "lookup,")  # of a recipe shape


def print_event(event: object) -> None:
    """Print stages, notices and results; say nothing of other events."""
    if isinstance(event, StageStarted | Notice):
        print(f"  {event.title if isinstance(event, StageStarted) else event.sentence}", flush=True)
    elif isinstance(event, CandidateMeasured):
        predicted = (
            "" if event.predicted_speedup is None else f", predicted {event.predicted_speedup:.3f}"
        )
        print(
            f"    {format_interval(asdict(event.speedup))} on {event.n_prompts} prompts{predicted}:"
            f" {event.recipe}",
            flush=True,
        )


def tune_methods(
    model: ModelAdapter, calibration: Workload, trials: int, seed: int
) -> Iterator[tuple[str, Candidate]]:
    """Yield (name, best recipe) of each method by calibration prompts."""
    for drafters, shape in (("skip", "skip"), ("auto", "lookup,skip")):
        print(f"offline masks for {shape}", flush=True)
        calibrated, outcome = search(model, calibration, seed, drafters, trials=trials)
        finalists = select_finalists(outcome.best, outcome.objective, calibrated.objective)
        if drafters == "auto":
            yield "lookup", next(f for f in finalists if f.recipe.shape == "lookup")
        racing = [finalist for finalist in finalists if finalist.recipe.shape == shape]
        winner, _ = race_candidates(model, calibration, racing, seed, print_event)
        yield shape, winner
    objective = build_replay_objective(
        model,
        calibration,
        print_event,
        shapes=[f"{prefix}{kind}" for kind in ONLINE_DRAFTERS for prefix in PREFIXES],
    )
    for kind in ONLINE_DRAFTERS:
        for prefix in PREFIXES:
            began = perf_counter()
            print(f"{prefix}{kind}", flush=True)
            racing = select_online_candidates(
                RecipeShape.parse(f"{prefix}{kind}"), objective, calibration, print_event
            )
            winner, _ = race_candidates(
                model, calibration, racing, seed, print_event, ONLINE_RACE_RUNGS
            )
            yield f"{prefix}{kind}", winner
            print(f"  {perf_counter() - began:.0f} s", flush=True)


def list_published_settings(n_layers: int) -> Iterator[tuple[str, Candidate]]:
    """Yield (name, recipe) with the papers' settings for choosing masks.

    The offline mask skips every second layer. All draft five tokens a round: the confidence of
    random weights is low, so an exit that reads it would end each draft at once.
    """
    odd, fixed = tuple(range(1, n_layers - 1, 2)), make_exit("fixed")
    layers = round(0.55 * n_layers)
    for name, drafter in (
        ("skip", Skip.from_mask(SkipMask(n_layers, odd, odd), 5, fixed)),
        (
            "clasp, every 128 tokens",
            CLaSp(skip=layers, interval=128, interval_unit="tokens", draft_length=5, exit=fixed),
        ),
        ("clasp, every 8 rounds", CLaSp(skip=layers, interval=8, draft_length=5, exit=fixed)),
        ("clasp, every round", CLaSp(skip=layers, interval=1, draft_length=5, exit=fixed)),
        ("asd", ASD(draft_length=5, exit=fixed)),
        ("swift", SWIFT(window=32, draft_length=5, exit=fixed)),
        ("swift as published", SWIFT(window=32, faithful=True, draft_length=5, exit=fixed)),
    ):
        yield name, Candidate(Recipe((drafter,)), None)


def make_random_prompts(model: ModelAdapter, count: int, max_new_tokens: int) -> Workload:
    """Return prompts of 200 random tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(
        tuple(torch.randint(model.spec.vocab_size, (200,), generator=generator).tolist())
        for _ in range(count)
    )
    return Workload(
        tuple(f"random/{i}" for i in range(count)), prompts, max_new_tokens, None, SamplingParams()
    )


def make_row(name: str, finalist: Candidate, ours: Timings, plain: Timings) -> dict[str, Any]:
    """Return the row of a recipe in the table and in the file."""
    stats, plain_pass_s = ours.stats, plain.stats.decode_seconds / plain.stats.rounds
    last = stats.by_drafter[-1]
    row = describe(name, finalist, ours, plain) | {
        "prompts": ours.n_prompts,
        "drafters": finalist.recipe.as_data(),
        "prices": [None if price is None else asdict(price) for price in finalist.drafter_costs],
        "beta": last.draft_seconds / last.drafted / plain_pass_s if last.drafted else None,
        "choosing": stats.mask_selection_share,
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "parts": {},
    }
    for part, learning in (("while it searched", True), ("after the search", False)):
        prompts = {s.prompt_index for s in ours.samples if s.while_learning is learning}
        if any(s.while_learning for s in ours.samples) and prompts:
            drafted, baseline = (t.subset(prompts.__contains__) for t in (ours, plain))
            row["parts"][part] = {
                "prompts": len(prompts),
                "speedup": asdict(drafted.speedup_over(baseline)),
                "choosing": drafted.stats.mask_selection_share,
                "alpha": drafted.stats.alpha,
                "tau": drafted.stats.tau,
            }
    return row


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table in Markdown."""
    print(f"\n{rows[0]['prompts']} prompts, {rows[0]['tokens']} tokens")
    print(
        "| recipe | speedup (95 %) | α | τ | β | choosing | identical | settings "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for r in rows:
        lines = [(r["name"], r, f"{r['identical']} of {r['of']}", r["recipe"])]
        lines += [
            (f"{r['name']}, {part}: {p['prompts']} prompts", p, "", "")
            for part, p in r["parts"].items()
        ]
        for name, part, identical, settings in lines:
            figures = " | ".join(f"{part.get(key) or 0:.2f}" for key in ("alpha", "tau", "beta"))
            print(
                f"| {name} | {format_interval(part['speedup'])} | {figures} | "
                f"{100 * part['choosing']:.1f} % | {identical} | {settings} |"
            )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--calibration", type=int, help="calibration prompts, all if not given")
    parser.add_argument("--prompts", type=int, help="hold-out prompts, all if not given")
    parser.add_argument("--holdout", type=Path)
    parser.add_argument(
        "--settings",
        type=Path,
        help="the --out of an earlier run, whose settings are taken instead of tuning",
    )
    parser.add_argument(
        "--long", type=int, help="tokens to decode, even if the text repeats itself"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    began = perf_counter()
    model = load_chosen_model(args)
    if is_synthetic(args.model):
        entries, work = (
            dict(list_published_settings(model.spec.n_layers)),
            make_random_prompts(model, args.prompts or 4, args.long or 128),
        )
    else:
        task = load_task(args.task)
        if args.settings:
            entries = {
                r["name"]: Candidate(
                    Recipe.from_data(r["drafters"]),
                    None,
                    tuple(p and DrafterCost(**p) for p in r["prices"]),
                )
                for r in json.loads(args.settings.read_text())["rows"]
            }
        else:
            entries = dict(
                tune_methods(
                    model,
                    make_workload(model, task, task.calibration[: args.calibration]),
                    args.trials,
                    args.seed,
                )
            )
        holdout = load_task(str(args.holdout.parent)) if args.holdout else task
        if args.long:
            holdout = replace(holdout, max_new_tokens=args.long, end_on_repeat=None)
        work = make_workload(model, holdout, holdout.holdout[: args.prompts])
    print(
        f"{perf_counter() - began:.0f} s; now {len(work.prompt_ids)} prompts of up to "
        f"{work.max_new_tokens} tokens"
        f"{', repeats allowed' if work.end_on_repeat is None else ''}",
        flush=True,
    )

    def progress(done: int, total: int) -> None:
        if not done % max(1, total // 10):
            print(f"  {done} of {total} prompts, {perf_counter() - began:.0f} s", flush=True)

    plain, *timed = time_interleaved(
        [Decoder(model), *(f.make_decoder(model) for f in entries.values())],
        work,
        1,
        args.seed,
        progress,
    )
    rows = [
        make_row(name, f, t, plain) for (name, f), t in zip(entries.items(), timed, strict=True)
    ]
    print_table(rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps(
                {
                    "rows": rows,
                    "plain_ms_per_token": asdict(plain.estimate()),
                    "long": args.long,
                    "repeats_allowed": work.end_on_repeat is None,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
