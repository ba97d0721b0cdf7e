"""What replay says of masks, beside what real decoding of the same prompts does: counts,
acceptance, time, and what each of them costs.

Half of the masks are random, of every size; half are what searches found, the best ones of each
searcher. Each is decoded with under three exit policies, taking turns prompt by prompt with plain
decoding. Exact replay has to count what the decoder counts. Fast replay predicts acceptance and,
with the latency table, time per token. The table is measured anew every few masks, as a search
measures it when it begins: a machine that others use as well is another one half an hour later.

    python tests/benchmarks/replay_against_decoding.py --masks 30 --tasks pycode,prose
    python tests/benchmarks/replay_against_decoding.py --temperature 0.7 --top-p 0.95       #
sampled: no two decoders agree on counts then"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from replay.exact_replay import ExactReplay, count_exact_rounds
from scipy.stats import spearmanr

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.engine import load_model
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.simulate import simulate
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.searchers import SearchProblem
from skipsearch.tasks import load_task
from skipsearch.timing.latency import measure_costs
from skipsearch.tuning.objective import ReplayObjective, make_skip_spec
from skipsearch.tuning.search_loop import Search

DEPTH = 12
TRIALS = 30  # masks of each searcher, seeds included
POLICIES = (
    DraftPolicy(5),
    DraftPolicy(8, Confidence(threshold=0.6)),
    DraftPolicy(
        DEPTH, Adaptive(threshold=0.6, target_acceptance=0.9, step=0.01, beta1=0.5, beta2=0.9)
    ),
)
COUNTS = ("round_tokens", "rounds", "drafted", "accepted", "rejecting_rounds")


@dataclass(frozen=True)
class Line:
    """A mask under a policy. seconds: predicted, per token; predicted_baseline: of plain decoding,
    by the same table; baseline: plain decoding, taking turns with it. differing: counts of exact
    replay that are not the decoder's, as (name, replayed, decoded)."""

    mask: SkipMask
    kind: str
    policy: DraftPolicy
    real: DecodeStats
    baseline: float
    differing: tuple[tuple[str, int, int], ...]
    alpha: float
    simulated_alpha: float
    seconds: float
    predicted_baseline: float


def masks_of(
    by_replay: ReplayObjective, count: int, searchers: Sequence[str], seed: int
) -> list[tuple[str, SkipMask]]:
    """(who proposed it, mask): random ones, then each searcher's best, each one's second best, and
    so on.
    """
    n = 2 * by_replay.replay.model.spec.n_layers
    rng = random.Random(seed)
    sizes = np.linspace(1, n * 3 / 4, count - count // 2).round().astype(int).tolist()
    found = [
        ("random", SkipMask.from_sublayers(n // 2, rng.sample(range(n), size))) for size in sizes
    ]
    problem = SearchProblem(
        n // 2, evidence=collect_evidence(by_replay.replay, by_replay.costs), seed=seed
    )
    best = []
    for name in searchers:
        search = Search(
            problem,
            by_replay.fresh_copy(),
            None,
            (),
            lambda event: None,
            perf_counter(),
            None,
            TRIALS,
        )
        search.run(name)
        best.append([(name, trial.mask) for trial in search.best_trials(count)])
    searched = {mask: name for turn in zip(*best, strict=False) for name, mask in turn}
    return found + [(name, mask) for mask, name in list(searched.items())[: count // 2]]


def decoded(decoders: Sequence[Decoder], prompts: Workload, seed: int) -> list[DecodeStats]:
    """Each on every prompt, taking turns; prompts that end with the prefill's own token are left
    out. No warm-up of a policy.
    """
    totals = [DecodeStats() for _ in decoders]
    for p in range(len(prompts.prompt_ids)):
        turn = [(p + d) % len(decoders) for d in range(len(decoders))]
        for d in turn:
            stats = prompts.generate(decoders[d], p, seed + p).stats
            if stats.round_tokens:
                totals[d] += stats
    return totals


def compared(
    model: ModelAdapter,
    prompts: Workload,
    costs: Costs,
    replay: Replay,
    exact: ExactReplay,
    kind: str,
    mask: SkipMask,
    seed: int,
) -> tuple[list[Line], float]:
    """A line a policy, and the seconds that a fast replay took."""
    began = perf_counter()
    replayed = replay(mask)
    took = perf_counter() - began
    drafts = exact(mask)
    plain, *real = decoded(
        [Decoder(model), *(Decoder(model, Recipe((make_skip_spec(mask, p),))) for p in POLICIES)],
        prompts,
        seed,
    )
    assert plain.seconds_per_token is not None
    alpha = float(np.concatenate([r.acceptance for r in replayed]).mean())
    lines = []
    for policy, stats in zip(POLICIES, real, strict=True):
        walked = count_exact_rounds(drafts, policy)
        differing = tuple(
            (name, a, b)
            for name in COUNTS
            if (a := getattr(walked, name)) != (b := getattr(stats, name))
        )
        predicted = simulate(rounds_from_replay(replayed), mask, policy, costs)
        lines.append(
            Line(
                mask,
                kind,
                policy,
                stats,
                plain.seconds_per_token,
                differing,
                alpha,
                predicted.stats.alpha or 0.0,
                predicted.seconds_per_token,
                costs.verify[0],
            )
        )
    return lines, took


HEAD = (
    "mask      skipped  policy                          tokens rounds drafted accepted | counts |  "
    "   α    fast   | "
    "ms/tok    fast | of plain   fast"
)


def shown(line: Line) -> str:
    real = line.real
    return (
        f"{line.kind:9} {line.mask.n_skipped:7}  {line.policy!s:31} {real.round_tokens:6} "
        f"{real.rounds:6} {real.drafted:7} "
        f"{real.accepted:8} | {'differ' if line.differing else 'equal '} | {real.alpha or 0:6.3f} "
        f"{line.simulated_alpha:6.3f}  | "
        f"{1e3 * (real.seconds_per_token or 0):6.3f} {1e3 * line.seconds:7.3f} | "
        f"{(real.seconds_per_token or 0) / line.baseline:8.3f} "
        f"{line.seconds / line.predicted_baseline:6.3f}"
    )


def summary(lines: list[Line], replays: list[float]) -> None:
    for line in lines:
        for name, ours, theirs in line.differing:
            print(f"  {name} {ours} replayed, {theirs} decoded: {line.policy}, {line.mask}")
    print(
        f"exact replay: counts of {sum(not line.differing for line in lines)} of {len(lines)} are "
        "the decoder's"
    )
    alphas = np.array([line.real.alpha or 0 for line in lines])
    for name, predicted in (
        ("positions", [line.alpha for line in lines]),
        ("simulated", [line.simulated_alpha for line in lines]),
    ):
        off = np.abs(predicted - alphas)
        print(
            f"fast replay, α ({name}): off by {np.median(off):.4f} (median), {off.mean():.4f} "
            f"(mean), {off.max():.4f} (most)"
        )
    measured = np.array([line.real.seconds_per_token or 0 for line in lines])
    relative = measured / [line.baseline for line in lines]
    seconds = np.array([line.seconds for line in lines])
    said = seconds / [line.predicted_baseline for line in lines]
    for name, ratio in (
        ("milliseconds", seconds / measured),
        ("in units of plain decoding", said / relative),
    ):
        off = 100 * np.abs(ratio - 1)
        print(
            f"fast replay, time per token ({name}): off by {np.median(off):.1f} % (median), "
            f"{off.max():.1f} % (most)"
        )
    print(
        "fast replay, rank correlation of time per token in units of plain decoding: "
        f"{spearmanr(said, relative).statistic:.3f}; "
        + ", ".join(
            f"{spearmanr(said[i :: len(POLICIES)], relative[i :: len(POLICIES)]).statistic:.3f} "
            f"{p.exit.kind}"
            for i, p in enumerate(POLICIES)
        )
    )
    wall = np.median([line.real.decode_seconds + line.real.prefill_seconds for line in lines])
    took = np.median(replays)
    print(
        f"a fast replay takes {took:.3f} s, real decoding of the same tokens {wall:.3f} s: "
        f"1/{wall / took:.1f} of it"
    )


def sampled(
    model: ModelAdapter, prompts: Workload, masks: list[tuple[str, SkipMask]], samples: int
) -> None:
    """Acceptance alone, of rounds of one drafted token, whose drafts see what replay sees, and of
    five. Texts of replay and of decoding are samples of their own, several of each prompt."""
    replays = [
        Replay(
            model,
            prompts.prompt_ids,
            prompts.max_new_tokens,
            prompts.end_on_repeat,
            sampling=prompts.sampling,
            seed=500 + 1000 * s,
        )
        for s in range(samples)
    ]
    print(
        "mask      skipped | α of replay     | decoded, 1 a round        | decoded, 5 a round",
        flush=True,
    )
    for kind, mask in masks:
        chances = np.concatenate([r.acceptance for replay in replays for r in replay(mask)])
        alpha, measured = float(chances.mean()), []
        for length in (1, 5):
            decoder = Decoder(model, Recipe((make_skip_spec(mask, DraftPolicy(length)),)))
            measured.append(
                sum(
                    (decoded([decoder], prompts, 1000 * s)[0] for s in range(1, samples + 1)),
                    DecodeStats(),
                )
            )
        print(
            f"{kind:9} {mask.n_skipped:7} | {alpha:.4f} ± "
            f"{chances.std() / len(chances) ** 0.5:.4f} | "
            + " | ".join(
                f"{m.alpha or 0:.4f} ± {error(m):.4f}, {(m.alpha or 0) - alpha:+.4f}"
                for m in measured
            ),
            flush=True,
        )


def error(stats: DecodeStats) -> float:
    """Standard error of an acceptance rate, as if drafts were independent."""
    alpha = stats.alpha or 0.0
    return float(np.sqrt(alpha * (1 - alpha) / max(1, stats.accepted + stats.rejecting_rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", default="pycode,prose", help="names, parted by commas")
    parser.add_argument("--masks", type=int, default=30, help="of each task")
    parser.add_argument(
        "--prompts", type=int, default=48, help="of each task's calibration prompts"
    )
    parser.add_argument(
        "--searchers",
        default="asd,clasp,evolution,exchange,gp,knapsack,s3d,tpe",
        help="that propose the searched half",
    )
    parser.add_argument(
        "--fresh", type=int, default=5, help="masks until the latency table is measured anew"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--samples", type=int, default=3, help="of each prompt, where tokens are sampled"
    )
    args = parser.parse_args()
    model = load_model(args.model, args.device, args.dtype, engine=args.engine)
    every: list[Line] = []
    for name in args.tasks.split(","):
        task = load_task(name)
        prompts = make_workload(model, task, task.calibration).head(args.prompts)
        context = (
            sum(map(len, prompts.prompt_ids)) // len(prompts.prompt_ids)
            + prompts.max_new_tokens // 2
        )
        costs = measure_costs(model, DEPTH, context)
        greedy = Replay(model, prompts.prompt_ids, prompts.max_new_tokens, prompts.end_on_repeat)
        masks = masks_of(
            ReplayObjective(greedy, costs), args.masks, args.searchers.split(","), args.seed
        )
        if args.temperature:
            drawn = SamplingParams(args.temperature, args.top_p)
            print(
                f"\n{name}, temperature {args.temperature}, top-p {args.top_p}: {args.samples} "
                f"samples of {len(prompts.prompt_ids)} prompts"
            )
            sampled(model, replace(prompts, sampling=drawn), masks, args.samples)
            continue
        exact = ExactReplay(greedy, DEPTH)
        greedy(masks[0][1])  # warm-up
        decoded([Decoder(model), Decoder(model, masks[0][1])], prompts.head(2), args.seed)
        lines: list[Line] = []
        replays = []
        print(
            f"\n{name}: {len(masks)} masks, {len(prompts.prompt_ids)} prompts, plain decoding at "
            f"{1e3 * costs.verify[0]:.3f} ms\n{HEAD}"
        )
        for i, (kind, mask) in enumerate(masks):
            if i % args.fresh == 0:
                costs = measure_costs(model, DEPTH, context)
            new, took = compared(model, prompts, costs, greedy, exact, kind, mask, args.seed)
            print("\n".join(map(shown, new)), flush=True)
            lines += new
            replays.append(took)
        summary(lines, replays)
        every += lines
    if not args.temperature:
        print(
            "\nall tasks: exact replay counts what decoding counts for "
            f"{sum(not line.differing for line in every)} of {len(every)}"
        )


if __name__ == "__main__":
    main()
