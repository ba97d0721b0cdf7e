r"""Passes of the engine native and of llama.cpp over the same file, in turns.

For each model, number of threads and context: milliseconds of a pass over one token after the
context, the times v of passes over 2, 4, 8 and 16 tokens over that, and seconds of a prefill of the
context, or of 512 tokens if it is shorter. Passes of the two programs alternate, and figures are
medians; a prefill of more than 512 tokens runs once. `read` is the speed at which a pass over one
token reads the weights, over that of a loop that only reads memory, measured right after it.

    python tests/benchmarks/passes_and_llama_cpp.py --models A.gguf,B.gguf --threads 1,2 \
        --contexts 128,8000 --kv-cache-dtype int8 --out build/passes.json

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
from skipsearch.timing.read_rate import measure_read_rate

SIZES = (1, 2, 4, 8, 16)  # tokens of a pass
MIN_PREFILL = 512  # tokens


def make_native_pass(
    name: str, quantization: str | None, dtype: str, kv_cache_dtype: str, n_slots: int
) -> tuple[Any, Callable]:
    """Return (model, function that runs a pass over `n` tokens after `context`)."""
    model: Any = ss.load_model(
        name,
        device="cpu",
        dtype=dtype,
        engine="native",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    cache, planner = model.new_cache(1, n_slots), Planner(n_slots, torch.device("cpu"))
    tokens = torch.ones(1, n_slots, dtype=torch.long)

    def run_pass(n: int, context: int) -> None:
        model.run(tokens[:, :n], cache, planner.plan_chain(context, n), None, n > SIZES[-1])

    return model, run_pass


def make_llama_pass(
    name: str, quantization: str | None, model: Any, dtype: str, n_slots: int
) -> Callable:
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

    run_pass.reset = lambda: llama.reset(n_slots)  # type: ignore[attr-defined]
    return run_pass


def time_passes(
    passes: dict[str, Callable], repeats: int, context: int
) -> dict[str, dict[str, float]]:
    """Return median milliseconds by program and kind of pass: numbers of tokens, or prefill."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in passes}
    n_prefill = max(context, MIN_PREFILL)

    def time_pass(name: str, kind: str, n: int, after: int) -> None:
        started = perf_counter()
        passes[name](n, after)
        times[name].setdefault(kind, []).append(1e3 * (perf_counter() - started))

    for _ in range(3 if n_prefill == MIN_PREFILL else 1):
        for name in passes:
            time_pass(name, "prefill", n_prefill, 0)
    for run_pass in passes.values():
        if context < n_prefill:
            run_pass(context, 0)
    for _ in range(repeats):
        for name, run_pass in passes.items():
            for n in SIZES:
                run_pass(1, context)  # the program's own weights are in the cache again
                time_pass(name, str(n), n, context)
    return {
        name: {kind: median(each) for kind, each in by_kind.items()}
        for name, by_kind in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="names, separated by commas")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--contexts", default="128", help="tokens before a pass")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or int8, of both programs")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    contexts = [int(context) for context in args.contexts.split(",")]
    n_slots = max(*contexts, MIN_PREFILL) + SIZES[-1]
    every = []
    print(
        "model, threads, context: ms native / llama.cpp (ratio); v of 2, 4, 8, 16; "
        f"prefill of the context, at least {MIN_PREFILL} tokens"
    )
    for entry in args.models.split(","):
        # `synthetic:22x2048` has a colon of its own.
        path, colon, quantization = entry.rpartition(":native-")
        path, quantization = (path, f"native-{quantization}") if colon else (entry, "")
        name = find_model_file(path)
        model, native = make_native_pass(
            name, quantization or None, args.dtype, args.kv_cache_dtype, n_slots
        )
        llama = make_llama_pass(name, quantization or None, model, args.dtype, n_slots)
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            llama.reset()  # type: ignore[attr-defined]
            for context in contexts:
                times = time_passes({"native": native, "llama.cpp": llama}, args.repeats, context)
                ours, theirs = times["native"], times["llama.cpp"]
                ceiling = measure_read_rate(torch.device("cpu"))
                rate = model.read_bytes / (ours["1"] / 1e3)
                print(
                    f"{Path(name).stem} {quantization}, {threads}, {context}: "
                    f"{ours['1']:.2f} / {theirs['1']:.2f} ({ours['1'] / theirs['1']:.2f}); v "
                    + " ".join(f"{ours[str(n)] / ours['1']:.2f}" for n in SIZES[1:])
                    + " / "
                    + " ".join(f"{theirs[str(n)] / theirs['1']:.2f}" for n in SIZES[1:])
                    + f"; prefill {ours['prefill']:.0f} / {theirs['prefill']:.0f} "
                    f"({ours['prefill'] / theirs['prefill']:.2f}); read {rate / 1e9:.1f} of "
                    f"{ceiling / 1e9:.1f} GB/s ({rate / ceiling:.2f})",
                    flush=True,
                )
                every.append(
                    {
                        "model": entry,
                        "threads": threads,
                        "context": context,
                        "kv_cache_dtype": args.kv_cache_dtype,
                        "ms": times,
                        "read_rate": rate,
                        "read_ceiling": ceiling,
                    }
                )
    if args.out is not None:
        args.out.write_text(json.dumps(every, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
