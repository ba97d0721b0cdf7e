r"""Passes of the engine native and of llama.cpp over the same file, in turns.

For each model and number of threads: milliseconds of a pass over one token after a context, the
times v of passes over 2, 4, 8 and 16 tokens over that, and of a prefill of 512 tokens. Passes of
the two programs alternate, and figures are medians.

    python tests/benchmarks/passes_and_llama_cpp.py --models A.gguf,B.gguf --threads 1,2 \
        --out build/passes.json

A model may be a GGUF file, or a folder with a quantization that llama.cpp knows too:
FOLDER:native-8bit, FOLDER:native-4bit. FOLDER alone is compared in `--dtype`.

Set OMP_WAIT_POLICY=PASSIVE and GOMP_SPINCOUNT=10000, as the commands do: without the first, idle
threads of torch slow the engine native down, and without the second llama.cpp.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import skipsearch as ss
from skipsearch.bench.llama_cpp import LlamaCpp
from skipsearch.models.kv_cache import Planner
from skipsearch.models.loading.gguf_model import is_gguf
from skipsearch.models.loading.model_files import find_model_file

SIZES = (1, 2, 4, 8, 16)  # tokens of a pass
CONTEXT = 128  # tokens before a pass
PREFILL = 512  # tokens


def make_native_pass(name: str, quantization: str | None, dtype: str) -> tuple[Any, Callable]:
    """Return (model, function that runs a pass over `n` tokens after `context`)."""
    model: Any = ss.load_model(
        name, device="cpu", dtype=dtype, engine="native", quantization=quantization
    )
    cache, planner = model.new_cache(1, 1024), Planner(1024, torch.device("cpu"))
    tokens = torch.ones(1, PREFILL, dtype=torch.long)

    def run_pass(n: int, context: int) -> None:
        model.run(tokens[:, :n], cache, planner.plan_chain(context, n), None, n > SIZES[-1])

    return model, run_pass


def make_llama_pass(name: str, quantization: str | None, model: Any, dtype: str) -> Callable:
    """Return the same function for llama.cpp."""
    if is_gguf(name):
        llama = LlamaCpp(model, gguf_file=Path(name))
    else:
        plain = ss.load_model(name, device="cpu", dtype=dtype, engine="hf")
        bits = int(quantization.removeprefix("native-")[0]) if quantization else None
        llama = LlamaCpp(plain, bits)

    def run_pass(n: int, context: int) -> None:
        llama.truncate(context)
        llama.decode([1] * n, context, all_positions=n <= SIZES[-1])

    run_pass.reset = lambda: llama.reset(1024)  # type: ignore[attr-defined]
    return run_pass


def time_passes(passes: dict[str, Callable], repeats: int) -> dict[str, dict[int, float]]:
    """Return median milliseconds by program and number of tokens."""
    times: dict[str, dict[int, list[float]]] = {name: {} for name in passes}
    for repeat in range(repeats):
        for name, run_pass in passes.items():
            run_pass(CONTEXT, 0)
            for n in SIZES:
                run_pass(1, CONTEXT)  # the program's own weights are in the cache again
                started = perf_counter()
                run_pass(n, CONTEXT)
                times[name].setdefault(n, []).append(1e3 * (perf_counter() - started))
            if repeat % 5 == 0:
                started = perf_counter()
                run_pass(PREFILL, 0)
                times[name].setdefault(PREFILL, []).append(1e3 * (perf_counter() - started))
    return {
        name: {n: median(each) for n, each in by_size.items()} for name, by_size in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="names, separated by commas")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    every = []
    print("model, threads: ms native / llama.cpp (ratio); v of 2, 4, 8, 16; prefill of 512 tokens")
    for entry in args.models.split(","):
        # `synthetic:22x2048` has a colon of its own.
        path, colon, quantization = entry.rpartition(":native-")
        path, quantization = (path, f"native-{quantization}") if colon else (entry, "")
        name = find_model_file(path)
        model, native = make_native_pass(name, quantization or None, args.dtype)
        llama = make_llama_pass(name, quantization or None, model, args.dtype)
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            llama.reset()  # type: ignore[attr-defined]
            times = time_passes({"native": native, "llama.cpp": llama}, args.repeats)
            ours, theirs = times["native"], times["llama.cpp"]
            print(
                f"{Path(name).stem} {quantization}, {threads}: {ours[1]:.2f} / {theirs[1]:.2f} "
                f"({ours[1] / theirs[1]:.2f}); v "
                + " ".join(f"{ours[n] / ours[1]:.2f}" for n in SIZES[1:])
                + " / "
                + " ".join(f"{theirs[n] / theirs[1]:.2f}" for n in SIZES[1:])
                + f"; prefill {ours[PREFILL]:.0f} / {theirs[PREFILL]:.0f} "
                f"({ours[PREFILL] / theirs[PREFILL]:.2f})",
                flush=True,
            )
            every.append({"model": entry, "threads": threads, "ms": times})
    if args.out is not None:
        args.out.write_text(json.dumps(every, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
