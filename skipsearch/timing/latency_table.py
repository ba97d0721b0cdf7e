"""The latency table of a model on a machine: costs at several context lengths, and their cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
SIDE_CONTEXT_REPEATS = 1
# Version of the measurement. If it changes, cached tables are measured again.
FORMAT = "sampled drafts"
MAX_MEDIAN_ERROR = 0.1  # relative error of a draft step
MAX_SPEED_CHANGE = 0.2  # relative, of a plain pass; else a cached table is stale
# Quartile range of a plain pass over its median. With more noise, a change of speed is not
# detected.
MAX_SPREAD = MAX_SPEED_CHANGE


@dataclass(frozen=True)
class LatencyTable:
    """The measured costs of a model's passes."""

    entries: tuple[LatencyEntry, ...]  # for each context length, shortest first
    cached: bool = False  # whether it was read from the cache

    def costs_at(self, context: int) -> Costs:
        """Return the costs at a context length.

        Between measured lengths, costs are interpolated linearly. Outside of them, they are the
        costs at the nearest measured length.
        """
        if len(self.entries) == 1:
            return self.entries[0].costs
        contexts = [m.context for m in self.entries]

        def interpolate(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
            return tuple(
                float(np.interp(context, contexts, column)) for column in zip(*values, strict=True)
            )

        costs = [m.costs for m in self.entries]
        overhead, first, cold, call, curve = interpolate(
            [[c.overhead, c.first, c.cold, c.call, c.curve] for c in costs]
        )
        return Costs(
            interpolate([c.sublayers for c in costs]),
            overhead,
            interpolate([c.verify for c in costs]),
            first,
            cold,
            call,
            curve,
        )

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative errors of all checked masks, at all context lengths."""
        return tuple(e for m in self.entries for e in m.errors)

    @property
    def stable(self) -> bool:
        """Whether plain passes hardly varied. If they did, another process used the machine."""
        return max(m.spread for m in self.entries) <= MAX_SPREAD

    @property
    def accurate(self) -> bool:
        """Whether the table is stable, and its median error is at most a tenth."""
        return self.stable and median(self.errors) <= MAX_MEDIAN_ERROR

    def __str__(self) -> str:
        """`drafts off by 1.8 % (worst 4.1 %), plain passes vary by 2 %`

        The two errors are the median and the worst error for random masks.
        """
        return (
            f"drafts off by {100 * median(self.errors):.1f} % (worst {100 * max(self.errors):.1f} "
            "%), "
            f"plain passes vary by {100 * max(m.spread for m in self.entries):.0f} %"
        )


_JSON = TypeAdapter(tuple[LatencyEntry, ...], config=ConfigDict(allow_inf_nan=False))


def load_or_measure_latency_table(
    model: ModelAdapter,
    max_draft: int,
    contexts: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
    remeasure: bool = False,
    sampling: SamplingParams = GREEDY,
) -> LatencyTable:
    """Return the cached table if the machine's speed has not changed; else measure a new table.

    contexts: lengths in tokens. remeasure: measure in any case. progress(done, total). sampling:
    how passes choose tokens. The cache is in the folder that SKIPSEARCH_CACHE_DIR names. Its key is
    a fingerprint of model, dtype, device, threads, engine, versions and sampling. A table that is
    not `accurate` is not cached. If the cached table is damaged, a new table is measured.
    """
    lengths = tuple(sorted(set(contexts)))
    path = (
        cache_dir() / "latency" / f"{table_fingerprint(model, max_draft, lengths, sampling)}.json"
    )
    if (
        not remeasure
        and (cached := _read_entries(path)) is not None
        and _is_complete(cached, 2 * model.spec.n_layers, max_draft, lengths)
    ):
        table = LatencyTable(cached, cached=True)
        if table.accurate and _has_same_speed(model, cached, sampling):
            return table
    masks = random_masks(model.spec.n_layers, N_CHECKED_MASKS)
    entries = []
    for done, context in enumerate(lengths):
        progress(done, len(lengths))
        if context == main_context(lengths):
            entry = measure_latency(model, max_draft, context, masks=masks, sampling=sampling)
        else:  # fewer repeats: only the growth of costs with the context is needed
            repeats = SIDE_CONTEXT_REPEATS
            entry = measure_latency(model, max_draft, context, repeats, sampling=sampling)
        entries.append(entry)
    table = LatencyTable(tuple(entries))
    if table.accurate:
        _write_entries(path, table.entries)
    return table


def main_context(contexts: Sequence[int]) -> int:
    """Return the middle one of ordered contexts. Searches use it, and it has the most repeats."""
    return contexts[len(contexts) // 2]


def table_fingerprint(
    model: ModelAdapter, max_draft: int, contexts: Sequence[int], sampling: SamplingParams = GREEDY
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
        "contexts": list(contexts),
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


def _has_same_speed(
    model: ModelAdapter, entries: Sequence[LatencyEntry], sampling: SamplingParams
) -> bool:
    then, context = entries[0].costs.verify[0], entries[0].context
    return abs(time_plain_pass(model, context, sampling=sampling) / then - 1) <= MAX_SPEED_CHANGE


def _is_complete(
    entries: Sequence[LatencyEntry], n_sublayers: int, max_draft: int, contexts: Sequence[int]
) -> bool:
    """Return whether entries have all contexts, sub-layers, rows and checked masks."""
    main = main_context(contexts)
    return [m.context for m in entries] == list(contexts) and all(
        len(m.costs.sublayers) == n_sublayers
        and len(m.costs.verify) == max_draft + 1
        and len(m.errors) == (N_CHECKED_MASKS if m.context == main else 0)
        for m in entries
    )


def _read_entries(path: Path) -> tuple[LatencyEntry, ...] | None:
    """Return the entries of a file; None if it is missing or damaged."""
    try:
        return _JSON.validate_json(path.read_bytes()) or None
    except (OSError, ValueError):
        return None


def _write_entries(path: Path, entries: tuple[LatencyEntry, ...]) -> None:
    # Without a cache, the next search takes a few seconds longer.
    with suppress(OSError):
        make_private_dir(path.parent)
        write_atomically(path, _JSON.dump_json(entries))
