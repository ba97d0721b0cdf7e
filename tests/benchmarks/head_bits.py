"""Drafts in few bits whose head has 8 bits, against those whose head has the bits of the layers.

Nothing is skipped, and the head has the rows of a vocabulary. Plain decoding and both drafts decode
each hold-out prompt in turn, twice, and the faster time counts. Intervals are over prompts.

    python tests/benchmarks/head_bits.py --model FOLDER --dtype bfloat16 --threads 2 \
        --task gsm8k --data gsm8k.jsonl
"""

from __future__ import annotations

import argparse

import numpy as np
from options import load_chosen_model, make_parser

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import BITS_OF_WEIGHTS, DraftWeights, Reading, Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import draft_model
from skipsearch.engine.native import draft_copy
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task
from skipsearch.tuning.vocabularies import list_vocabularies

WIDTHS: tuple[DraftWeights, ...] = ("int4", "int5", "int6")
CALIBRATION_PROMPTS, HOLDOUT_PROMPTS, NEW_TOKENS, REPEATS = 24, 16, 96, 2
DRAFT_LENGTH, THRESHOLD = 6, 0.3
BOOTSTRAPS = 2000


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data")
    args = parser.parse_args()
    model, task = load_chosen_model(args), load_task(args.task, data=args.data)
    task = task.model_copy(
        update={"sampling": task.sampling.model_copy(update={"temperature": 0.0})}
    )
    plain = Decoder(model)
    prompts = make_workload(model, task, task.calibration[:CALIBRATION_PROMPTS]).prompt_ids
    texts = [plain.generate(prompt, NEW_TOKENS).tokens for prompt in prompts]
    vocabulary = [v for v in list_vocabularies(model, texts) if v is not None][2]
    prompts = make_workload(model, task, task.holdout[:HOLDOUT_PROMPTS]).prompt_ids
    for weights in WIDTHS:
        widths = BITS_OF_WEIGHTS[weights], 8
        drafting = [make_decoder(model, weights, bits, vocabulary) for bits in widths]
        report(args, weights, [plain, *drafting], prompts)


def make_decoder(
    model: ModelAdapter, weights: DraftWeights, head_bits: int, vocabulary: Vocabulary
) -> Decoder:
    """Return a decoder whose drafts have a head of this width."""
    draft_model.release_draft_copies(model, ())
    draft_copy.HEAD_BITS = head_bits
    reading, policy = Reading(weights, vocabulary), make_exit("confidence", threshold=THRESHOLD)
    mask = SkipMask(model.spec.n_layers)
    return Decoder(model, Recipe((Skip.from_mask(mask, DRAFT_LENGTH, policy, None, reading),)))


def report(
    args: argparse.Namespace, weights: str, decoders: list[Decoder], prompts: list[list[int]]
) -> None:
    seconds, accepted, drafted = [], np.zeros(len(decoders)), np.zeros(len(decoders))
    for prompt in prompts:
        times = np.empty((REPEATS, len(decoders)))
        for repeat in range(REPEATS):
            results = [decoder.generate(prompt, NEW_TOKENS) for decoder in decoders]
            assert all(result.tokens == results[0].tokens for result in results)
            times[repeat] = [result.stats.decode_seconds for result in results]
            accepted += [result.stats.accepted for result in results]
            drafted += [result.stats.drafted for result in results]
        seconds.append(times.min(axis=0))
    by_prompt, random = np.array(seconds), np.random.default_rng(0)
    total = by_prompt.sum(axis=0)
    chosen = random.integers(0, len(by_prompt), (BOOTSTRAPS, len(by_prompt)))
    sums = by_prompt[chosen].sum(axis=1)
    low, high = np.quantile(sums[:, 1] / sums[:, 2], [0.025, 0.975])
    rates = accepted[1:] / drafted[1:]
    print(
        f"{args.task}, {weights}: accepted {rates[0]:.2f} -> {rates[1]:.2f}, speedup "
        f"{total[0] / total[1]:.2f} -> {total[0] / total[2]:.2f}, gain {total[1] / total[2]:.3f} "
        f"({low:.3f}-{high:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
