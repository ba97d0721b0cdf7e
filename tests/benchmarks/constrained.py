"""Decoding under a constraint: plain, with forced tokens, with the drafters of a recipe, with all.

    python tests/benchmarks/constrained.py --model smollm2-135m-instruct-gguf --dtype bfloat16 \
        --threads 2 --task extract --task tests/benchmarks/orders --out docs/results/FILE.json

All systems decode the hold-out prompts in turn. Plain decoding follows the constraint too, and
drafts nothing. `--budget` seconds of search on the calibration prompts choose the settings of
lookup and skip. The script also prints the time of the masks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from options import load_chosen_model, make_parser
from recipes import format_interval, list_best_recipes, search

from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder, Request, make_masks, mask_logits
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.tasks import Task, load_task
from skipsearch.timing.interleaved import Timings, time_interleaved


def measure(model: ModelAdapter, task: Task, budget_s: float, seed: int) -> dict[str, Any]:
    """Decode the hold-out prompts of a task with each system in turn."""
    calibration, outcome = search(
        model, make_workload(model, task, task.calibration), seed, budget_s=budget_s
    )
    best = list_best_recipes(calibration, outcome)
    recipes = {
        "lookup": (best["lookup"].recipe, False),
        "forced": (Recipe(), True),
        "forced, lookup": (best["lookup"].recipe, True),
    }
    for name in ("skip, reading less", "lookup, then skip, reading less"):
        if name in best:
            recipes[name] = best[name].recipe, False
            recipes[f"forced, {name}"] = best[name].recipe, True
    workload = make_workload(model, task, task.holdout)
    plain, *timings = time_interleaved(
        [
            Decoder(model, draft_forced=False),
            *(Decoder(model, recipe, draft_forced=forced) for recipe, forced in recipes.values()),
        ],
        workload,
        2,
        seed,
    )
    rows = [
        describe(name, str(recipe), of_one, plain)
        for (name, (recipe, _)), of_one in zip(recipes.items(), timings, strict=True)
    ]
    reasons = [sample.generation.finish_reason for sample in plain.samples]
    return {
        "task": task.name,
        "prompts": plain.n_prompts,
        "complete_answers": sum(reason == "eos" for reason in reasons) / len(reasons),
        "tokens_per_answer": plain.stats.tokens / len(plain.samples),
        "plain_ms_per_token": {k: 1e3 * v for k, v in asdict(plain.estimate()).items()},
        "mask_us_per_token": measure_masks(model, workload, plain),
        "rows": rows,
    }


def describe(name: str, recipe: str, timings: Timings, plain: Timings) -> dict[str, Any]:
    texts = {sample.prompt_index: sample.generation.tokens for sample in plain.samples}
    forced = [sample.stats.by_drafter[-1] for sample in timings.samples if sample.stats.by_drafter]
    return {
        "name": name,
        "recipe": recipe,
        "speedup": asdict(timings.speedup_over(plain)),
        "tau": timings.stats.tau,
        "forced_tokens": sum(f.accepted for f in forced) / timings.stats.tokens
        if name.startswith("forced")
        else None,
        "identical": sum(s.generation.tokens == texts[s.prompt_index] for s in timings.samples),
        "of": len(timings.samples),
    }


def measure_masks(model: ModelAdapter, workload: Workload, plain: Timings) -> float:
    """Return the microseconds of the mask of a row, with its use on the logits."""
    seconds, n_tokens = 0.0, 0
    logits = torch.zeros(1, model.spec.vocab_size, dtype=torch.bfloat16)
    for sample in plain.samples[: len(workload.prompt_ids)]:
        matcher = Request((0,), constraint=workload.constraint).new_matcher(model)
        assert matcher is not None
        for token in sample.generation.tokens:
            began = perf_counter()
            masks = make_masks(matcher, [], None, model.spec.vocab_size)
            mask_logits(logits, masks)
            matcher.advance([token])
            seconds += perf_counter() - began
            n_tokens += 1
    return 1e6 * seconds / n_tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, engine="native", task=False)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--budget", type=float, default=15, help="seconds of each search")
    parser.add_argument("--out", type=Path)
    args: argparse.Namespace = parser.parse_args(arguments)
    model = load_chosen_model(args)
    result: dict[str, Any] = {"model": model.spec.id, "dtype": model.spec.dtype_name, "tasks": []}
    for name in args.task:
        measured = measure(model, load_task(name), args.budget, args.seed)
        result["tasks"].append(measured)
        print(
            f"{measured['task']}: {measured['prompts']} prompts, "
            f"{measured['plain_ms_per_token']['mean']:.2f} ms a token plain, of which the mask "
            f"{measured['mask_us_per_token']:.0f} µs; {measured['tokens_per_answer']:.0f} tokens "
            f"an answer, {100 * measured['complete_answers']:.0f} % complete"
        )
        for row in measured["rows"]:
            forced = row["forced_tokens"]
            share = "" if forced is None else f", {100 * forced:.0f} % of the tokens forced"
            print(
                f"  {row['name']:40} {format_interval(row['speedup'])} τ {row['tau']:.2f}{share}, "
                f"identical {row['identical']}/{row['of']}",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
