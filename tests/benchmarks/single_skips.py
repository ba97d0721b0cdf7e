r"""How well do cosines and six replays rank the sub-layers that a draft may skip?

    python tests/benchmarks/single_skips.py MODEL --task gsm8k --data gsm8k.jsonl --chat

Every sub-layer is skipped alone on the same segments, and its acceptance compared with the estimate
that searchers get.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from options import make_text_parser
from scipy.stats import spearmanr

from skipsearch import load_model
from skipsearch.core.mask import SkipMask
from skipsearch.replay.evidence import (
    CONFIRMED_SEGMENTS,
    estimate_single_skips,
    trace_residual_stream,
)
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task
from skipsearch.tuning.calibration import CalibrationLimits, build_replay_objective
from skipsearch.tuning.events import ignore_event


def main() -> None:
    parser = make_text_parser(__doc__)
    parser.add_argument("--text-limit", type=float, default=45, help="seconds of reference text")
    args = parser.parse_args()
    model = load_model(args.model)
    task = load_task(args.task, data=args.data, chat=args.chat)
    workload = make_workload(model, task, task.calibration)
    objective = build_replay_objective(
        model, workload, ignore_event, limits=CalibrationLimits(args.text_limit)
    )
    replay, n_layers = objective.replay, model.spec.n_layers
    _, cosines = trace_residual_stream(model, replay.batches.build_sample(8, 8))
    began = perf_counter()
    estimated = np.array(estimate_single_skips(replay, cosines))
    estimated_s, began = perf_counter() - began, perf_counter()
    measured = np.array(
        [
            replay.measure_acceptance(SkipMask.from_sublayers(n_layers, [s]), CONFIRMED_SEGMENTS)
            for s in range(2 * n_layers)
        ]
    )
    measured_s = perf_counter() - began
    half = n_layers  # half of the sub-layers
    common = len(set(np.argsort(-estimated)[:half]) & set(np.argsort(-measured)[:half]))
    print(f"{model.spec.id}, {task.name}: {len(replay.texts)} answers, {2 * n_layers} sub-layers")
    print(f"rank correlation of the estimate {spearmanr(estimated, measured).statistic:.2f}")
    print(f"rank correlation of the cosine alone {spearmanr(cosines, measured).statistic:.2f}")
    print(f"median error of the acceptance {np.median(abs(estimated - measured)):.3f}")
    print(f"of the better half, {common} of {half} are in the estimate's better half")
    print(f"estimated in {estimated_s:.1f} s, measured in {measured_s:.1f} s")
    for kind, first in (("attention", 0), ("MLP", 1)):
        row = " ".join(
            f"{e:.2f}/{m:.2f}" for e, m in zip(estimated[first::2], measured[first::2], strict=True)
        )
        print(f"{kind} (estimate/measured): {row}")


if __name__ == "__main__":
    main()
