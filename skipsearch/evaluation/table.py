"""The latency table of a model on a machine: its costs at several context lengths, how far they can be believed, and where it is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from skipsearch.costs import Costs
from skipsearch.evaluation.latency import MOST_COLD, STEEPEST, Measured, measure, plain_seconds
from skipsearch.machine import cache_folder, make_folder, software, this_machine, write_whole
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

CHECKED_MASKS = 20
FEWER_REPEATS = 1
METHOD = "calls"  # how it is measured. Change it when that changes: tables that were kept under another name are then measured again
SOUND = 0.1        # relative error of a draft step
SAME_SPEED = 0.2   # a kept table is believed while a plain pass takes what it says, give or take this share
STEADY = SAME_SPEED  # quartile range of a plain pass over its median: one that scatters more could not be told from another machine's
ABSURD = 10        # times what it should be: nobody's noise


@dataclass(frozen=True)
class LatencyTable:
    """measured: one entry a context length, shortest first. kept: it was read from the cache."""

    measured: tuple[Measured, ...]
    kept: bool = False

    def at(self, context: int) -> Costs:
        """The costs at a context length, linear between those measured, those of the nearest outside of them."""
        if len(self.measured) == 1:
            return self.measured[0].costs
        contexts = [m.context for m in self.measured]

        def between(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
            return tuple(float(np.interp(context, contexts, column)) for column in zip(*values, strict=True))

        costs = [m.costs for m in self.measured]
        overhead, *rest = between([[c.overhead, c.first, c.cold, c.call, c.curve] for c in costs])
        return Costs(between([c.sublayers for c in costs]), overhead, between([c.verify for c in costs]), *rest)

    @property
    def errors(self) -> tuple[float, ...]:
        """Of every mask that was checked, at every context length."""
        return tuple(e for m in self.measured for e in m.errors)

    @property
    def steady(self) -> bool:
        """Whether plain passes hardly varied. Where they did, something else kept the machine busy."""
        return max(m.spread for m in self.measured) <= STEADY

    @property
    def sound(self) -> bool:
        """Whether predictions from it mean much: it is steady, and predicts most of its masks within a tenth."""
        return self.steady and median(self.errors) <= SOUND

    def __str__(self) -> str:
        """`drafts off by 1.8 % (worst 4.1 %), plain passes vary by 2 %`: median and worst error for random masks"""
        return (f"drafts off by {100 * median(self.errors):.1f} % (worst {100 * max(self.errors):.1f} %), "
                f"plain passes vary by {100 * max(m.spread for m in self.measured):.0f} %")


_JSON = TypeAdapter(tuple[Measured, ...])


def latency_table(model: ModelAdapter, max_draft: int, contexts: Sequence[int],
                  progress: Callable[[int, int], None] = lambda done, total: None, fresh: bool = False) -> LatencyTable:
    """The table, measured now or, where it was measured before and the machine is as fast as it was then, as it was kept.

    Kept under a fingerprint of model, dtype, device, threads, engine and versions, in the folder that SKIPSEARCH_CACHE_DIR names. One
    that is not `sound` is not kept, and one that is damaged is measured again. fresh: measure in any case.
    """
    wanted = tuple(sorted(set(contexts)))
    path = cache_folder() / "latency" / f"{fingerprint(model, max_draft, wanted)}.json"
    if not fresh and (kept := _read(path)) is not None and _whole(kept, 2 * model.spec.n_layers, max_draft, wanted):
        found = LatencyTable(kept, kept=True)
        if found.sound and _as_fast(model, kept):
            return found
    masks = random_masks(model.spec.n_layers, CHECKED_MASKS)
    measured = []
    for done, context in enumerate(wanted):
        progress(done, len(wanted))
        if context == main_context(wanted):
            measured.append(measure(model, max_draft, context, masks=masks))
        else:  # how costs grow with the context needs less
            measured.append(measure(model, max_draft, context, FEWER_REPEATS))
    table = LatencyTable(tuple(measured))
    if table.sound:
        _write(path, table.measured)
        _write(_latest(model), table.measured)
    return table


def kept_costs(model: ModelAdapter) -> Costs | None:
    """The costs of the latest sound table of this model here, whatever text it was measured for; None if there is none."""
    kept = _read(_latest(model))
    if kept is None:
        return None
    contexts = [m.context for m in kept]
    whole = _whole(kept, 2 * model.spec.n_layers, len(kept[0].costs.verify) - 1, contexts)
    return LatencyTable(kept).at(main_context(contexts)) if whole else None


def _latest(model: ModelAdapter) -> Path:
    return cache_folder() / "latest" / f"{fingerprint(model, 0, ())}.json"


def main_context(contexts: Sequence[int]) -> int:
    """Of contexts in order, the one that searches go by and that is measured most often."""
    return contexts[len(contexts) // 2]


def fingerprint(model: ModelAdapter, max_draft: int, contexts: Sequence[int]) -> str:
    spec = model.spec
    facts: dict[str, Any] = {"model": spec.id, "config": spec.config_sha256, "weights": spec.weights_sha256, "dtype": spec.dtype_name,
                             "quantization": spec.quantization, "machine": asdict(this_machine(spec.device)), "engine": spec.engine,
                             "software": software(), "max_draft": max_draft, "contexts": list(contexts), "method": METHOD}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def random_masks(n_layers: int, count: int, seed: int = 0) -> list[SkipMask]:
    """Of all densities."""
    random = np.random.default_rng(seed)
    return [SkipMask.from_bits((random.random(2 * n_layers) < random.uniform(0.1, 0.9)).astype(int).tolist()) for _ in range(count)]


def _as_fast(model: ModelAdapter, kept: Sequence[Measured]) -> bool:
    then = kept[0].costs.verify[0]
    return abs(plain_seconds(model, kept[0].context) / then - 1) <= SAME_SPEED


def _whole(kept: Sequence[Measured], sublayers: int, max_draft: int, contexts: Sequence[int]) -> bool:
    """Whether a file holds what a measurement could have found: all of it, and no time that no machine takes."""
    main, first = main_context(contexts), kept[0]
    return [m.context for m in kept] == list(contexts) and all(
        len(m.costs.sublayers) == sublayers and len(m.costs.verify) == max_draft + 1
        and len(m.errors) == (CHECKED_MASKS if m.context == main else 0)
        and _plausible(m) and _near(m.costs.verify[0], first.costs.verify[0], m.context / max(first.context, 1)) for m in kept)


def _plausible(measured: Measured) -> bool:
    costs = measured.costs
    pieces, extra = (*costs.sublayers, costs.overhead), (costs.first, costs.cold, costs.call, costs.curve - 1)
    if not np.isfinite((*pieces, *costs.verify, *extra, measured.spread, *measured.errors)).all():
        return False
    if min(*pieces, *extra, measured.spread, *measured.errors) < 0 or min(costs.verify) <= 0:
        return False
    one = sum(pieces) / costs.verify[0]   # a pass costs what its pieces cost, and less of it within a call
    return ((_near(one, 1.0, 1) if costs.call else abs(one - 1) < 1e-6) and costs.call <= ABSURD * costs.verify[0]
            and costs.curve <= STEEPEST
            and all(_near(seconds, costs.verify[0], rows) for rows, seconds in enumerate(costs.verify, 1))
            and max((costs.first, *measured.errors)) <= ABSURD and costs.cold <= MOST_COLD)


def _near(seconds: float, one: float, times: float) -> bool:
    """Whether work that is `times` as much takes between as long and `times` as long, far more noise granted than there is."""
    return one / ABSURD <= seconds <= one * ABSURD * max(times, 1)


def _read(path: Path) -> tuple[Measured, ...] | None:
    """None if there is none that can be read: it is measured again then."""
    try:
        return _JSON.validate_json(path.read_bytes()) or None
    except (OSError, ValueError):
        return None


def _write(path: Path, measured: tuple[Measured, ...]) -> None:
    """A folder that cannot be written to only costs the next search a few seconds."""
    try:
        make_folder(path.parent)
        write_whole(path, _JSON.dump_json(measured))
    except OSError:
        pass
