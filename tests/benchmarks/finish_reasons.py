r"""Why the answers of a model end, by task, and what a first repeated 6-gram would have cut.

    python tests/benchmarks/finish_reasons.py MODEL [--prompts 24] [--new-tokens 256]
        chat gsm8k=gsm8k_test.jsonl humaneval=humaneval.jsonl

TASK=FILE reads the prompts of a task from a file. Prompts are hold-out prompts, in the model's chat
template; answers are greedy. No clock is involved.
"""

from __future__ import annotations

import argparse
from collections import Counter
from statistics import mean

from skipsearch import load_model
from skipsearch.decoding.repetition import RepeatDetector, find_loop_start
from skipsearch.engine.sampler import GREEDY
from skipsearch.replay.generate_together import generate_continuations
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="+", metavar="TASK[=FILE]")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    model = load_model(args.model)
    print(
        "| task | answers | ended | looped | cut | repeat a 6-gram | tokens | up to that 6-gram |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for given in args.tasks:
        name, _, file = given.partition("=")
        task = load_task(name, data=file or None, chat=True)
        work = make_workload(model, task, task.holdout[: args.prompts])
        written = generate_continuations(
            model, work.prompt_ids, args.new_tokens, "loop", sampling=GREEDY
        )
        texts = [continuation.tokens for continuation in written]
        reasons = Counter(
            "ended"
            if text[-1] in model.spec.eos_token_ids
            else "cut"
            if find_loop_start(text) is None
            else "looped"
            for text in texts
        )
        repeats = list[int | None]()  # tokens up to the end of the first repeated 6-gram
        for text in texts:
            detector = RepeatDetector(6)
            ends = (n for n, token in enumerate(text, 1) if detector.push_token(token))
            repeats.append(next(ends, None))
        n_repeats = sum(end is not None for end in repeats)
        beginnings = [end or len(text) for end, text in zip(repeats, texts, strict=True)]
        print(
            f"| {name} | {len(texts)} | {reasons['ended']} | {reasons['looped']} "
            f"| {reasons['cut']} | {n_repeats} | {mean(map(len, texts)):.0f} "
            f"| {mean(beginnings):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
