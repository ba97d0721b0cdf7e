"""Choose what drafts read: number format of weights, and tokens of the head.

Each combination is judged with nothing skipped, by replay and by its measured costs. The mask
search then tries masks with all combinations that lead (`tuning/joint_objective.py`). Afterwards,
the best mask is judged with the other combinations, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, DraftWeights, Reading, Vocabulary
from skipsearch.engine.reduced_model import estimate_draft_bytes, get_draft_copy, list_draft_weights
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.placement import in_gb
from skipsearch.models.memory import free_memory
from skipsearch.replay.replay import PromptReplay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.timing.reading_costs import FormatCosts, measure_format_costs, price_reading
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import Notice, StageStarted, TuneListener, make_progress_callback
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.study import StudyStore
from skipsearch.tuning.vocabularies import list_vocabularies

JUDGED_SEGMENTS = 16  # about, on which every combination is judged
SHOWN_READINGS = 3
OTHER_FINALISTS = 2  # recipes in the race whose drafts read something else
# Combinations that masks are searched with: the best one, and those that are nearly as fast with
# nothing skipped. Which of these is best depends on the mask.
MAX_LEADING = 4
LEADING_SHARE = 0.9  # of the best predicted speedup
LEADING_ATTR = "leading_readings"  # of a study
MEMORY_FRACTION = 0.5  # of the free memory, for the copies that are compared


@dataclass(frozen=True)
class JudgedReading:
    """What is predicted of drafts that read something else, with one mask."""

    reading: Reading
    candidate: Candidate  # the best recipe
    alpha: float  # share of accepted tokens
    beta: float  # draft step over plain pass
    draft_bytes: int  # memory besides the model's, about

    def as_record(self) -> dict[str, Any]:
        """Return the entry of the study's attribute `readings`, for reports."""
        vocabulary = self.reading.vocabulary
        return {
            "weights": self.reading.weights,
            "tokens": None if vocabulary is None else len(vocabulary.token_ids()),
            "alpha": self.alpha,
            "beta": self.beta,
            "speedup": self.candidate.predicted_speedup,
            "draft_bytes": self.draft_bytes,
        }

    def __str__(self) -> str:
        """Return `int8, 4,213 tokens of the vocabulary: α 0.93, β 0.41, 1.52×`."""
        return (
            f"{self.reading}: α {self.alpha:.2f}, β {self.beta:.2f}, "
            f"{self.candidate.predicted_speedup:.2f}×"
        )


class ReadingSearch:
    """The combinations of number format and vocabulary that drafts may read."""

    def __init__(
        self,
        base: ReplayObjective,
        context: int,
        on_event: TuneListener,
        memory_limit: int | None = None,
    ):
        """Measure the costs of each number format after `context` tokens of text.

        base: the objective for drafts that read all of the model. memory_limit: bytes that a copy
        of the weights may take; None: no limit besides the free memory.
        """
        self.base, self.on_event = base, on_event
        self.model = base.replay.model
        self.formats = [
            Reading(weights) for weights in _affordable_formats(self.model, memory_limit, on_event)
        ]
        self.vocabularies = list(list_vocabularies(self.model, base.replay.texts))
        self.costs: Mapping[Reading, FormatCosts] = {}
        self.judge_s = 0.0  # seconds of judging the latest mask
        self._judged: dict[SkipMask, list[JudgedReading]] = {}
        if len(self.formats) > 1 or len(self.vocabularies) > 1:
            on_event(StageStarted("measuring drafts that read less"))
            self.costs = measure_format_costs(
                self.model,
                context,
                self.formats,
                make_progress_callback(on_event),
                base.replay.sampling,
            )

    def joint_objective(self, leading: Sequence[Reading]) -> JointObjective:
        """Return the objective that judges masks with these readings."""
        return JointObjective([self.objective_for(reading) for reading in leading])

    def objective_for(self, reading: Reading) -> ReplayObjective:
        """Return the objective for drafts that read this."""
        if reading.is_everything:
            return self.base
        vocab_size = self.model.spec.vocab_size
        copied = self._copy_for(reading)
        costs = price_reading(self.base.costs, self.costs, reading, vocab_size)
        return self.base.with_reading(reading, copied, costs)

    def _copy_for(self, reading: Reading) -> ModelAdapter | None:
        """Return the model that drafts with its whole head; None: the verifying model."""
        copied = get_draft_copy(self.model, reading.weights)
        return None if copied is self.model else copied

    def judge(self, mask: SkipMask) -> list[JudgedReading]:
        """Judge a mask with each combination; return them from the fastest to the slowest.

        No mask is judged twice.
        """
        if not self.costs:
            return []
        if mask not in self._judged:
            started = perf_counter()
            self._judged[mask] = self._judge(mask)
            self.judge_s = perf_counter() - started
        return self._judged[mask]

    def _judge(self, mask: SkipMask) -> list[JudgedReading]:
        judged = list[JudgedReading]()
        progress = make_progress_callback(self.on_event)
        for done, read in enumerate(self.formats):
            progress(done, len(self.formats))
            by_vocabulary = self.base.replay.judge(
                mask, self.vocabularies, JUDGED_SEGMENTS, drafting_model=self._copy_for(read)
            )
            for vocabulary, replayed in zip(self.vocabularies, by_vocabulary, strict=True):
                reading = replace(read, vocabulary=vocabulary)
                if mask.n_skipped or not reading.is_everything:
                    judged.append(self._judge_one(mask, reading, replayed))
        return sorted(judged, key=lambda j: -(j.candidate.predicted_speedup or 0.0))

    def _judge_one(
        self, mask: SkipMask, reading: Reading, replayed: Sequence[PromptReplay]
    ) -> JudgedReading:
        objective = self.objective_for(reading)
        candidate = objective.predict_coarse(rounds_from_replay(replayed), mask)
        n_positions = sum(len(r.acceptance) for r in replayed)
        alpha = sum(float(r.acceptance.sum()) for r in replayed) / n_positions
        beta = objective.costs.draft_step_seconds(mask) / objective.plain_pass_s
        draft_bytes = estimate_draft_bytes(self.model, reading)
        return JudgedReading(reading, candidate, alpha, beta, draft_bytes)


def choose_leading_readings(
    readings: ReadingSearch, store: StudyStore | None, n_layers: int, on_event: TuneListener
) -> list[Reading]:
    """Return what the drafts of the mask search may read, the fastest combination first.

    These are the best combinations for drafts that skip nothing, or those of the study if it has
    any.
    """
    stored = None if store is None else store.get_attr(LEADING_ATTR)
    if stored is not None:
        return list(map(_read_reading, stored))
    judged = readings.judge(SkipMask(n_layers))
    leading = _select_leading(judged)
    for one in judged[: max(SHOWN_READINGS, len(leading))]:
        on_event(Notice(f"nothing skipped, {one}"))
    if len(leading) > 1:
        on_event(Notice(f"masks are searched together with the first {len(leading)} of these"))
    if store is not None and judged:
        store.set_attr(LEADING_ATTR, list(map(_dump_reading, leading)))
        store.set_attr("readings", [one.as_record() for one in judged])
    return leading


def _select_leading(judged: Sequence[JudgedReading]) -> list[Reading]:
    """Return the readings that masks are searched with. judged: fastest first."""
    if not judged:
        return [READ_ALL]
    least = LEADING_SHARE * (judged[0].candidate.predicted_speedup or 0.0)
    return [
        one.reading
        for one in judged[:MAX_LEADING]
        if (one.candidate.predicted_speedup or 0.0) >= least
    ]


def find_other_readings(
    readings: ReadingSearch, searched: Collection[Reading], mask: SkipMask, on_event: TuneListener
) -> list[Candidate]:
    """Return the best recipes whose drafts read something else than those of the mask search.

    They are tried with the best mask and without a mask.
    """
    if not readings.costs:
        return []
    on_event(StageStarted("trying the best masks with drafts that read something else"))
    masks = dict.fromkeys((mask, SkipMask(mask.n_layers)))
    judged = [(one, tried) for tried in masks for one in readings.judge(tried)]
    judged = [(one, tried) for one, tried in judged if one.reading not in searched]
    judged.sort(key=lambda pair: -(pair[0].candidate.predicted_speedup or 0.0))
    return [
        readings.objective_for(one.reading).best_recipe(tried, fine=True)
        for one, tried in judged[:OTHER_FINALISTS]
    ]


def _dump_reading(reading: Reading) -> dict[str, Any]:
    vocabulary = reading.vocabulary
    return {
        "weights": reading.weights,
        "vocabulary": None if vocabulary is None else vocabulary.model_dump(mode="json"),
    }


def _read_reading(data: dict[str, Any]) -> Reading:
    vocabulary = data["vocabulary"]
    return Reading(
        data["weights"], None if vocabulary is None else Vocabulary.model_validate(vocabulary)
    )


def _affordable_formats(
    model: ModelAdapter, limit: int | None, on_event: TuneListener
) -> list[DraftWeights]:
    """Return the number formats whose copies fit into memory together, and report their size."""
    free = int(free_memory(model.spec.device) * MEMORY_FRACTION)
    formats, taken = list[DraftWeights](), 0
    for weights in reversed(list_draft_weights(model)):  # the smallest copies first
        nbytes = estimate_draft_bytes(model, Reading(weights))
        if (limit is None or nbytes <= limit) and taken + nbytes <= free:
            formats.append(weights)
            taken += nbytes
        else:
            on_event(
                Notice(
                    f"drafts in {weights} are left out: their copy of the weights takes "
                    f"{in_gb(nbytes)}"
                )
            )
    if taken:
        names = ", ".join(weights for weights in formats if weights != "stored")
        on_event(
            Notice(
                f"copies of the weights in {names} are made for the search, {in_gb(taken)} in all; "
                "a profile needs at most one of them"
            )
        )
    return formats[::-1]
