"""Recipes with a trained draft head, next to lookup alone: the gain of each on hold-out prompts.

The recipes are given, and not searched: a search picks among them by calibration prompts. Whole
answers are decoded in turn, by plain decoding, too. With `--llama-cpp`, llama.cpp and plain
decoding then generate as many tokens of each answer in turn, from the same file.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000 python tests/benchmarks/head_recipes.py \
        --model FILE.gguf --threads 2 --head modules/mtp.safetensors --task chat --prompts 6 \
        --out build/head-chat.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from options import load_chosen_model, make_parser

from skipsearch.bench.llama_cpp import PLAIN, LlamaCpp, LlamaGenerate
from skipsearch.core.reading import WEIGHTS_OF_BITS
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.trained.module_files import make_reference, read_module_header
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task
from skipsearch.timing.interleaved import Timings, time_interleaved


def list_recipes(head: Path) -> dict[str, Recipe]:
    """Return the recipes by name. head: the module's file."""
    card = read_module_header(head).card
    module = make_reference(head, head.name).model_dump(mode="json")
    lookup = {"kind": "lookup", "min_match": 1, "per_match": 1, "draft_length": 2}
    shared: dict[str, Any] = {
        "kind": "mtp",
        "weights": WEIGHTS_OF_BITS[card.bits or 8],
        "module": module,
    }
    if card.vocabulary is not None:
        shared["vocabulary"] = card.vocabulary.model_dump()
    one = shared | {"draft_length": 1, "exit": {"kind": "fixed"}}
    confident = {"kind": "confidence", "threshold": 0.6}
    two, three = (shared | {"draft_length": n, "exit": confident} for n in (2, 3))
    drafters = {
        "lookup": [lookup],
        "head, up to 2 tokens": [two],
        "lookup, then head, 1 token": [lookup, one],
        "lookup, then head, up to 2 tokens": [lookup, two],
        "lookup, then head, up to 3 tokens": [lookup, three],
    }
    return {name: Recipe.from_data(data) for name, data in drafters.items()}


def time_llama_cpp(
    model: Any, path: str, prompts: Sequence[Sequence[int]], texts: dict[int, list[int]]
) -> dict[str, float]:
    """Return milliseconds per token of plain decoding by the model and by llama.cpp, in turns.

    texts: by index of prompt; answers of as many tokens are generated.
    """
    llama = LlamaGenerate(PLAIN, LlamaCpp(model, None, Path(path)))
    decoder, seconds = Decoder(model), {"native": 0.0, "llama.cpp": 0.0}
    for i, text in texts.items():
        own = decoder.generate(prompts[i], len(text), ignore_eos=True)
        seconds["native"] += own.stats.decode_seconds
        seconds["llama.cpp"] += llama.run(prompts[i], len(text))[2]
    n_tokens = sum(len(text) - 1 for text in texts.values())
    figures = {name: 1e3 * total / n_tokens for name, total in seconds.items()}
    print(*(f"{name}: {figure:.1f} ms a token" for name, figure in figures.items()), sep=", ")
    return figures


def main() -> None:
    parser = make_parser(__doc__, engine="native")
    parser.add_argument("--data", help="a file with the text of a published task")
    parser.add_argument("--chat", action="store_true", help="prompts are requests to a chat model")
    parser.add_argument("--head", type=Path, required=True, help="the file of a trained head")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--temperature", type=float, help="with top-p 0.9, instead of the task's")
    parser.add_argument("--llama-cpp", action="store_true", help="the model is a GGUF file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load_chosen_model(args)
    task = load_task(args.task, data=args.data, chat=args.chat)
    workload = make_workload(model, task, task.holdout[: args.prompts])
    if args.temperature is not None:
        sampling = SamplingParams(args.temperature, top_p=0.9) if args.temperature else GREEDY
        workload = replace(workload, sampling=sampling)
    recipes, folders = list_recipes(args.head), [args.head.parent]
    decoders = [Decoder(model, recipe, module_folders=folders) for recipe in recipes.values()]
    plain, *timings = time_interleaved(
        [Decoder(model), *decoders],
        workload,
        seed=args.seed,
        progress=lambda done, total: print(f"{done} of {total} prompts", flush=True),
    )
    texts = {sample.prompt_index: sample.generation.tokens for sample in plain.samples}

    def describe(name: str, drafted: Timings) -> dict[str, Any]:
        samples = drafted.samples
        return {
            "name": name,
            "speedup": asdict(drafted.speedup_over(plain)),
            "request_speedup": asdict(drafted.speedup_over(plain, with_prefill=True)),
            "by_drafter": [asdict(counts) for counts in drafted.stats.by_drafter],
            "tau": drafted.stats.tau,
            "identical": sum(s.generation.tokens == texts[s.prompt_index] for s in samples),
            "of": len(samples),
        }

    rows = [describe(name, drafted) for name, drafted in zip(recipes, timings, strict=True)]
    measured = {
        "task": task.name,
        "prompts": plain.n_prompts,
        "tokens": sum(sample.n_tokens for sample in plain.samples),
        "plain_ms_per_token": {k: 1e3 * v for k, v in asdict(plain.estimate()).items()},
        "rows": rows,
    }
    if args.llama_cpp:
        measured["llama_cpp"] = time_llama_cpp(model, args.model, workload.prompt_ids, texts)
    for row in rows:
        mean, low, high = (row["speedup"][key] for key in ("mean", "low", "high"))
        print(f"{row['name']:36} {mean:.3f} ({low:.3f}-{high:.3f}) {row['identical']}/{row['of']}")
    if args.out is not None:
        args.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
