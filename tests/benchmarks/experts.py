"""Mixtures of experts: predicted speedup against measured, with and without a price for experts.

    python tests/benchmarks/experts.py synthetic:8x256@8000+16x4 synthetic:8x1024@8000+24x4 \
        --out docs/results/experts.json

The prompts are random tokens, the texts are the model's own. A draft runs the experts and the draft
length of each line. "average" prices every verify pass by the mean of the latency table, "experts"
by the experts that its rows read, "one token" by passes over a single token again and again.
`--out FILE` keeps the figures of all models.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy, make_exit
from skipsearch.engine import load_model
from skipsearch.engine.draft_model import get_draft_copy, list_draft_experts
from skipsearch.models.families.unmodified import experts_of
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.simulate import simulate
from skipsearch.timing import latency
from skipsearch.timing.latency import measure_costs
from skipsearch.timing.reading_costs import measure_format_costs, price_reading
from skipsearch.timing.text_windows import TextWindow
from skipsearch.tuning.objective import make_skip_spec

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 3, 16, 48, 3
LENGTHS = (1, 2, 4)


PRICES = ("experts", "average", "one token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    entries = [compare(name, args.dtype, args.engine) for name in args.models]
    if args.out:
        args.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def compare(name: str, dtype: str, engine: str) -> dict[str, Any]:
    """Return predicted and measured speedups of drafts with fewer experts."""
    model = load_model(name, device="cpu", dtype=dtype, engine=engine)
    n = model.spec.n_layers
    random = np.random.default_rng(1)
    prompts = random.integers(0, model.spec.vocab_size, (PROMPTS, PROMPT_TOKENS)).tolist()
    replay = Replay(model, prompts, NEW_TOKENS, end_on_repeat=None)
    context = PROMPT_TOKENS + NEW_TOKENS // 2
    costs = measure_costs(model, max(LENGTHS), context)
    formats = [Reading(), *(Reading(experts=count) for count in list_draft_experts(model))]
    format_costs = measure_format_costs(model, context, formats)
    find, latency.experts_of = latency.experts_of, lambda _: None  # type: ignore[attr-defined]
    windows, latency.list_windows = latency.list_windows, one_token  # type: ignore[attr-defined]
    naive = measure_costs(model, max(LENGTHS), context)
    latency.experts_of, latency.list_windows = find, windows  # type: ignore[attr-defined]
    one = costs.verify[0]
    entry: dict[str, Any] = {
        "model": name,
        "engine": engine,
        "parameters": model.weight_bytes // model.spec.dtype.itemsize,
        "experts": str(experts_of(model)),
        "plain_ms": 1e3 * one,
        "v": [v / one for v in costs.verify],
        "v_one_token": [v / naive.verify[0] for v in naive.verify],
        "experts_read": list(costs.experts),
        "expert_share": costs.expert_s / one,
        "drafts": [],
    }
    print(f"{model.spec}: {entry['experts']}, plain pass {entry['plain_ms']:.2f} ms")
    print("v by rows      ", *(f"{v:.2f}" for v in entry["v"]))
    print("v, one token   ", *(f"{v:.2f}" for v in entry["v_one_token"]))
    print("experts by rows", *(f"{read:.1f}" for read in entry["experts_read"]))
    print(f"an expert adds {100 * entry['expert_share']:.2f} % of a plain pass")
    print("draft, length: speedup measured | predicted by experts, average, one token; τ")
    mask = SkipMask(n)
    for reading in formats[1:]:
        priced = price_reading(costs, format_costs, reading, model.spec.vocab_size)
        by_price = (
            priced,
            replace(priced, expert_s=0.0),
            replace(price_reading(naive, format_costs, reading, 1), expert_s=0.0),
        )
        replayed = replay(mask, draft_model=get_draft_copy(model, "stored", reading.experts))
        rounds = rounds_from_replay(replayed)
        for length in LENGTHS:
            policy = DraftPolicy(length, make_exit("fixed"))
            predicted = {
                price: used.verify[0] / simulate(rounds, mask, policy, used).seconds_per_token
                for price, used in zip(PRICES, by_price, strict=True)
            }
            recipe = Recipe((make_skip_spec(mask, policy, reading),))
            measured, tau = time_speedup(Decoder(model), Decoder(model, recipe), prompts)
            entry["drafts"].append(
                {
                    "experts": reading.experts,
                    "length": length,
                    "measured": measured,
                    "predicted": predicted,
                    "tau": tau,
                }
            )
            figures = ", ".join(f"{speedup:.3f}" for speedup in predicted.values())
            print(f"{reading}, {length}: {measured:.3f} | {figures}; {tau:.2f}", flush=True)
    entry["mean_error"] = {
        price: fmean(abs(d["predicted"][price] / d["measured"] - 1) for d in entry["drafts"])
        for price in PRICES
    }
    errors = ", ".join(f"{100 * error:.1f} % {p}" for p, error in entry["mean_error"].items())
    print(f"mean error of the predicted speedup: {errors}", flush=True)
    return entry


def one_token(model, text, cache, planner, n_rows):  # type: ignore[no-untyped-def]
    """Return a window of one token, as a model without experts is timed."""
    return [TextWindow(text[:, :n_rows], ())]


def time_speedup(plain: Decoder, drafted: Decoder, prompts: list[list[int]]) -> tuple[float, float]:
    """Return (speedup, tokens per round); the two decoders take turns."""
    ratios, tokens, rounds = [], 0, 0
    for _ in range(REPEATS):
        seconds = [0.0, 0.0]
        for prompt in prompts:
            for i, decoder in enumerate((plain, drafted)):
                stats = decoder.generate(prompt, NEW_TOKENS).stats
                seconds[i] += stats.decode_seconds
            tokens, rounds = tokens + stats.round_tokens, rounds + stats.rounds
        ratios.append(seconds[0] / seconds[1])
    return median(ratios), tokens / rounds


if __name__ == "__main__":
    main()
