"""The race: candidates decode calibration prompts in turn, and the fastest wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skipsearch.core.stats import Trial
from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.trained_replay import TrainedDraft
from skipsearch.replay.workload import Workload
from skipsearch.timing.elimination import (
    MIN_COMPARED_PROMPTS,
    MIN_PLAIN_PROMPTS,
    PLAIN_PROMPTS,
    WORTHWHILE_GAIN,
    race_decoders,
)
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.events import LongestDecoding, Notice, TuneListener, make_progress_callback
from skipsearch.tuning.joint_objective import JointObjective
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import DRAFT_MODEL, RecipeShape
from skipsearch.tuning.trained_candidates import TrainedCandidates

MAX_FINALISTS = 4  # recipes that are raced, unless there are more shapes
RACE_RUNGS = (16, 24)  # prompts: most races are decided earlier
# A recipe that is predicted to be slower than the fastest by more than this does not race: the
# prediction is off by less, and every racer decodes at least five answers.
HOPELESS_RATIO = 1.15
TIMED_TOKENS = 9  # the first of them comes from the prefill
# The rungs if replay cannot predict the best settings, so that more candidates race.
ONLINE_RACE_RUNGS = (4, 8, 12, 24, 32)
# Prompts of a close race: all finalists decode the first of them, and the two fastest all.
CLOSE_RACE_PROMPTS = (4, 16)


def select_finalists(
    trials: Sequence[Trial],
    search: JointObjective,
    base: ReplayObjective,
    trained: Sequence[TrainedDraft] = (),
    modules: Path | None = None,
) -> list[Candidate]:
    """Return the recipes to race, each with its best settings, fastest first.

    The best recipe of each shape takes part, so that a wrong prediction costs no more than the
    race. The best recipe without siblings takes part, too. The fastest predicted recipes fill the
    remaining places.
    trials: the best masks that were judged by `search`. base: the objective for lookup and for
    trained drafts. trained: the modules in the folder `modules`.
    """
    trained_candidates = TrainedCandidates(base)
    by_shape: dict[RecipeShape, list[Candidate]] = {shape: [] for shape in base.shapes}
    for trial in trials:  # masks in the outer loop: the objective stores the latest replay
        objective = search.objective_of(trial.recipe)
        for shape, candidates in by_shape.items():
            if shape.kind == "skip":
                candidates.append(objective.best_recipe(trial.mask, shape.after_lookup, fine=True))
    for shape, candidates in by_shape.items():
        if shape.kind == "lookup":
            candidates.append(base.best_lookup())
        candidates += [
            trained_candidates.best(draft, shape.after_lookup)
            for draft in trained
            if draft.kind == shape.kind
        ]
        candidates.sort(key=_predicted_time)
    finalists = [best for best, *_ in filter(None, by_shape.values())]
    best = min(finalists, key=_predicted_time)
    finalists += _best_without_siblings(best, search, trained_candidates, trained)
    others = sorted(
        (candidate for _, *rest in filter(None, by_shape.values()) for candidate in rest),
        key=_predicted_time,
    )
    finalists += others[: max(0, MAX_FINALISTS - len(finalists))]
    folders = () if modules is None else (modules,)
    return [
        replace(candidate, module_folders=folders)
        for candidate in sorted(finalists, key=_predicted_time)
    ]


def drop_hopeless(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose prediction is near the best one, in their order.

    The two fastest stay in any case.
    """
    fastest, *others = sorted(map(_predicted_time, candidates))
    limit_s = max([HOPELESS_RATIO * fastest, *others[:1]])
    return [candidate for candidate in candidates if _predicted_time(candidate) <= limit_s]


def _best_without_siblings(
    best: Candidate,
    search: JointObjective,
    trained_candidates: TrainedCandidates,
    trained: Sequence[TrainedDraft],
) -> list[Candidate]:
    """Return the best recipe of the same mask or module without siblings; [] if `best` has none."""
    after_lookup = RecipeShape.parse(best.recipe.shape).after_lookup
    candidates = []
    for drafter in best.recipe.drafters:
        if isinstance(drafter, Adapted) and drafter.siblings:
            draft = next(draft for draft in trained if draft.ref == drafter.module)
            candidates.append(trained_candidates.best(draft, after_lookup, siblings=False))
        elif isinstance(drafter, Skip) and drafter.siblings:
            objective = search.objective_of(best.recipe)
            mask = drafter.mask(objective.replay.model.spec.n_layers)
            candidates.append(objective.best_recipe(mask, after_lookup, fine=True, siblings=False))
    return candidates


def _predicted_time(candidate: Candidate) -> float:
    return candidate.seconds_per_token


def _count_models(candidate: Candidate) -> int:
    """Return how many drafters of a recipe run a model. Lookup needs no memory and no mask."""
    return sum(drafter.kind != "lookup" for drafter in candidate.recipe.drafters)


def estimate_longest_decoding(
    model: ModelAdapter, calibration: Workload, n_holdout: int
) -> LongestDecoding:
    """Estimate at the start of a run how long the race and the final measurement may take.

    Nothing is known yet but the time of the prompt of median length and of a few tokens after it,
    which are decoded here, once before to warm up. The race counts as a close one of two.
    n_holdout: hold-out prompts; plain decoding and the winner decode each of them at most once.
    """
    first, last = CLOSE_RACE_PROMPTS
    raced = PLAIN_PROMPTS + first * MAX_FINALISTS + (last - first) * 2
    prompts = sorted(calibration.prompt_ids, key=len)
    share = min(1.0, len(prompts) / last)
    decoder, prompt = Decoder(model, draft_forced=False), prompts[len(prompts) // 2]
    for _ in range(2):
        stats = decoder.generate(prompt, TIMED_TOKENS, ignore_eos=True).stats
    return LongestDecoding(
        stats.seconds_per_token or 0.0,
        stats.prefill_seconds,
        len(prompt),
        round(raced * share + 2 * n_holdout),
        calibration.max_new_tokens,
    )


def predict_text_s(objective: ReplayObjective, longest: LongestDecoding) -> float:
    """Predict the seconds of plain decoding of a text that is as long as those of the calibration.

    longest: the estimate from the start of the run.
    """
    texts = objective.replay.texts
    tokens_per_text = sum(map(len, texts)) / len(texts)
    return longest.prefill_s + objective.plain_pass_s * tokens_per_text


def limit_racers(
    candidates: Sequence[Candidate], limit_s: float, text_s: float, on_event: TuneListener
) -> tuple[list[Candidate], int]:
    """Return (the candidates that are predicted to be the fastest, as many as there is time for;
    the number of prompts that plain decoding decodes with them).

    The fastest of those with fewer drafters that run a model comes second: predictions of two
    masks are off alike, and those of a mask and of lookup are not.
    text_s: of a text in plain decoding. A race compares at least MIN_COMPARED_PROMPTS texts. If the
    time does not suffice for two candidates, the prediction chooses one: the simplest whose
    prediction is so near the fastest one that more would not be worth the time of a race.
    """
    fastest_first = sorted(candidates, key=_predicted_time)
    n_models = _count_models(fastest_first[0])
    simpler = next((one for one in fastest_first if _count_models(one) < n_models), None)
    if simpler is not None:
        fastest_first.remove(simpler)
        fastest_first.insert(1, simpler)
    left_s, n = limit_s - text_s * MIN_PLAIN_PROMPTS, 0
    for candidate in fastest_first:
        cost_s = text_s * MIN_COMPARED_PROMPTS / max(1.0, candidate.predicted_speedup or 1.0)
        if cost_s > left_s:
            break
        left_s -= cost_s
        n += 1
    n_more = PLAIN_PROMPTS - MIN_PLAIN_PROMPTS
    n_plain = PLAIN_PROMPTS if left_s >= text_s * n_more else MIN_PLAIN_PROMPTS
    if n < min(2, len(candidates)):
        limit = WORTHWHILE_GAIN * _predicted_time(fastest_first[0])
        near = [candidate for candidate in fastest_first if _predicted_time(candidate) <= limit]
        fastest_first = [min(near, key=_count_models)]
        on_event(
            Notice(
                "the budget is too short for a race: the prediction chooses the recipe that is "
                "measured"
            )
        )
    elif n < len(candidates):
        on_event(Notice(f"the budget suffices for a race of {n} of {len(candidates)} recipes"))
    return fastest_first[: max(1, n)], n_plain


def race_candidates(
    model: ModelAdapter,
    workload: Workload,
    candidates: Sequence[Candidate],
    seed: int,
    on_event: TuneListener,
    rungs: Sequence[int] = RACE_RUNGS,
    limit_s: float | None = None,
    n_plain: int = PLAIN_PROMPTS,
) -> tuple[Candidate, list[Candidate]]:
    """Return the candidate with the least measured time, and all candidates with measurements.

    A recipe with fewer drafters that run a model wins if the race does not tell it apart from the
    fastest. A single candidate is returned as it is. limit_s, n_plain: as in `race_decoders`.
    workload: calibration prompts. A recipe may be faster on the first prompts than on the others.
    Each measured time is therefore multiplied by the predicted time of all prompts over the
    predicted time of the decoded prompts (a control variate).
    """
    if len(candidates) == 1 and limit_s is not None:
        return candidates[0], []
    winner, fastest, timings = race_decoders(
        Decoder(model, draft_forced=False),
        [candidate.make_decoder(model) for candidate in candidates],
        workload,
        rungs,
        seed,
        make_progress_callback(on_event),
        [
            candidate.prediction.extrapolation_factor if candidate.prediction else lambda _: 1.0
            for candidate in candidates
        ],
        limit_s,
        shares_prompts=all(
            drafter.kind in ("lookup", "skip", DRAFT_MODEL)
            for candidate in candidates
            for drafter in candidate.recipe.drafters
        ),
        complexities=[_count_models(candidate) for candidate in candidates],
        n_plain=n_plain,
    )
    raced = [
        replace(candidate, measurement=pair)
        for candidate, pair in zip(candidates, timings, strict=True)
    ]
    for candidate in raced:
        on_event(candidate.describe_measurement("calibration"))
    if winner != fastest:
        on_event(
            Notice(
                f"{raced[winner].recipe.shape} is as fast as {raced[fastest].recipe.shape} within "
                "one standard error of the race: the simpler recipe is chosen"
            )
        )
    return raced[winner], raced
