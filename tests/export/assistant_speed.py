"""How fast transformers generates with an exported draft as its assistant, against without it; by
hand:

    python tests/export/assistant_speed.py MODEL DRAFT [--task pycode] [--prompts 16]
    [--draft-length 5] [--threshold 0.4]

Both decode the task's hold-out prompts greedily in turns, each as far as the model writes alone
up to where it loops. Prints milliseconds a token, the prefill included, and the paired
ratio with its 95 % interval."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipsearch.core.stats import estimate_ratio
from skipsearch.decoding.repetition import find_loop_start
from skipsearch.models.loading.hub import resolve_model
from skipsearch.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--task", default="pycode")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--threshold", type=float, default=0.4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, *_ = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
        for path in (folder, args.draft)
    )
    draft.generation_config.num_assistant_tokens = args.draft_length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = args.threshold
    task = load_task(args.task)

    def timed(ids: torch.Tensor, new: int, **assistant: Any) -> tuple[list[int], float]:
        started = perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            **assistant,
        )
        return out[0, ids.shape[1] :].tolist(), perf_counter() - started

    alone, assisted, tokens, identical = [], [], 0, 0
    prompts = task.holdout[: args.prompts]
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([tokenizer(prompt.text)["input_ids"][-task.max_prompt_tokens :]])
        written, _ = timed(ids, task.max_new_tokens)  # a warm-up too
        new = (find_loop_start(written) if task.end_on_repeat == "loop" else None) or len(written)
        turns = {
            name: timed(ids, new, **assistant)
            for name, assistant in sorted(
                {"alone": {}, "assisted": {"assistant_model": draft}}.items(), reverse=bool(i % 2)
            )
        }
        (plain, plain_seconds), (helped, helped_seconds) = turns["alone"], turns["assisted"]
        alone.append(plain_seconds)
        assisted.append(helped_seconds)
        tokens += len(plain)
        identical += plain == helped
    ratio = estimate_ratio(alone, assisted)
    print(
        f"{len(prompts)} prompts, {tokens} tokens: alone {1e3 * sum(alone) / tokens:.2f} ms/token, "
        "with the draft "
        f"{1e3 * sum(assisted) / tokens:.2f}, speedup {ratio.mean:.2f} "
        f"({ratio.low:.2f}–{ratio.high:.2f}), tokens identical on "
        f"{identical} of {len(prompts)}"
    )


if __name__ == "__main__":
    main()
