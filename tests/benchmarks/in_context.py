r"""Drafters that choose their masks while they decode, beside plain decoding, lookup and an offline
mask: each alone and behind lookup.

Settings are chosen on calibration prompts alone, as `tune` does, and measured on hold-out prompts
in one interleaved run:

    python tests/benchmarks/in_context.py --task pycode --holdout
    tests/benchmarks/many/pycode/task.yaml --prompts 240 \
        --out build/in-context-pycode.json

`--long 448 --settings build/in-context-pycode.json --prompts 40` decodes so many tokens with the
same settings, however much they repeat themselves: these methods learn over long text. `--model
synthetic:32x256` takes the published settings and random prompts instead: its random weights say
nothing of acceptance, only what share of the time choosing masks takes. `swift` reads the prompts
as a stream: its order is part of the result, and the part in which it searched is shown apart from
the part behind it. """

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from options import loaded, options
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

BEFORE = ("", "lookup,")


def said(event: object) -> None:
    """Prints what lasts."""
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


def tuned(
    model: ModelAdapter, calibration: Workload, trials: int, seed: int
) -> Iterator[tuple[str, Candidate]]:
    """The best of each method by calibration prompts."""
    for drafters, shape in (("skip", "skip"), ("auto", "lookup,skip")):
        print(f"offline masks for {shape}", flush=True)
        _, outcome = search(model, calibration, seed, drafters, trials=trials)
        every = [
            f
            for f in select_finalists(outcome.best, outcome.objective)
            if f.recipe.shape in (shape, "lookup")
        ]
        if drafters == "auto":
            yield "lookup", next(f for f in every if f.recipe.shape == "lookup")
        winner, _ = race_candidates(
            model, calibration, [f for f in every if f.recipe.shape == shape], seed, said
        )
        yield shape, winner
    objective = build_replay_objective(
        model,
        calibration,
        said,
        shapes=[f"{before}{kind}" for kind in ONLINE_DRAFTERS for before in BEFORE],
    )
    for kind in ONLINE_DRAFTERS:
        for before in BEFORE:
            began = perf_counter()
            print(f"{before}{kind}", flush=True)
            racing = select_online_candidates(
                RecipeShape.parse(f"{before}{kind}"), objective, calibration, said
            )
            winner, _ = race_candidates(model, calibration, racing, seed, said, ONLINE_RACE_RUNGS)
            yield f"{before}{kind}", winner
            print(f"  {perf_counter() - began:.0f} s", flush=True)


def published(n_layers: int) -> Iterator[tuple[str, Candidate]]:
    """The papers' own settings of choosing masks, and every second sub-layer as the offline mask.
    All draft five tokens a round, since an exit that reads confidence would stop at once: that of
    random weights is low."""
    odd, fixed, layers = (
        tuple(range(1, n_layers - 1, 2)),
        make_exit("fixed"),
        round(0.55 * n_layers),
    )
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


def random_prompts(model: ModelAdapter, count: int, new: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(
        tuple(torch.randint(model.spec.vocab_size, (200,), generator=generator).tolist())
        for _ in range(count)
    )
    return Workload(
        tuple(f"random/{i}" for i in range(count)), prompts, new, None, SamplingParams()
    )


def report(name: str, finalist: Candidate, ours: Timings, plain: Timings) -> dict[str, Any]:
    stats, a_pass = ours.stats, plain.stats.decode_seconds / plain.stats.rounds
    last = stats.by_drafter[-1]
    found = describe(name, finalist, ours, plain) | {
        "prompts": ours.n_prompts,
        "drafters": finalist.recipe.as_data(),
        "prices": [None if price is None else asdict(price) for price in finalist.drafter_costs],
        "beta": last.draft_seconds / last.drafted / a_pass if last.drafted else None,
        "choosing": stats.mask_selection_share,
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "parts": {},
    }
    for part, learning in (("while it searched", True), ("behind that", False)):
        some = {s.prompt_index for s in ours.samples if s.while_learning is learning}
        if any(s.while_learning for s in ours.samples) and some:
            mine, theirs = ours.subset(some.__contains__), plain.subset(some.__contains__)
            found["parts"][part] = {
                "prompts": len(some),
                "speedup": asdict(mine.speedup_over(theirs)),
                "choosing": mine.stats.mask_selection_share,
                "alpha": mine.stats.alpha,
                "tau": mine.stats.tau,
            }
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
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
        for name, of_it, identical, settings in lines:
            figures = " | ".join(f"{of_it.get(key) or 0:.2f}" for key in ("alpha", "tau", "beta"))
            print(
                f"| {name} | {format_interval(of_it['speedup'])} | {figures} | "
                f"{100 * of_it['choosing']:.1f} % | {identical} | {settings} |"
            )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--calibration", type=int, help="calibration prompts, all if not given")
    parser.add_argument("--prompts", type=int, help="hold-out prompts, all if not given")
    parser.add_argument("--holdout", type=Path)
    parser.add_argument(
        "--settings",
        type=Path,
        help="what an earlier run wrote: its settings are taken, and nothing is tuned",
    )
    parser.add_argument("--long", type=int, help="decode so many tokens, repeats allowed")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    began = perf_counter()
    model = loaded(args)
    if is_synthetic(args.model):
        entries, work = (
            dict(published(model.spec.n_layers)),
            random_prompts(model, args.prompts or 4, args.long or 128),
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
                tuned(
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
    rows = [report(name, f, t, plain) for (name, f), t in zip(entries.items(), timed, strict=True)]
    show(rows)
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
