"""How often intervals hold the truth, and how often a race drops the fastest, by simulation.

    PYTHONPATH=. python tests/benchmarks/sequential_rules.py [--runs 10000]

The first table: measurements of a speedup that stop once the interval is narrow, as `tune` and
`profile verify` measure. The second: races of recipes whose times have an error that replay does
not predict. Both run the code that decodes, on made-up times. No clock is involved.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Generation
from skipsearch.replay.workload import Workload
from skipsearch.timing.elimination import race_decoders
from skipsearch.timing.interleaved import PairedTimings, measure_speedup
from skipsearch.tuning.race import RACE_RUNGS

LENGTH_LIMIT = 256  # tokens of an answer
NOISE = 0.02  # of the time of one generation
# Candidates of a race -> their true times, the fastest 1.
RACES = {
    "three others 5 % slower": [1.0, 1.05, 1.05, 1.05],
    "five others 5 % slower": [1.0, 1.05, 1.05, 1.05, 1.05, 1.05],
    "three within 1 %": [1.0, 1.0, 1.005, 1.01],
    "3 %, 20 %, 50 % slower": [1.0, 1.03, 1.2, 1.5],
}


@dataclass(frozen=True)
class SimulatedDecoder:
    """A decoder whose times are known."""

    seconds: np.ndarray  # [prompts]
    is_learning: bool = False


@dataclass
class SimulatedWorkload:
    """A workload whose answers have given lengths."""

    n_tokens: np.ndarray  # [prompts]
    n_decoded: int = 0  # answers so far, without the warm-up

    @property
    def prompt_ids(self) -> range:
        return range(len(self.n_tokens))

    def generate(
        self,
        decoder: SimulatedDecoder,
        prompt_index: int,
        seed: int,
        max_tokens: int | None = None,
        **_: Any,
    ) -> Generation:
        self.n_decoded += max_tokens is None
        stats = DecodeStats(
            round_tokens=self.n_tokens[prompt_index], decode_seconds=decoder.seconds[prompt_index]
        )
        return Generation([], "length", stats)


def draw_lengths(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens of answers, what their logarithms were drawn from): many reach the limit."""
    normal = rng.standard_normal(shape)
    return np.clip(150 * np.exp(0.6 * normal), 8, LENGTH_LIMIT).round(), normal


def draw_times(
    rng: np.random.Generator, shape: tuple[int, ...], variation: float, correlation: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, seconds of plain decoding, seconds of drafting) of prompts.

    variation: the coefficient of variation of their log-normal speedups. correlation: between the
    logarithms of the speedup and of the length.
    """
    n_tokens, normal = draw_lengths(rng, shape)
    normal = correlation * normal + (1 - correlation**2) ** 0.5 * rng.standard_normal(shape)
    speedups = 1.5 * np.exp(np.log1p(variation**2) ** 0.5 * normal)
    plain, drafting = (np.exp(NOISE * rng.standard_normal(shape)) for _ in range(2))
    return n_tokens, n_tokens * plain, n_tokens / speedups * drafting


def find_true_speedup(variation: float, correlation: float) -> float:
    _, plain, drafting = draw_times(np.random.default_rng(0), (4_000_000,), variation, correlation)
    return float(plain.sum() / drafting.sum())


def simulate_measurements(
    runs: int, n_prompts: int, variation: float, correlation: float, seed: int = 1
) -> list[PairedTimings]:
    """Measure the speedup of so many decoders, each on prompts of its own."""
    times = draw_times(np.random.default_rng(seed), (runs, n_prompts), variation, correlation)
    return [
        measure_speedup(
            cast(Decoder, SimulatedDecoder(plain)),
            cast(Decoder, SimulatedDecoder(drafting)),
            cast(Workload, SimulatedWorkload(n_tokens)),
        )
        for n_tokens, plain, drafting in zip(*times, strict=True)
    ]


def compute_coverage(measurements: list[PairedTimings], truth: float) -> float:
    """Return the share of intervals that hold the truth."""
    intervals = [measurement.speedup for measurement in measurements]
    return float(np.mean([e.low <= truth <= e.high for e in intervals]))


def simulate_races(
    runs: int, times: list[float], error: float, rungs: tuple[int, ...] = RACE_RUNGS, seed: int = 1
) -> tuple[np.ndarray, float]:
    """Race candidates; return ([runs] true times of the winners, mean number of decoded answers).

    times: the candidates' true times, which race in a random order. error: the coefficient of
    variation of a candidate's time on a prompt, beyond what replay predicts of it.
    """
    rng, winners, n_decoded = np.random.default_rng(seed), [], 0
    for _ in range(runs):
        order, shape = rng.permutation(times), (len(times), sum(rungs))
        workload = SimulatedWorkload(draw_lengths(rng, shape[1:])[0])
        plain = workload.n_tokens * np.exp(0.2 * rng.standard_normal(shape[1]))
        seconds = plain * order[:, None] * np.exp(error * rng.standard_normal(shape))
        winner, *_ = race_decoders(
            cast(Decoder, SimulatedDecoder(plain)),
            cast(list[Decoder], [SimulatedDecoder(row) for row in seconds]),
            cast(Workload, workload),
            rungs,
        )
        winners.append(order[winner])
        n_decoded += workload.n_decoded
    return np.array(winners), n_decoded / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    runs = parser.parse_args().runs
    print("| speedups vary by | correlation with length | prompts | covered | decoded | narrow |")
    print("|---|---|---|---|---|---|")
    for variation in (0.05, 0.1, 0.2, 0.35):
        for correlation in (-0.3, 0.0, 0.5):
            truth = find_true_speedup(variation, correlation)
            for n_prompts in (8, 16, 32, 64):
                measured = simulate_measurements(runs, n_prompts, variation, correlation)
                print(
                    f"| {variation} | {correlation} | {n_prompts} "
                    f"| {compute_coverage(measured, truth):.1%} "
                    f"| {np.mean([m.plain.n_prompts for m in measured]):.0f} "
                    f"| {np.mean([m.stopped_early for m in measured]):.0%} |",
                    flush=True,
                )
    print()
    print("| candidates | error | winner 5 % slower | mean loss | answers decoded |")
    print("|---|---|---|---|---|")
    for name, times in RACES.items():
        for error in (0.02, 0.04, 0.06, 0.1):
            winners, n_decoded = simulate_races(runs // 5, times, error)
            print(
                f"| {name} | {error} | {(winners >= 1.05).mean():.1%} | {winners.mean() - 1:.2%} "
                f"| {n_decoded:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
