"""Build a `Profile` from a recipe, its measurement, and the model, machine and task of this."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from typing import Literal

from skipsearch.core.machine import describe_machine, software_versions, source_commit
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.core.stats import DecodeStats, DrafterStats, Estimate
from skipsearch.drafters.draft_model.loaded_models import find_draft_model
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.engine.reduced_model import estimate_draft_bytes, make_reduced_model
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.profile import Interval, Profile, round_significant
from skipsearch.profile import schema as s
from skipsearch.replay.workload import Workload, template_sha256
from skipsearch.tasks.task import Task
from skipsearch.timing.interleaved import Divergence, PairedTimings, Timings, find_first_divergence


def find_divergences(
    model: ModelAdapter, workload: Workload, plain: Timings, drafted: Timings
) -> list[Divergence]:
    """Return the first difference from plain decoding in each greedy text that differs."""
    reference = {x.prompt_index: x.generation.tokens for x in plain.samples}
    divergences = {}
    for sample in drafted.samples:
        divergence = find_first_divergence(
            model,
            workload.prompt_ids[sample.prompt_index],
            reference[sample.prompt_index],
            sample.generation.tokens,
        )
        if divergence is not None:
            divergences[sample.prompt_index] = divergence
    return list(divergences.values())


def require_hashes(spec: ModelSpec) -> None:
    """Raise SearchError if the model has no hashes by which a profile can name its weights."""
    if spec.config_sha256 is None or spec.weights_sha256 is None:
        raise SearchError(
            f"{spec.id} was not loaded from files, so a profile could not say which weights it is "
            "for: save it and "
            "load_model it"
        )


def build_profile(
    model: ModelAdapter,
    task: Task,
    workload: Workload,
    recipe: Recipe,
    measurement: PairedTimings,
    *,
    provenance: s.Provenance,
) -> Profile:
    """Build a profile. Its verdict is `speculate` if the interval of the speedup is above 1.

    Raises: SearchError if the model lacks hashes, because it was not loaded from files.
    """
    spec = model.spec
    require_hashes(spec)
    speedup, drafted = measurement.speedup, measurement.drafted
    verdict: Literal["speculate", "plain"] = (
        "speculate" if speedup.low > 1 and drafted.stats.drafted else "plain"
    )
    machine = describe_machine(spec.device)
    sampling = s.ProfileSampling(**task.sampling.model_dump())
    candidate = recipe.drafters if drafted.stats.drafted else ()
    return Profile(
        schema_version=3,
        model=make_model_info(spec),
        task=s.TaskInfo(
            name=task.name,
            version=task.version,
            calibration_sha256=task.calibration_sha256,
            chat_template_sha256=template_sha256(task, model.tokenizer),
            sampling=sampling,
        ),
        hardware=s.Hardware(
            kind=machine.kind,  # type: ignore[arg-type]
            name=machine.name,
            count=machine.count,
            threads=machine.threads,
        ),
        engine=model.spec.engine,
        verdict=verdict,
        drafters=candidate if verdict == "speculate" else (),
        lost=candidate if verdict == "plain" else (),
        measured=_build_measurement(model, workload, measurement, recipe),
        software=s.Software(**software_versions()),  # type: ignore[arg-type]
        provenance=provenance,
    )


def make_provenance(
    searcher: str, objective: str, seed: int, trials: int, search_seconds: float
) -> s.Provenance:
    return s.Provenance(
        searcher=searcher,
        objective=objective,  # type: ignore[arg-type]
        seed=seed,
        trials=trials,
        search_seconds=round(search_seconds, 1),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
    )


def make_model_info(spec: ModelSpec) -> s.ModelInfo:
    return s.ModelInfo(**spec.facts())


def _build_measurement(
    model: ModelAdapter, workload: Workload, measurement: PairedTimings, recipe: Recipe
) -> s.Measurement:
    plain, drafted = measurement.plain, measurement.drafted
    stopped_early = measurement.stopped_early
    speedup, stats, baseline = measurement.speedup, drafted.stats, plain.stats
    of_request = drafted.speedup_over(plain, stopped_early, with_prefill=True)
    # Repeats generate the same text.
    once = sum({x.prompt_index: x.stats for x in drafted.samples}.values(), DecodeStats())
    contexts = [
        len(workload.prompt_ids[x.prompt_index]) + len(x.generation.tokens) for x in drafted.samples
    ]
    is_greedy = workload.sampling.is_greedy
    divergences = find_divergences(model, workload, plain, drafted) if is_greedy else []
    n_compared = drafted.n_prompts if is_greedy else 0
    plain_pass_s = baseline.decode_seconds / baseline.rounds
    beta, verify_ratio = stats.cost_ratios(plain_pass_s)
    reasons = {x.prompt_index: x.generation.finish_reason for x in drafted.samples}
    n_ended = sum(reason in ("eos", "stop") for reason in reasons.values())
    n_looped = sum(reason == "loop" for reason in reasons.values())
    repeating = {x.prompt_index for x in drafted.samples if x.generation.finish_reason == "repeat"}
    return s.Measurement(
        baseline_ms_per_token=_interval_ms(plain.estimate(stopped_early)),
        ms_per_token=_interval_ms(drafted.estimate(stopped_early)),
        speedup=Interval.from_rounded(speedup.mean, speedup.low, speedup.high),
        request_speedup=Interval.from_rounded(of_request.mean, of_request.low, of_request.high),
        alpha=_round_or_none(stats.alpha),
        accepted_fraction=_round_or_none(stats.accepted_fraction),
        tau=round_significant(stats.tau or 1.0),
        beta=_round_or_none(beta),
        verify_ratio=_round_or_none(verify_ratio),
        prompts=drafted.n_prompts,
        stopped=measurement.stopped,
        tokens=once.tokens,
        context_tokens=s.ContextTokens(p50=round(median(contexts)), max=max(contexts)),
        ended_on_repeat=len(repeating),
        finish_reasons=s.FinishReasons(
            end=n_ended, loop=n_looped, cut=len(reasons) - n_ended - n_looped
        ),
        split="holdout",
        lossless=s.Lossless(
            prompts=n_compared,
            identical=n_compared - len(divergences),
            first_divergence_logit_gap=float(round_significant(max(d.gap for d in divergences)))
            if divergences
            else None,
        ),
        by_drafter=tuple(
            _drafter_counts(spec.kind, per_prompt, all_repeats, plain_pass_s)
            for spec, per_prompt, all_repeats in zip(
                recipe.drafters, once.by_drafter, stats.by_drafter, strict=False
            )
        )
        if stats.drafted
        else (),
        draft_bytes=_count_draft_bytes(model, recipe) if stats.drafted else 0,
        copied_from_prompt=_copied_share(recipe, once) if stats.drafted else None,
        choosing_share=_round_or_none(stats.mask_selection_share)
        if stats.choosing_seconds
        else None,
        stream=_build_stream(plain, drafted),
    )


def _build_stream(plain: Timings, drafted: Timings) -> s.StreamMeasurement | None:
    """Return the speedup while drafters learned and afterwards; None if no drafter learned."""
    learning = {sample.prompt_index for sample in drafted.samples if sample.while_learning}
    if not learning:
        return None
    return s.StreamMeasurement(
        learning=_stream_part(plain, drafted, lambda prompt: prompt in learning),
        settled=_stream_part(plain, drafted, lambda prompt: prompt not in learning),
    )


def _stream_part(
    plain: Timings, drafted: Timings, includes_prompt: Callable[[int], bool]
) -> s.StreamPart | None:
    plain, drafted = (timings.subset(includes_prompt) for timings in (plain, drafted))
    if not drafted.samples:
        return None
    speedup = drafted.speedup_over(plain)
    return s.StreamPart(
        prompts=drafted.n_prompts,
        speedup=Interval.from_rounded(speedup.mean, speedup.low, speedup.high),
        choosing_share=round_significant(drafted.stats.mask_selection_share),
    )


def _drafter_counts(
    kind: str, per_prompt: DrafterStats, all_repeats: DrafterStats, plain_pass_s: float
) -> s.DrafterCounts:
    """Return the counts of one drafter.

    per_prompt: counts of one repeat of each prompt. all_repeats: counts of all repeats, whose times
    are more precise.
    plain_pass_s: seconds of a plain pass.
    """
    timed = all_repeats.rounds > 0 and all_repeats.verify_seconds > 0
    return s.DrafterCounts(
        kind=kind,
        rounds=per_prompt.rounds,
        drafted=per_prompt.drafted,
        accepted=per_prompt.accepted,
        siblings=per_prompt.siblings,
        beta=round_significant(all_repeats.draft_seconds / all_repeats.drafted / plain_pass_s)
        if timed
        else None,
        verify_ratio=round_significant(
            all_repeats.verify_seconds / all_repeats.rounds / plain_pass_s
        )
        if timed
        else None,
    )


def _count_draft_bytes(model: ModelAdapter, recipe: Recipe) -> int:
    """Return the memory that drafts need besides the model's, in bytes."""
    readings = {
        spec.reading
        for spec in recipe.drafters
        if spec.draft_model is None and not spec.reading.is_everything
    }
    return (
        sum(make_reduced_model(model, reading).nbytes for reading in readings)
        + sum(ref.parameters * model.spec.dtype.itemsize for ref in recipe.modules)
        + sum(_count_draft_model_bytes(model, spec) for spec in recipe.drafters)
    )


def _count_draft_model_bytes(model: ModelAdapter, spec: DrafterSpec) -> int:
    """Return the memory of a second model that drafts, and of its copy in fewer bits."""
    ref = spec.draft_model
    if ref is None:
        return 0
    draft_model = find_draft_model(ref, model)
    copied = 0 if draft_model is None else estimate_draft_bytes(draft_model, spec.reading)
    return ref.weight_bytes + copied


def _copied_share(recipe: Recipe, stats: DecodeStats) -> float | None:
    """Return the share of all tokens that lookups copied from the prompt; None without a lookup."""
    copied = [
        counts.copied
        for spec, counts in zip(recipe.drafters, stats.by_drafter, strict=False)
        if isinstance(spec, Lookup)
    ]
    return _round_or_none(sum(copied) / stats.tokens) if copied else None


def _interval_ms(estimate: Estimate) -> Interval:
    return Interval.from_rounded(estimate.mean * 1e3, estimate.low * 1e3, estimate.high * 1e3)


def _round_or_none(value: float | None) -> float | None:
    return None if value is None else round_significant(value)
