"""The published search, as it is described, for comparison only: a Gaussian process on continuous
variables that are rounded to bits, each point judged by the wall-clock time of real generation with
Draft & Verify's adaptive exit.

What is kept of it: 8 prompts, 32 tokens each, prefill inside the time, one timing a point, no
interleaving, a first guess that skips the middle, the fastest single timing as the answer. What is
ours: the engine, so that the two searches are compared and not two decoders. Source: Draft &
Verify, section 3.3 and appendix B.

    python tests/benchmarks/published_method.py --task pycode --minutes 30 --evaluations 300 --out
build/published-pycode.json"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from bayes_opt import BayesianOptimization
from options import load_chosen_model, make_parser

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.tasks import load_task

PROMPTS, TOKENS, MAX_DRAFT = 8, 32, 12
EXIT: dict[str, Any] = {
    "threshold": 0.6,
    "target_acceptance": 0.9,
    "step": 0.01,
    "beta1": 0.5,
    "beta2": 0.9,
}


class PublishedSearch:
    """evaluations: every point in order, {"seconds" per token, "attn", "mlp", "at" seconds since
    the start}.
    """

    def __init__(self, model: ModelAdapter, prompts: Workload, seed: int, started: float):
        self.model, self.prompts, self.started = model, prompts, started
        self.evaluations: list[dict[str, Any]] = []
        names = [f"x{i:03d}" for i in range(2 * model.spec.n_layers)]
        self.optimizer = BayesianOptimization(
            f=self.evaluate,
            pbounds=dict.fromkeys(names, (0.0, 1.0)),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self.optimizer.set_gp_params(alpha=1e-2)
        quarter = len(names) // 4
        self.optimizer.probe(
            {name: float(quarter <= i < 3 * quarter) for i, name in enumerate(names)}, lazy=True
        )

    def evaluate(self, **point: float) -> float:
        mask = SkipMask.from_bits([int(point[name] > 0.5) for name in sorted(point)])
        decoder = (
            Decoder(
                self.model, mask, draft_length=MAX_DRAFT, exit_policy=make_exit("adaptive", **EXIT)
            )
            if mask.n_skipped
            else Decoder(self.model)
        )
        tokens, began = 0, perf_counter()
        for p in range(len(self.prompts.prompt_ids)):
            tokens += len(self.prompts.generate(decoder, p, seed=0, max_tokens=TOKENS).tokens)
        seconds = (perf_counter() - began) / tokens
        self.evaluations.append(
            {
                "seconds": seconds,
                "attn": mask.attn,
                "mlp": mask.mlp,
                "at": perf_counter() - self.started,
            }
        )
        return -seconds

    def run(self, minutes: float, evaluations: int, out: Path, about: Mapping[str, Any]) -> None:
        """Until both are reached. Written after every tenth point, so that a kill loses little."""
        while len(self.evaluations) < evaluations or perf_counter() - self.started < 60 * minutes:
            self.optimizer.maximize(init_points=5 if not self.evaluations else 0, n_iter=1)
            if len(self.evaluations) % 10 == 0:
                self.save(out, about)
                best = min(self.evaluations, key=lambda e: e["seconds"])
                print(
                    f"{len(self.evaluations)} points in {perf_counter() - self.started:.0f} s, "
                    f"best {best['seconds'] * 1e3:.2f} ms/token",
                    flush=True,
                )
        self.save(out, about)

    def save(self, out: Path, about: Mapping[str, Any]) -> None:
        distinct = len({(e["attn"], e["mlp"]) for e in self.evaluations})
        best = min(self.evaluations, key=lambda e: e["seconds"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            json.dumps(
                {
                    **about,
                    "seconds": perf_counter() - self.started,
                    "distinct": distinct,
                    "answer": best,
                    "exit": EXIT,
                    "draft_length": MAX_DRAFT,
                    "evaluations": self.evaluations,
                }
            )
        )


def main() -> None:
    started = perf_counter()
    parser = make_parser(__doc__, engine="auto")
    parser.add_argument("--minutes", type=float, default=30, help="at least so long")
    parser.add_argument("--evaluations", type=int, default=300, help="at least so many")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    model, task = load_chosen_model(chosen), load_task(chosen.task)
    prompts = make_workload(model, task, task.calibration).head(PROMPTS)
    search = PublishedSearch(model, prompts, chosen.seed, started)
    search.run(
        chosen.minutes,
        chosen.evaluations,
        chosen.out,
        {"model": chosen.model, "task": chosen.task, "seed": chosen.seed},
    )


if __name__ == "__main__":
    main()
