"""Studies as `tune` leaves them, without a search: a journal with judged masks and a
race.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial, TrialState
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.tuning.study import StudyStore

LAYERS = 6
IDENTITY: dict[str, Any] = {
    "model": "demo",
    "n_layers": LAYERS,
    "dtype": "float32",
    "device": "a processor",
    "engine": "lean",
    "task": "sums",
    "objective": "replay",
    "config_sha256": "c" * 64,
    "software": {"torch": "2"},
}
SEARCHERS = {"sensitivity": 5, "gp": 12}
LOOKUP = {"kind": "lookup", "min_match": 2, "draft_length": 8}
WINNER = [
    LOOKUP,
    {
        "kind": "skip",
        "attn": [1, 2],
        "mlp": [3],
        "draft_length": 6,
        "exit": {"kind": "confidence", "threshold": 0.4},
    },
]
SECOND = [{"kind": "skip", "attn": [2], "mlp": [3], "draft_length": 3, "exit": {"kind": "fixed"}}]
RACED = [
    {
        "recipe": WINNER,
        "predicted": 1.31,
        "split": "calibration",
        "speedup": {"mean": 1.27, "low": 1.2, "high": 1.34},
    },
    {
        "recipe": SECOND,
        "predicted": 1.22,
        "split": "calibration",
        "speedup": {"mean": 0.97, "low": 0.9, "high": 1.04},
    },
    {
        "recipe": WINNER,
        "predicted": None,
        "split": "holdout",
        "speedup": {"mean": 1.24, "low": 1.16, "high": 1.31},
    },
]
READINGS = [
    {
        "weights": weights,
        "tokens": tokens,
        "alpha": 0.9,
        "beta": beta,
        "speedup": 0.9 + 2 * (0.6 - beta),
        "draft_bytes": int(1e8 * beta),
    }
    for weights, beta in (("stored", 0.5), ("int8", 0.45), ("int4", 0.3))
    for tokens in (None, 4096)
]
SAMPLE = {
    "prompt": "sums/3",
    "kinds": ["lookup", "skip"],
    "rounds": [[None, "", "1 + "], [0, "1 <", "= "], [1, "2", "\n"]],
}
BROUGHT = [
    {"drafter": 0, "by": "match length", "low": 2, "high": 3, "positions": 50, "right": 20},
    {"drafter": 0, "by": "match length", "low": 6, "high": 8, "positions": 30, "right": 27},
    *(
        {
            "drafter": 1,
            "by": "confidence",
            "low": k / 10,
            "high": (k + 1) / 10,
            "positions": 10 * (k + 1),
            "right": (k + 1) ** 2,
        }
        for k in range(10)
    ),
]


def make_study(
    where: Path | str,
    searchers: dict[str, int] = SEARCHERS,
    *,
    ended: bool = True,
    failed: int = 0,
    seed: int = 0,
    raced: Any = RACED,
    sample: Any = SAMPLE,
    **identity: Any,
) -> StudyStore:
    """searchers: how many masks each judged. ended: with what `tune` stores at its end."""
    ledger, random = StudyStore(where, IDENTITY | identity), Random(seed)
    n_layers = int(ledger.study.user_attrs["identity"]["n_layers"])
    for name, count in searchers.items():
        for _ in range(count):
            mask = SkipMask.from_bits([random.randint(0, 1) for _ in range(2 * n_layers)])
            speedup = 1.3 - abs(mask.n_skipped - n_layers) / n_layers + random.gauss(0, 0.05)
            recipe = Recipe(
                (
                    Lookup(min_match=2, draft_length=8),
                    Skip.from_mask(mask, 6, Confidence(threshold=0.4)),
                )
            )
            ledger.add(
                Trial(
                    mask,
                    0.01 / speedup,
                    0.0002,
                    "replay",
                    0.8,
                    2.1,
                    1 - mask.n_skipped / (2 * n_layers),
                    baseline_seconds_per_token=0.01,
                    recipe=recipe,
                    searcher=name,
                    search_seconds=random.uniform(0.1, 0.4),
                )
            )
    for _ in range(failed):
        ledger.add(Trial(SkipMask(n_layers, (0,)), math.inf, state=TrialState.FAILED))
    if ended:
        ledger.set_attr("raced", raced)
        ledger.set_attr("brought", BROUGHT)
        ledger.set_attr("readings", READINGS)
        ledger.set_attr("sample", sample)
    return ledger
