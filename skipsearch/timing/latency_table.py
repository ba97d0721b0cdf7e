"""The latency table of a model on a machine: the costs of its passes, and their cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from skipsearch.core.cost_model import Costs
from skipsearch.core.files import cache_dir, hash_facts, make_private_dir, write_atomically
from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.core.mask import SkipMask
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing.latency import LatencyEntry, measure_latency, time_plain_pass

N_CHECKED_MASKS = 10
# A table is measured after a multiple of as many tokens, so that other texts find it in the cache.
CONTEXT_STEP = 32
# Version of the measurement. If it changes, cached tables are measured again.
FORMAT = "one context"
MAX_MEDIAN_ERROR = 0.1  # relative error of a draft step
MAX_SPEED_CHANGE = 0.2  # relative, of a plain pass; else a cached table is stale
# Quartile range of a plain pass over its median. With more noise, a change of speed is not
# detected.
MAX_SPREAD = MAX_SPEED_CHANGE


@dataclass(frozen=True)
class LatencyTable:
    """The measured costs of a model's passes."""

    entry: LatencyEntry
    cached: bool = False  # whether it was read from the cache

    @property
    def costs(self) -> Costs:
        """The costs of passes after `context` tokens."""
        return self.entry.costs

    @property
    def stable(self) -> bool:
        """Whether plain passes hardly varied. If they did, another process used the machine."""
        return self.entry.spread <= MAX_SPREAD

    @property
    def accurate(self) -> bool:
        """Whether the table is stable, and its median error is at most a tenth."""
        return self.stable and median(self.entry.errors) <= MAX_MEDIAN_ERROR

    def __str__(self) -> str:
        """`drafts off by 1.8 % (worst 4.1 %), plain passes vary by 2 %`

        The two errors are the median and the worst error for random masks.
        """
        return (
            f"drafts off by {100 * median(self.entry.errors):.1f} % "
            f"(worst {100 * max(self.entry.errors):.1f} %), "
            f"plain passes vary by {100 * self.entry.spread:.0f} %"
        )


# A tuple, because the adapter of a dataclass takes no configuration.
_JSON = TypeAdapter(tuple[LatencyEntry], config=ConfigDict(allow_inf_nan=False))


def load_or_measure_latency_table(
    model: ModelAdapter,
    max_draft: int,
    context: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    remeasure: bool = False,
    sampling: SamplingParams = GREEDY,
) -> LatencyTable:
    """Return the cached table if the machine's speed has not changed; else measure a new table.

    context: tokens before a pass; the table is that of the nearest multiple of CONTEXT_STEP.
    remeasure: measure in any case. progress(sweeps done, total). sampling: how passes choose
    tokens. The cache is in the folder that SKIPSEARCH_CACHE_DIR names. Its key is a fingerprint of
    model, dtype, device, threads, engine, versions and sampling. A table that is not `accurate` is
    not cached. If the cached table is damaged, a new table is measured.
    """
    context = CONTEXT_STEP * max(1, round(context / CONTEXT_STEP))
    path = (
        cache_dir() / "latency" / f"{table_fingerprint(model, max_draft, context, sampling)}.json"
    )
    cached = None if remeasure else _read_entry(path)
    if cached is not None and _is_complete(cached, 2 * model.spec.n_layers, max_draft):
        table = LatencyTable(cached, cached=True)
        if table.accurate and _has_same_speed(model, cached, sampling):
            return table
    masks = random_masks(model.spec.n_layers, N_CHECKED_MASKS)
    table = LatencyTable(
        measure_latency(
            model, max_draft, context, masks=masks, sampling=sampling, progress=progress
        )
    )
    if table.accurate:
        _write_entry(path, table.entry)
    return table


def table_fingerprint(
    model: ModelAdapter, max_draft: int, context: int, sampling: SamplingParams = GREEDY
) -> str:
    """Return a hash of all facts that a table depends on."""
    spec = model.spec
    facts: dict[str, Any] = {
        "model": spec.id,
        "config": spec.config_sha256,
        "weights": spec.weights_sha256,
        "dtype": spec.dtype_name,
        "quantization": spec.quantization,
        "machine": asdict(describe_machine(spec.device)),
        "engine": spec.engine,
        "software": software_versions(),
        "max_draft": max_draft,
        "context": context,
        "sampling": asdict(sampling),
        "method": FORMAT,
    }
    return hash_facts(facts)[:24]


def random_masks(n_layers: int, count: int, seed: int = 0) -> list[SkipMask]:
    """Return masks that skip from a tenth to nine tenths of the sub-layers."""
    random = np.random.default_rng(seed)
    return [
        SkipMask.from_bits(
            (random.random(2 * n_layers) < random.uniform(0.1, 0.9)).astype(int).tolist()
        )
        for _ in range(count)
    ]


def _has_same_speed(model: ModelAdapter, entry: LatencyEntry, sampling: SamplingParams) -> bool:
    now_s = time_plain_pass(model, entry.context, sampling=sampling)
    return abs(now_s / entry.costs.verify[0] - 1) <= MAX_SPEED_CHANGE


def _is_complete(entry: LatencyEntry, n_sublayers: int, max_draft: int) -> bool:
    """Return whether an entry has all sub-layers, rows and checked masks."""
    return (
        len(entry.costs.sublayers) == n_sublayers
        and len(entry.costs.verify) == max_draft + 1
        and len(entry.errors) == N_CHECKED_MASKS
    )


def _read_entry(path: Path) -> LatencyEntry | None:
    """Return the entry of a file; None if it is missing or damaged."""
    try:
        return _JSON.validate_json(path.read_bytes())[0]
    except (OSError, ValueError):
        return None


def _write_entry(path: Path, entry: LatencyEntry) -> None:
    # Without a cache, the next search takes a few seconds longer.
    with suppress(OSError):
        make_private_dir(path.parent)
        write_atomically(path, _JSON.dump_json((entry,)))
