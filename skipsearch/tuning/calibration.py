"""Prepare a search: calibration text, latency table, trained drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipsearch.constraints import compile_constraint
from skipsearch.core.cost_model import Costs
from skipsearch.drafters.mtp.shipped import ships_loadable_head
from skipsearch.drafters.trained.module_files import list_modules, make_reference
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import ModuleError, SearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.forced_replay import ForcedReplay
from skipsearch.replay.reference_text import MIN_TEXTS, TextSettings, TextStore
from skipsearch.replay.replay import RECURRENT_NOTE, Replay
from skipsearch.replay.segments import MAX_POSITIONS, choose_max_positions
from skipsearch.replay.trained_replay import TrainedDraft, load_shipped_draft, load_trained_draft
from skipsearch.replay.workload import Workload
from skipsearch.timing.latency_table import load_or_measure_latency_table
from skipsearch.tuning.events import (
    LongestDecoding,
    Notice,
    ProgressCallback,
    StageStarted,
    TuneListener,
    make_progress_callback,
)
from skipsearch.tuning.objective import MAX_DRAFT, ReplayObjective
from skipsearch.tuning.recipe_shape import RECIPE_SHAPES, TRAINED_DRAFTERS, list_shapes
from skipsearch.tuning.schedule import SEARCH_END, TEXT_END, Schedule
from skipsearch.tuning.settings import TuneSettings

DEFAULT_TEXT_S = 45.0  # reference text is written for this long if there is no budget
FEWEST_TEXTS = 4  # that are written even if they take longer
JUDGING_SHARE = 1 / 20  # of the search, for judging one mask on all positions


@dataclass(frozen=True)
class Calibration:
    """The data that recipes are judged with: prompts, objective, trained drafts."""

    workload: Workload  # calibration prompts
    objective: ReplayObjective
    trained: tuple[TrainedDraft, ...] = ()  # the modules that fit the model

    @property
    def context(self) -> int:
        """The context length, in tokens, at which costs are compared."""
        return self.objective.replay.mean_context()


def calibrate(
    model: ModelAdapter,
    workload: Workload,
    trained: Sequence[TrainedDraft],
    settings: TuneSettings,
    on_event: TuneListener,
    schedule: Schedule,
    longest: LongestDecoding,
) -> Calibration:
    """Let the model continue the calibration prompts, and measure its latency table.

    longest: has the seconds of a prompt and of a token.
    """
    on_event(
        StageStarted(
            "writing reference text: the model continues calibration "
            f"prompts{RECURRENT_NOTE if model.spec.is_recurrent else ''}"
        )
    )
    trained_kinds = dict.fromkeys(draft.kind for draft in trained)
    shapes = [
        *RECIPE_SHAPES[settings.drafters],
        *(
            shape
            for kind in (trained_kinds if settings.drafters == "auto" else ())
            for shape in list_shapes(kind)
        ),
    ]
    if schedule.budget_s is None:
        row_s = longest.prefill_s / longest.n_prompt
        limits = CalibrationLimits(DEFAULT_TEXT_S, MIN_TEXTS, choose_max_positions(row_s))
    else:
        text_s = schedule.seconds_until(TEXT_END)
        assert text_s is not None
        limits = choose_limits(longest, text_s, (SEARCH_END - TEXT_END) * schedule.budget_s)
    objective = build_replay_objective(
        model, workload, on_event, settings.remeasure, shapes, limits
    )
    return Calibration(workload.head(len(objective.replay.texts)), objective, tuple(trained))


@dataclass(frozen=True)
class CalibrationLimits:
    """How much reference text is written, and how much of it masks are judged on."""

    seconds: float | None = None  # after which no further prompts are continued
    min_texts: int = MIN_TEXTS  # that are written even if they take longer
    max_positions: int = MAX_POSITIONS  # on which masks are judged


def choose_limits(longest: LongestDecoding, text_s: float, search_s: float) -> CalibrationLimits:
    """Return the limits that suit the time for text and for judging masks.

    As many texts are written even if they take longer as the time about allows: in a batch, a text
    takes at most half of its time alone.
    """
    seconds_per_text = longest.prefill_s + longest.n_tokens * longest.token_s
    min_texts = max(FEWEST_TEXTS, min(MIN_TEXTS, int(2 * text_s / seconds_per_text)))
    row_s = longest.prefill_s / longest.n_prompt
    return CalibrationLimits(
        text_s, min_texts, choose_max_positions(row_s, JUDGING_SHARE * search_s)
    )


def build_replay_objective(
    model: ModelAdapter,
    calibration: Workload,
    on_event: TuneListener,
    remeasure: bool = False,
    shapes: Sequence[str] = ("skip",),
    limits: CalibrationLimits = CalibrationLimits(),
) -> ReplayObjective:
    """Build the objective from the model's continuations and the latency table."""
    progress = make_progress_callback(on_event)
    text = TextSettings(
        calibration.max_new_tokens,
        calibration.end_on_repeat,
        calibration.sampling,
        constraint=calibration.constraint,
    )
    replay = Replay(
        model,
        calibration.prompt_ids,
        calibration.max_new_tokens,
        calibration.end_on_repeat,
        progress,
        calibration.sampling,
        constraint=calibration.constraint,
        store=TextStore.open_for(model, text),
        limit_s=limits.seconds,
        max_positions=limits.max_positions,
        min_texts=limits.min_texts,
    )
    n_prompts = len(calibration.prompt_ids)
    if len(replay.texts) < n_prompts:
        on_event(
            Notice(
                f"the search uses the first {len(replay.texts)} of {n_prompts} calibration "
                f"prompts, since text is written for {limits.seconds:.0f} s; a longer --budget "
                "uses more"
            )
        )
    _report_short_texts(replay.texts, on_event)
    on_event(StageStarted("measuring the latency table"))
    costs = measure_task_costs(
        model, replay.mean_context(), calibration.sampling, progress, on_event, remeasure
    )
    return ReplayObjective(replay, costs, shapes, forced=_replay_forced(model, calibration, replay))


def _report_short_texts(texts: Sequence[Sequence[int]], on_event: TuneListener) -> None:
    """Report texts of one token, in which nothing can be drafted."""
    n_short = sum(len(text) < 2 for text in texts)
    if n_short:
        on_event(
            Notice(
                f"{n_short} of {len(texts)} calibration prompts are left out: the text ends with "
                "its first token, or loops from there on"
            )
        )


def _replay_forced(
    model: ModelAdapter, calibration: Workload, replay: Replay
) -> ForcedReplay | None:
    """Return the forced tokens of the texts; None if the task has no constraint."""
    if calibration.constraint is None:
        return None
    spec = model.spec
    compiled = compile_constraint(
        calibration.constraint, model.tokenizer, spec.vocab_size, spec.eos_token_ids
    )
    return ForcedReplay(compiled, replay.texts, replay.segments)


def measure_task_costs(
    model: ModelAdapter,
    context: int,
    sampling: SamplingParams,
    progress: ProgressCallback,
    on_event: TuneListener,
    remeasure: bool = False,
) -> Costs:
    """Return the costs of passes after `context` tokens of text.

    sampling: how the task chooses tokens. Reports a notice if the latency table is unstable or
    inaccurate.
    """
    table = load_or_measure_latency_table(model, MAX_DRAFT, context, progress, remeasure, sampling)
    on_event(Notice(f"latency table{' (of an earlier search)' if table.cached else ''}: {table}"))
    if not table.stable:
        on_event(
            Notice(
                "so this machine is busy with something else: predictions are worth little now, "
                "the race has to tell the masks "
                "apart, and the table is not kept",
                casts_doubt=True,
            )
        )
    elif not table.accurate:
        on_event(
            Notice(
                "so predictions are rough here; the race, which decodes for real, tells the "
                "recipes apart, and the table is not kept"
            )
        )
    return table.costs


def load_needed_modules(
    model: ModelAdapter, settings: TuneSettings, on_event: TuneListener
) -> list[TrainedDraft]:
    """Load the modules that fit the model, and the draft head that the model ships.

    Raises: ModuleError if no module fits; SearchError if the settings choose a trained drafter and
    no module is of its kind.
    """
    trained = load_trained_drafts(model, settings.modules, on_event) if settings.modules else []
    kind = settings.kind
    if settings.drafters == "auto" or kind == "mtp":
        trained += load_shipped_drafts(model, on_event)
    if kind in TRAINED_DRAFTERS and not any(draft.kind == kind for draft in trained):
        where = f"no module in {settings.modules} is of the kind {kind}"
        if settings.modules is None:
            where = f"{model.spec.id} ships no draft head that skipsearch can load"
        raise SearchError(
            f"--drafters {settings.drafters}: {where}; `skipsearch train {kind}` makes one, and "
            "--modules names its folder"
        )
    return trained


def load_shipped_drafts(model: ModelAdapter, on_event: TuneListener) -> list[TrainedDraft]:
    """Return the draft of the head that a model ships; [] if it ships none."""
    if not ships_loadable_head(model):
        return []
    try:
        return [load_shipped_draft(model)]
    except ModuleError as error:
        on_event(Notice(f"left out: {error}"))
        return []


def load_trained_drafts(
    model: ModelAdapter, folder: Path, on_event: TuneListener
) -> list[TrainedDraft]:
    """Load the modules of a folder that fit the model.

    Raises: ModuleError if no module fits. It gives the reason for the first module.
    """
    drafts, errors = list[TrainedDraft](), list[ModuleError]()
    for path in list_modules(folder):
        try:
            ref = make_reference(path, path.name)
            drafts.append(load_trained_draft(model, ref, [folder]))
        except ModuleError as error:
            errors.append(error)
            on_event(Notice(f"left out: {error}"))
    if not drafts:
        raise errors[0]
    return drafts
