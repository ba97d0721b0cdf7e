"""Search what a second model may leave out when it drafts.

The draft model is searched as the full model is for `skip`: the same readings, searchers and
objective, on a replay and costs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.schema_types import DraftModelRef
from skipsearch.decoding.draft_models import load_draft_model
from skipsearch.drafters.draft_model.loaded_models import refer_to_draft_model
from skipsearch.drafters.draft_model.shared_tokens import SharedTokens, match_tokens
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.model_files import find_model_file
from skipsearch.profile.model_locations import record_location
from skipsearch.replay.draft_model_replay import DraftModelReplay
from skipsearch.tuning import calibration as preparation
from skipsearch.tuning.calibration import Calibration
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import Notice, StageStarted, TuneListener, make_progress_callback
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import DRAFT_MODEL, list_shapes
from skipsearch.tuning.settings import TuneSettings

# Masks of a draft model: it reads all of a text for each, and has fewer sub-layers.
MAX_DRAFT_MODEL_TRIALS = 60


# Returns the best masks of a model, each with the objective that judged it, and the best recipes
# whose drafts read something else. The last argument is the number of searches that share the time.
SearchMasks = Callable[
    [ModelAdapter, Calibration, TuneSettings, int],
    tuple[list[tuple[SkipMask, ReplayObjective]], list[Candidate]],
]


@dataclass(frozen=True)
class TriedDraftModel:
    """A loaded model that may draft for the full model."""

    model: ModelAdapter
    ref: DraftModelRef
    tokens: SharedTokens

    def make_spec(self, mask: SkipMask, policy: DraftPolicy, reading: Reading) -> DraftModel:
        return DraftModel(
            model=self.ref,
            attn=mask.attn,
            mlp=mask.mlp,
            weights=reading.weights,
            vocabulary=reading.vocabulary,
            draft_length=policy.draft_length,
            exit=policy.exit,
            siblings=policy.siblings,
        )


def load_tried_models(
    model: ModelAdapter, names: Sequence[str], on_event: TuneListener
) -> list[TriedDraftModel]:
    """Load the models that may draft, and record where local ones lie.

    names: as `load_model` takes them. Raises: ModelError if one cannot be loaded, or has other
    tokens than the full model.
    """
    return [_load_tried_model(model, name, on_event) for name in names]


def _load_tried_model(model: ModelAdapter, name: str, on_event: TuneListener) -> TriedDraftModel:
    draft_model = load_draft_model(name, model)
    tokens = match_tokens(draft_model, model)
    spec, file = draft_model.spec, find_model_file(name)
    share = draft_model.read_bytes / model.read_bytes
    on_event(
        Notice(
            f"draft model {spec.id}: {spec.n_layers} layers, engine {spec.engine}; it reads "
            f"{share:.0%} of what the model reads for a token"
        )
    )
    if name != "demo" and spec.weights_sha256 is not None and Path(file).expanduser().exists():
        record_location(spec.weights_sha256, Path(file).expanduser())
    return TriedDraftModel(draft_model, refer_to_draft_model(draft_model, file), tokens)


def search_draft_models(
    tried: Sequence[TriedDraftModel],
    calibration: Calibration,
    settings: TuneSettings,
    on_event: TuneListener,
    search: SearchMasks,
) -> list[Candidate]:
    """Return the best recipes of each draft model: as it is, and with what it may leave out.

    search: searches masks of a draft model.
    """
    own = replace(
        settings,
        drafters="auto",
        objective="replay",
        never_skip=frozenset(),
        max_trials=min(settings.max_trials or MAX_DRAFT_MODEL_TRIALS, MAX_DRAFT_MODEL_TRIALS),
    )
    candidates = list[Candidate]()
    for i, one in enumerate(tried):
        on_event(StageStarted(f"replaying the draft model {one.ref.id}"))
        objective = make_draft_model_objective(
            one, calibration.objective, on_event, settings.drafters, settings.remeasure
        )
        judged = [(SkipMask(one.model.spec.n_layers), objective)]
        if not one.model.spec.is_recurrent:  # a mask would not have its own states
            masks, others = search(
                one.model, replace(calibration, objective=objective), own, len(tried) - i
            )
            judged += masks
            candidates += others
        for mask, judge in judged:
            candidates += [
                judge.best_recipe(mask, after_lookup, fine=True)
                for after_lookup in _list_after_lookup(settings.drafters)
            ]
    unique = {candidate.recipe: candidate for candidate in candidates}
    return sorted(unique.values(), key=lambda candidate: candidate.seconds_per_token)


def make_draft_model_objective(
    tried: TriedDraftModel,
    full: ReplayObjective,
    on_event: TuneListener,
    drafters: str = "auto",
    remeasure: bool = False,
) -> ReplayObjective:
    """Return the objective for masks of a draft model.

    full: that of the full model. drafters, remeasure: as `TuneSettings` has them.
    """
    replay = DraftModelReplay(full.replay, tried.model, tried.tokens)
    costs = preparation.measure_task_costs(
        tried.model,
        full.replay.mean_context(),
        full.replay.sampling,
        make_progress_callback(on_event),
        on_event,
        remeasure,
    )
    shapes = [
        "lookup,skip" if after_lookup else "skip" for after_lookup in _list_after_lookup(drafters)
    ]
    return ReplayObjective(
        replay,
        replace(costs, verify=full.costs.verify),
        shapes,
        forced=full.forced,
        make_spec=tried.make_spec,
    )


def _list_after_lookup(drafters: str) -> list[bool]:
    """Return whether recipes have lookup before the draft model, for each allowed shape."""
    shapes = list_shapes(DRAFT_MODEL)  # alone, and after lookup
    return [i == 1 for i, shape in enumerate(shapes) if drafters in ("auto", shape)]
