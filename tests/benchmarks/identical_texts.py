r"""How many greedy texts drafting leaves as they are, by engine and dtype, with `exact` and without
it, and what `exact` costs.

Every prompt is continued by all decoders in turns, plainly and with drafts, in passes of one fixed
shape (`exact`) and in passes as they come. On `native`, and with `exact` on every engine, drafts
must change no text; a run in which they do ends with status 1. Elsewhere a near-tie may fall
otherwise, and the gap of the two best logits at the first difference says how near it was.

    python tests/benchmarks/identical_texts.py --model FOLDER --prompts data/gsm8k_test100.jsonl \
        --chat --count 64 --tokens 128 --engines hf,lean,native --dtypes float32,bfloat16 \
        --threads 2 --out build/identical.json

`--transformers` also compares the texts of the engine hf with those of transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from options import load_chosen_model, make_parser

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import is_batch_invariant
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.replay.workload import encode_request
from skipsearch.tasks.prompt_rows import prompt_from_row
from skipsearch.tasks.sources.jsonl import read_rows
from skipsearch.timing.interleaved import find_first_divergence


@dataclass
class Run:
    """One way to decode, and what came of it, prompt by prompt."""

    decoder: Decoder
    texts: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(
        default_factory=list
    )  # of a token after the first; NaN for a text of one token
    prefills: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def decode(self, prompt: Sequence[int], tokens: int) -> None:
        result = self.decoder.generate(prompt, tokens)
        self.texts.append(result.tokens)
        self.seconds.append(result.stats.seconds_per_token or float("nan"))
        self.prefills.append(result.stats.prefill_seconds)
        self.drafted += result.stats.drafted
        self.accepted += result.stats.accepted


def prompts_of(model: ModelAdapter, path: Path, count: int, chat: bool) -> list[list[int]]:
    rows = read_rows(path)[:count]
    prompts = [prompt_from_row(row, chat) for row in rows]
    return [encode_request(model.tokenizer, p, chat or bool(p.turns)) for p in prompts]


def recipe_of(args: argparse.Namespace, model: ModelAdapter) -> tuple[Recipe, tuple[Path, ...]]:
    """The recipe to draft with, and the folders of its trained parts; lookup, then two thirds of
    the model, where none is given.
    """
    if args.profile is not None:
        profile = load_profile(args.profile)
        return profile.recipe, tuple(profile.module_folders)
    if args.recipe is not None:
        return Recipe.from_data(json.loads(args.recipe)), ()
    n = model.spec.n_layers
    third = tuple(range(n // 3, n, 3))
    return Recipe(
        (
            Lookup(min_match=2, draft_length=4),
            Skip.from_mask(SkipMask(n, third, third), 4, make_exit("fixed")),
        )
    ), ()


def runs_of(model: ModelAdapter, args: argparse.Namespace) -> dict[str, Run]:
    """By name. Exact runs are missing where the engine refuses them, which is printed."""
    recipe, folders = recipe_of(args, model)
    runs = {
        "plain": Run(Decoder(model)),
        "drafted": Run(Decoder(model, recipe, module_folders=folders)),
    }
    try:
        runs |= {
            "exact plain": Run(Decoder(model, exact=True)),
            "exact drafted": Run(Decoder(model, recipe, module_folders=folders, exact=True)),
        }
    except DecodeError as error:
        print(f"  no exact decoding: {error}")
    return runs


def compared(
    model: ModelAdapter,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """How many texts are identical, and the gaps of the two best logits where the others part,
    ascending.
    """
    parted = [
        find_first_divergence(model, *each) for each in zip(prompts, plain, other, strict=True)
    ]
    gaps = sorted(round(each.gap, 5) for each in parted if each is not None)
    return {"identical": len(prompts) - len(gaps), "prompts": len(prompts), "gaps": gaps}


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """The median over prompts of how many times as long one takes as the other, with a 95 %
    bootstrap interval.
    """
    ratios = np.array(slower) / np.array(faster)
    ratios = ratios[np.isfinite(ratios)]
    picks = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def texts_of_transformers(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """Of the unmodified modules that the engine hf drives."""
    asked = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "pad_token_id": 0,
        "eos_token_id": list(model.spec.eos_token_ids) or None,
    }
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.spec.device)
        found.append(
            model.model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[
                0, len(prompt) :
            ].tolist()
        )
    return found


def measured(model: ModelAdapter, args: argparse.Namespace) -> dict[str, Any]:
    prompts, runs = prompts_of(model, args.prompts, args.count, args.chat), runs_of(model, args)
    for run in runs.values():
        run.decoder.generate(prompts[0], 8)  # warm-up
    started, names = perf_counter(), list(runs)
    for i, prompt in enumerate(prompts):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name].decode(prompt, args.tokens)
        if perf_counter() - started > 30:
            started = perf_counter()
            print(f"  {i + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"texts": {}, "times": {}, "accepted": {}}
    for name, run in runs.items():
        if run.drafted:
            found["accepted"][name] = [run.accepted, run.drafted]
        if name not in ("plain", "exact plain"):
            beside = "exact plain" if name == "exact drafted" else "plain"
            found["texts"][f"{name} = {beside}"] = compared(
                model, prompts, runs[beside].texts, run.texts
            )
    if args.transformers and model.spec.engine == "hf":
        theirs = texts_of_transformers(model, prompts, args.tokens)
        for name, run in runs.items():
            found["texts"][f"{name} = transformers"] = compared(model, prompts, theirs, run.texts)
    pairs = [("exact plain", "plain"), ("exact drafted", "drafted"), ("drafted", "plain")]
    for one, other in ((one, other) for one, other in pairs if one in runs):
        found["times"][f"{one} / {other}"] = ratio(runs[one].seconds, runs[other].seconds)
        if one.startswith("exact"):
            found["times"][f"prefill, {one} / {other}"] = ratio(
                runs[one].prefills, runs[other].prefills
            )
    found["milliseconds a token"] = {
        name: 1000 * statistics.median(s for s in run.seconds if s == s)
        for name, run in runs.items()
    }
    return found


def show(found: dict[str, Any]) -> None:
    for name, texts in found["texts"].items():
        gaps = (
            f"; gaps where they part: {', '.join(f'{gap:g}' for gap in texts['gaps'])}"
            if texts["gaps"]
            else ""
        )
        print(
            f"  {name:42} {texts['identical']:3} of {texts['prompts']} "
            f"({texts['identical'] / texts['prompts']:.0%}){gaps}"
        )
    for name, times in found["times"].items():
        print(f"  time {name:37} {times['median']:.3f} ({times['low']:.3f}-{times['high']:.3f})")
    for name, (accepted, drafted) in found["accepted"].items():
        print(f"  {name:42} {accepted} of {drafted} drafted tokens accepted")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="a .jsonl, as `decode --prompts` takes it"
    )
    parser.add_argument("--count", type=int, default=64, help="prompts, the first of the file")
    parser.add_argument("--tokens", type=int, default=128, help="of each text, at most")
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument("--engines", default="hf,lean,native")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--profile", type=Path, help="whose recipe drafts")
    drafts.add_argument("--recipe", help="drafters as JSON, as a profile lists them")
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="compare the engine hf with transformers' own generate, too",
    )
    parser.add_argument("--out", type=Path, help="write all of it as JSON")
    args = parser.parse_args()
    every, wrong = [], False
    for dtype in args.dtypes.split(","):
        for engine in args.engines.split(","):
            args.dtype, args.engine = dtype, engine
            model = load_chosen_model(args)
            print(f"{args.model}, {dtype}, {engine}, {args.threads} threads", flush=True)
            found = measured(model, args)
            show(found)
            every.append(
                {
                    "model": args.model,
                    "dtype": dtype,
                    "engine": engine,
                    "threads": args.threads,
                    **found,
                }
            )
            must = [
                "exact drafted = exact plain",
                *(["drafted = plain"] if is_batch_invariant(model) else []),
            ]
            wrong = wrong or any(
                found["texts"][name]["gaps"] for name in must if name in found["texts"]
            )
            if args.out is not None:
                args.out.write_text(json.dumps(every, indent=1) + "\n", "utf-8")
    if wrong:
        sys.exit("drafts changed a text that they must not change")


if __name__ == "__main__":
    main()
