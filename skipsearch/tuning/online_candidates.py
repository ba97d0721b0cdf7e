"""Candidate settings, for the race, of drafters that choose their masks during decoding.

`asd` chooses one mask per prompt, so replay predicts it. `clasp` also chooses a mask per prompt if
it plans only once. Replay then predicts how much to skip and which draft policy is best, and the
race decides how often to plan. The mask of `swift` depends on earlier requests. `swift` therefore
decodes calibration prompts with each skip ratio, and replay predicts the best draft policy for the
mask that it has at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from typing import TypeVar

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.asd.session import ASDPolicy
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.dynamic_mask import DynamicMaskDrafter, has_sequential_residual
from skipsearch.drafters.exits import DraftPolicy, make_exit
from skipsearch.drafters.swift.session import SWIFTDrafter
from skipsearch.drafters.swift.spec import SWIFT, SiblingSchedule
from skipsearch.errors import MaskError
from skipsearch.replay.workload import Workload
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import ProgressCallback
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.per_prompt import MaskByPrompt, PerPromptObjective, mask_from_prefill
from skipsearch.tuning.recipe_shape import RecipeShape

REPLAY_PROMPTS = 32  # prompts that are replayed with one mask each
SCREENING_PROMPTS = 8  # of these, for the screening of all settings
MIN_SHORTLIST = 4  # least number of settings that pass the screening
CLASP_SKIP_FRACTIONS = (0.4, 0.5, 0.6, 0.7, 0.8)  # of layers or sub-layers; the paper: 0.5 to 0.6
NEVER_REPLAN = 100_000  # rounds; more than any request has
# Rounds between two plans, for the best setting; the others race with the first and the fourth.
CLASP_INTERVALS = (NEVER_REPLAN, 32, 16, 8, 4, 2)
# The thresholds of asd are these quantiles of the cosines of all prompts, and the published one.
ASD_THRESHOLD_QUANTILES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
ASD_PUBLISHED_THRESHOLD = 0.985
ASD_EVERY = (0, 2, 3, 4)  # skip every n-th layer; 0: choose by cosines alone
ASD_KEEP_LAST = (1, 2)  # last layers that are never skipped
SWIFT_SKIP_RATIOS = (0.45, 0.6, 0.75, 0.85)  # the first is the published one
SWIFT_WARMUP_PROMPTS = 24  # prompts that swift decodes for each ratio
# (tokens on which a mask is tried, rounds between two trials)
SWIFT_WINDOWS = ((16, 1), (32, 1), (16, 4))
# A tree, tried with the best ratio. The published widths go up to 10.
SWIFT_TREE = SiblingSchedule(thresholds=(0.8, 0.5), widths=(1, 2, 3))
# Stop rules of swift's search, which has to end within the prompts of one measurement.
SWIFT_TOLERANCE, SWIFT_MAX_TRIALS = 60, 200

Setting = TypeVar("Setting", bound=Hashable)


def list_online_candidates(
    shape: RecipeShape,
    objective: ReplayObjective,
    calibration: Workload,
    progress: ProgressCallback,
) -> list[Candidate]:
    """Return the most promising settings of one of `ONLINE_DRAFTERS`, roughly best first.

    A candidate has a prediction only if replay can predict its recipe exactly.
    """
    list_candidates = {
        "asd": _asd_candidates,
        "clasp": _clasp_candidates,
        "swift": _swift_candidates,
    }[shape.kind]
    return list(list_candidates(shape, objective, calibration, progress))


def _asd_candidates(
    shape: RecipeShape,
    objective: ReplayObjective,
    calibration: Workload,
    progress: ProgressCallback,
) -> Iterator[Candidate]:
    per_prompt, model = PerPromptObjective(objective, REPLAY_PROMPTS), objective.replay.model
    policies: dict[int, ASDPolicy] = {}  # by prompt; each has the cosines of its prefill
    for done, prompt_index in enumerate(per_prompt.prompt_indices):
        policies[prompt_index] = ASDPolicy(
            ASD(draft_length=1, exit=make_exit("fixed")),
            model.spec.n_layers,
            has_sequential_residual(model),
        )
        prompt_ids = objective.replay.prompt_ids[prompt_index]
        mask_from_prefill(model, policies[prompt_index], prompt_ids)
        progress(done, 2 * len(per_prompt.prompt_indices))
    cosines = np.array([p.cosine_sums for p in policies.values()]) / np.array(
        [[p.n_rows] for p in policies.values()]
    )
    quantiles = np.quantile(cosines, ASD_THRESHOLD_QUANTILES).tolist()
    thresholds = {ASD_PUBLISHED_THRESHOLD, *(min(1.0, max(0.0, round(t, 4))) for t in quantiles)}

    def make_spec(setting: tuple[float, int, int]) -> Callable[[DraftPolicy], ASD]:
        return lambda policy: ASD(
            threshold=setting[0],
            every=setting[1],
            keep_last=setting[2],
            draft_length=policy.draft_length,
            exit=policy.exit,
        )

    def select_masks(
        setting: tuple[float, int, int], prompt_indices: Sequence[int]
    ) -> MaskByPrompt:
        spec = make_spec(setting)(DraftPolicy(1))
        return {p: policies[p].select_mask(spec) for p in prompt_indices}

    settings = [
        setting
        for setting in product(sorted(thresholds), ASD_EVERY, ASD_KEEP_LAST)
        if any(mask.n_skipped for mask in select_masks(setting, per_prompt.prompt_indices).values())
    ]
    yield from _shortlist(per_prompt, settings, select_masks, make_spec, shape, progress)


def _clasp_candidates(
    shape: RecipeShape,
    objective: ReplayObjective,
    calibration: Workload,
    progress: ProgressCallback,
) -> Iterator[Candidate]:
    per_prompt, model = PerPromptObjective(objective, REPLAY_PROMPTS), objective.replay.model
    units: dict[str, int] = {"layer": model.spec.n_layers, "sublayer": 2 * model.spec.n_layers}
    settings = list(
        dict.fromkeys(
            (unit, min(count - 1, max(1, round(fraction * count))))
            for unit, count in units.items()
            for fraction in CLASP_SKIP_FRACTIONS
        )
    )

    def make_spec(setting: tuple[str, int]) -> Callable[[DraftPolicy], CLaSp]:
        unit, skip = setting
        return lambda policy: CLaSp(
            skip=skip,
            unit=unit,  # type: ignore[arg-type]
            interval=NEVER_REPLAN,
            draft_length=policy.draft_length,
            exit=policy.exit,
        )

    try:
        make_spec(("sublayer", 1))(DraftPolicy(1)).build(model, [])
    except MaskError:  # the model has a parallel residual
        settings = [setting for setting in settings if setting[0] == "layer"]
    plans: dict[tuple[tuple[str, int], int], SkipMask] = {}

    def plan_masks(setting: tuple[str, int], prompt_indices: Sequence[int]) -> MaskByPrompt:
        drafter = make_spec(setting)(DraftPolicy(1)).build(model, [])
        assert isinstance(drafter, DynamicMaskDrafter)
        for p in prompt_indices:
            if (setting, p) not in plans:
                plans[setting, p] = mask_from_prefill(
                    model, drafter.make_policy(), objective.replay.prompt_ids[p]
                )
        return {p: plans[setting, p] for p in prompt_indices}

    shortlist = _shortlist(per_prompt, settings, plan_masks, make_spec, shape, progress)
    for rank, candidate in enumerate(shortlist):
        yield candidate
        *lookups, clasp = candidate.recipe.drafters
        for interval in CLASP_INTERVALS[3:4] if rank else CLASP_INTERVALS[1:]:
            replanning = clasp.model_copy(update={"interval": interval})
            yield candidate.with_similar_recipe(Recipe((*lookups, replanning)))


def _shortlist(
    per_prompt: PerPromptObjective,
    settings: Sequence[Setting],
    masks_for: Callable[[Setting, Sequence[int]], MaskByPrompt],
    make_spec: Callable[[Setting], Callable[[DraftPolicy], DrafterSpec]],
    shape: RecipeShape,
    progress: ProgressCallback,
) -> list[Candidate]:
    """Return the best settings, each with its best draft policy, best first."""

    def predict(setting: Setting, prompt_indices: Sequence[int], fine: bool = False) -> Candidate:
        masks = masks_for(setting, prompt_indices)
        return per_prompt.best_recipe(masks, make_spec(setting), shape, fine)

    every = per_prompt.prompt_indices
    screening = every[:: max(1, len(every) // SCREENING_PROMPTS)]
    seconds: dict[Setting, float] = {}
    for done, setting in enumerate(settings):
        seconds[setting] = predict(setting, screening).seconds_per_token
        progress(done, 2 * len(settings))
    count = max(MIN_SHORTLIST, len(settings) // 4)
    remaining = sorted(settings, key=seconds.__getitem__)[:count]
    for done, setting in enumerate(remaining):
        seconds[setting] = predict(setting, every).seconds_per_token
        progress(len(remaining) + done, 2 * len(remaining))
    best = sorted(remaining, key=seconds.__getitem__)[:MIN_SHORTLIST]
    return [predict(setting, every, fine=True) for setting in best]


def _swift_candidates(
    shape: RecipeShape,
    objective: ReplayObjective,
    calibration: Workload,
    progress: ProgressCallback,
) -> Iterator[Candidate]:
    model = objective.replay.model
    by_ratio: list[tuple[float, Candidate]] = []
    for i, ratio in enumerate(SWIFT_SKIP_RATIOS):
        policy = DraftPolicy(8, make_exit("confidence", threshold=0.5))
        decoder = Decoder(model, Recipe((_make_swift_spec(ratio, SWIFT_WINDOWS[0], policy),)))
        drafter = decoder.loop.drafters[0][1]
        assert isinstance(drafter, SWIFTDrafter)
        if not drafter.n_skipped:
            continue
        count = min(SWIFT_WARMUP_PROMPTS, len(calibration.prompt_ids))
        for p in range(count):
            calibration.generate(decoder, p, p)
            progress(i * count + p, len(SWIFT_SKIP_RATIOS) * count)
        by_ratio.append(
            (
                ratio,
                objective.best_recipe(
                    drafter.search.mask, shape.after_lookup, fine=True, siblings=False
                ),
            )
        )
    by_ratio.sort(key=lambda pair: pair[1].seconds_per_token)
    for rank, (ratio, candidate) in enumerate(by_ratio):
        *lookups, skip = candidate.recipe.drafters
        policy = DraftPolicy(skip.draft_length, skip.exit)  # type: ignore[attr-defined]
        specs = [_make_swift_spec(ratio, window, policy) for window in SWIFT_WINDOWS]
        if rank == 0:
            specs.append(specs[0].model_copy(update={"tree": SWIFT_TREE}))
        for spec in specs:
            yield candidate.with_similar_recipe(Recipe((*lookups, spec)))


def _make_swift_spec(ratio: float, window: tuple[int, int], policy: DraftPolicy) -> SWIFT:
    return SWIFT(
        skip_ratio=ratio,
        window=window[0],
        interval=window[1],
        tolerance=SWIFT_TOLERANCE,
        most_trials=SWIFT_MAX_TRIALS,
        draft_length=policy.draft_length,
        exit=policy.exit,
    )
