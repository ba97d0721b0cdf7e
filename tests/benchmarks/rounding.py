r"""What rounding activations or K/V costs: perplexity, and greedy texts that stay the same.

For each model and each format, the model reads text (the project's documentation, in windows) and
continues prompts greedily. Texts are compared with those of the first format, which rounds least.
Passes over 1 and 4 tokens are timed, with the formats in turns.

    python tests/benchmarks/rounding.py --of activations --models smollm2-135m-instruct-gguf \
        --dtype bfloat16 --threads 2 --prompts 32 --tokens 64 --out build/rounding.json

--of kv-cache-dtype compares K/V in the dtype with K/V in 8 bits.
A model may have a quantization: `FOLDER:native-4bit`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import skipsearch as ss
from skipsearch.decoding import Decoder, Request
from skipsearch.models.activations import ACTIVATIONS, KV_CACHE_DTYPES
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task

WINDOW = 512  # tokens that are read together
CONTEXT, REPEATS = 128, 25  # tokens before the timed passes, and how often each is timed
ROOT = Path(__file__).resolve().parents[2]
# What is compared -> formats, the one that rounds least first.
FORMATS = {"activations": [*reversed(ACTIVATIONS)], "kv-cache-dtype": [*KV_CACHE_DTYPES]}


def read_windows(model: ModelAdapter, n_windows: int) -> list[Tensor]:
    """Return windows of the documentation, [1, WINDOW] each."""
    text = "\n\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = torch.tensor(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    step = len(ids) // n_windows
    return [ids[i * step : i * step + WINDOW][None] for i in range(n_windows)]


def measure_perplexity(model: ModelAdapter, windows: list[Tensor]) -> float:
    """Return e to the mean loss of a token, given the tokens before it in the window."""
    losses = []
    for window in windows:
        cache, planner = model.new_cache(1, WINDOW), Planner(WINDOW, torch.device("cpu"))
        plan = planner.plan_chain(0, window.shape[1])
        assert model.pass_runner is not None
        logits = model.pass_runner.run(window, cache, plan, None, False)[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:]))
    return math.exp(float(torch.stack(losses).mean()))


def time_passes(models: dict[str, ModelAdapter]) -> dict[str, dict[int, float]]:
    """Return median milliseconds of passes over 1 and 4 tokens, of all models in turns."""
    tokens = torch.ones(1, CONTEXT, dtype=torch.long)
    runs: dict[str, Callable[[int, int], object]] = {}
    for name, model in models.items():
        cache, planner = model.new_cache(1, 2 * CONTEXT), Planner(2 * CONTEXT, torch.device("cpu"))
        assert model.pass_runner is not None
        runs[name] = lambda first, n, run=model.pass_runner.run, cache=cache, plan=planner: run(
            tokens[:, :n], cache, plan.plan_chain(first, n), None, n == CONTEXT
        )
        runs[name](0, CONTEXT)
    times: dict[str, dict[int, list[float]]] = {name: {1: [], 4: []} for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            for n, listed in times[name].items():
                started = perf_counter()
                run(CONTEXT, n)
                listed.append(1e3 * (perf_counter() - started))
    return {name: {n: median(each) for n, each in by.items()} for name, by in times.items()}


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=FORMATS, default="activations")
    parser.add_argument("--models", required=True, help="names, separated by commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", default="chat")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        location, _, quantization = name.partition(":")
        texts: dict[str, list[list[int]]] = {}
        models: dict[str, ModelAdapter] = {}
        for rounding in FORMATS[options.of]:
            settings: dict[str, Any] = {options.of.replace("-", "_"): rounding}
            model = ss.load_model(
                location,
                device="cpu",
                dtype=options.dtype,
                quantization=quantization or None,
                engine="native",
                **settings,
            )
            models[rounding] = model
            task = load_task(options.task)
            prompts = make_workload(model, task, task.calibration[: options.prompts]).prompt_ids
            requests = [Request(ids, max_new_tokens=options.tokens) for ids in prompts]
            texts[rounding] = [g.tokens for g in Decoder(model).generate_batch(requests, 8)]
            first = next(iter(texts))
            pairs = zip(texts[rounding], texts[first], strict=True)
            row = {
                "model": name,
                options.of: rounding,
                "perplexity": measure_perplexity(model, read_windows(model, options.windows)),
                "identical": sum(a == b for a, b in pairs),
                "prompts": len(prompts),
            }
            rows.append(row)
            print(
                f"{name:50} {rounding:6} perplexity {row['perplexity']:.3f}, "
                f"{row['identical']} of {row['prompts']} texts as with {first}",
                flush=True,
            )
        for rounding, times in time_passes(models).items():
            row = next(r for r in rows if (r["model"], r[options.of]) == (name, rounding))
            row["ms"] = times
            print(
                f"{name:50} {rounding:6} {times[1]:.2f} ms a token, "
                f"4 tokens {times[4] / times[1]:.2f}",
                flush=True,
            )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
