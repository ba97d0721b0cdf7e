"""Measure what drafts cost that read fewer bits or fewer rows of the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from skipsearch.core.cost_model import Costs, ReadingCosts
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, Reading, Vocabulary
from skipsearch.drafters.reduced_session import HeadRowsSampler
from skipsearch.engine import no_grad
from skipsearch.engine.reduced_model import can_restrict_head, get_draft_copy, make_reduced_model
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing.latency import RoundTimer

SMALL_HEAD_ROWS = 1024  # rows of the small head whose cost is measured
VERIFIED_TOKENS = 4  # draft tokens that are verified after each draft
REPEATS = 7  # sweeps over all formats
WARM_UP_SWEEPS = 1


@dataclass(frozen=True)
class FormatCosts:
    """What draft steps in one number format cost.

    Unit: a plain draft step.

    sublayers: of all sub-layers together. overhead: of a step without sub-layers, with a head of
    `SMALL_HEAD_ROWS` rows. head_row: of a further row of the head. first, cold: as in `Costs`.
    """

    sublayers: float
    overhead: float
    head_row: float
    first: float
    cold: float


def measure_format_costs(
    model: ModelAdapter,
    context: int,
    formats: Sequence[Reading],
    progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: SamplingParams = GREEDY,
) -> dict[Reading, FormatCosts]:
    """Measure draft steps in each format, after `context` tokens of text.

    formats: readings without a vocabulary, of which the first is `READ_ALL`. sampling: how drafts
    and verify passes choose tokens. All formats are timed in turn, in rounds as in decoding: draft
    steps, then a verify pass.
    Raises: ModelError; MemoryError.
    """
    n, vocab_size = model.spec.n_layers, model.spec.vocab_size
    timer = RoundTimer(model, VERIFIED_TOKENS, context, sampling)
    small = min(SMALL_HEAD_ROWS, vocab_size)
    heads = [small, vocab_size] if can_restrict_head(model) and small < vocab_size else [vocab_size]
    timers = {
        (reading, rows): _time_with(timer, model, reading, rows)
        for reading in formats
        for rows in heads
    }
    masks = {"none": SkipMask(n), "all": SkipMask.from_layers(n, range(n))}
    times: dict[tuple[Reading, int, str], list[tuple[float, ...]]] = {}
    for sweep in range(WARM_UP_SWEEPS + REPEATS):
        progress(sweep, WARM_UP_SWEEPS + REPEATS)
        for (reading, rows), reduced in timers.items():
            for name, mask in masks.items():
                round_s = no_grad(reduced.time_round)(mask, VERIFIED_TOKENS)
                if sweep >= WARM_UP_SWEEPS:
                    times.setdefault((reading, rows, name), []).append(round_s)
    return _fit_formats(times, formats, heads)


def _time_with(timer: RoundTimer, model: ModelAdapter, reading: Reading, rows: int) -> RoundTimer:
    """Return a timer for drafts that read this, with a head of `rows` rows."""
    if rows == model.spec.vocab_size:
        draft = get_draft_copy(model, reading.weights)
        return timer.with_draft(draft, timer.sampler)
    vocabulary = Vocabulary(lowest=rows, tokens="")
    reduced_model = make_reduced_model(model, replace(reading, vocabulary=vocabulary))
    assert reduced_model.new_head is not None
    head = reduced_model.new_head()
    return timer.with_draft(reduced_model.restrict(head), HeadRowsSampler(timer.sampler, head))


def _fit_formats(
    times: Mapping[tuple[Reading, int, str], Sequence[tuple[float, ...]]],
    formats: Sequence[Reading],
    heads: Sequence[int],
) -> dict[Reading, FormatCosts]:
    """Return the costs from (first step, call, later step, verify pass) of each round."""

    def later(reading: Reading, rows: int, mask: str) -> float:
        return median(later_s for _, _, later_s, _ in times[reading, rows, mask])

    small, whole = heads[0], heads[-1]
    unit = later(READ_ALL, whole, "none")
    verify_s = median(verify for *_, verify in times[READ_ALL, whole, "none"])
    costs: dict[Reading, FormatCosts] = {}
    for reading in formats:
        step, overhead = later(reading, small, "none"), later(reading, small, "all")
        overhead = min(overhead, step)
        more_head = later(reading, whole, "none") - step
        rounds = times[reading, small, "none"]
        first = median(first_s - call for first_s, call, _, _ in rounds) / max(step, 1e-9) - 1
        cold = median(verify for *_, verify in rounds) / verify_s - 1
        costs[reading] = FormatCosts(
            (step - overhead) / unit,
            overhead / unit,
            max(0.0, more_head) / unit / max(1, whole - small),
            max(0.0, first),
            max(0.0, cold) if reading.bits is not None else 0.0,
        )
    return costs


def price_reading(
    costs: Costs, formats: Mapping[Reading, FormatCosts], reading: Reading, vocab_size: int
) -> Costs:
    """Return the costs of drafts that read what `reading` says. costs: those of the model."""
    if reading.is_everything:
        return costs
    measured, total = formats[replace(reading, vocabulary=None)], sum(costs.sublayers)
    step = costs.overhead + total  # a draft step with nothing skipped
    rows = vocab_size if reading.vocabulary is None else len(reading.vocabulary.token_ids())
    extra_rows = max(0, rows - min(SMALL_HEAD_ROWS, vocab_size))
    scale = measured.sublayers * step / total if total else 0.0
    shares_weights = reading.weights == "stored"
    return ReadingCosts(
        tuple(scale * sublayer for sublayer in costs.sublayers),
        (measured.overhead + extra_rows * measured.head_row) * step,
        costs.verify,
        costs.first if shares_weights else measured.first,
        costs.cold if shares_weights else measured.cold,
        costs.call,
        costs.curve if shares_weights else 1.0,
        plain_pass=step,
        shares_weights=shares_weights,
    )
