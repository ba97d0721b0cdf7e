"""The profile compiler: a winner, what was measured with it, and where, written down as a `Profile`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from typing import Literal

from skipsearch.drafters.lookup import Lookup
from skipsearch.errors import SearchError
from skipsearch.evaluation.prompts import Workload, template_sha256
from skipsearch.evaluation.wall import Divergence, Timings, first_divergence
from skipsearch.machine import software, source_commit, this_machine
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.profile import Interval, Profile, round_sig
from skipsearch.profile import schema as s
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats, DrafterStats, Estimate
from skipsearch.tasks.values import Task


def divergences(model: ModelAdapter, workload: Workload, plain: Timings, ours: Timings) -> list[Divergence]:
    """Greedy generations that differ from plain decoding's, one entry a prompt."""
    reference = {x.prompt: x.generation.tokens for x in plain.samples}
    found = {}
    for sample in ours.samples:
        where = first_divergence(model, workload.prompts[sample.prompt], reference[sample.prompt], sample.generation.tokens)
        if where is not None:
            found[sample.prompt] = where
    return list(found.values())


def check_identifiable(spec: ModelSpec) -> None:
    """Raises: SearchError if a profile could not say which weights it is for, which is better said before a search than after it."""
    if spec.config_sha256 is None or spec.weights_sha256 is None:
        raise SearchError(f"{spec.id} was not loaded from files, so a profile could not say which weights it is for: save it and "
                          "load_model it")


def compile_profile(model: ModelAdapter, task: Task, workload: Workload, recipe: Recipe, plain: Timings, ours: Timings, *,
                    provenance: s.Provenance) -> Profile:
    """verdict: `speculate` if the speedup's whole interval lies above 1, else `plain`.

    Raises: SearchError if the model lacks the hashes that make a profile checkable (a model that was not loaded from files).
    """
    spec = model.spec
    check_identifiable(spec)
    speedup = ours.speedup_over(plain)
    verdict: Literal["speculate", "plain"] = "speculate" if speedup.low > 1 and ours.stats.drafted else "plain"
    machine = this_machine(spec.device)
    sampling = s.Sampling(temperature=task.sampling.temperature, top_p=task.sampling.top_p, top_k=task.sampling.top_k)
    candidate = recipe.drafters if ours.stats.drafted else ()
    return Profile(
        schema_version=2, model=model_info(spec),
        task=s.TaskInfo(name=task.name, version=task.version, calibration_sha256=task.calibration_sha256,
                        chat_template_sha256=template_sha256(task, model.tokenizer), sampling=sampling),
        hardware=s.Hardware(kind=machine.kind, name=machine.name, count=machine.count, threads=machine.threads),  # type: ignore[arg-type]
        engine=model.spec.engine, verdict=verdict, drafters=candidate if verdict == "speculate" else (),
        lost=candidate if verdict == "plain" else (), measured=_measured(model, workload, plain, ours, speedup, recipe),
        software=s.Software(**software()),  # type: ignore[arg-type]
        provenance=provenance)


def provenance(searcher: str, objective: str, seed: int, trials: int, search_seconds: float) -> s.Provenance:
    return s.Provenance(searcher=searcher, objective=objective, seed=seed, trials=trials, search_seconds=round(search_seconds, 1),  # type: ignore[arg-type]
                        created=datetime.now(UTC).isoformat(timespec="seconds"), commit=source_commit())


def model_info(spec: ModelSpec) -> s.ModelInfo:
    return s.ModelInfo(id=spec.id, revision=spec.revision, family=spec.family, n_layers=spec.n_layers, config_sha256=spec.config_sha256,
                       weights_sha256=spec.weights_sha256, dtype=spec.dtype_name, quantization=spec.quantization)  # type: ignore[arg-type]


def _measured(model: ModelAdapter, workload: Workload, plain: Timings, ours: Timings, speedup: Estimate, recipe: Recipe) -> s.Measured:
    stats, baseline = ours.stats, plain.stats
    once = sum({x.prompt: x.stats for x in ours.samples}.values(), DecodeStats())   # a repeat adds no text
    contexts = [len(workload.prompts[x.prompt]) + len(x.generation.tokens) for x in ours.samples]
    differing = divergences(model, workload, plain, ours) if workload.sampling.greedy else []
    compared = ours.prompts if workload.sampling.greedy else 0
    a_pass = baseline.decode_seconds / baseline.rounds
    repeats = {x.prompt for x in ours.samples if x.generation.finish_reason == "repeat"}
    return s.Measured(
        baseline_ms_per_token=_milliseconds(plain.estimate()), ms_per_token=_milliseconds(ours.estimate()),
        speedup=Interval.rounded(speedup.mean, speedup.low, speedup.high),
        alpha=_rounded(stats.alpha), accepted_fraction=_rounded(stats.accepted_fraction), tau=round_sig(stats.tau or 1.0),
        beta=_rounded(stats.draft_seconds / stats.drafted / a_pass if stats.drafted else None),
        verify_ratio=_rounded(stats.verify_seconds / stats.rounds / a_pass if stats.drafted else None),
        prompts=ours.prompts, tokens=once.tokens,
        context_tokens=s.ContextTokens(p50=round(median(contexts)), max=max(contexts)),
        ended_on_repeat=len(repeats), split="holdout",
        lossless=s.Lossless(prompts=compared, identical=compared - len(differing),
                            first_divergence_logit_gap=float(round_sig(max(d.gap for d in differing))) if differing else None),
        by_drafter=tuple(_counts(spec.kind, one, every, a_pass) for spec, one, every in
                         zip(recipe.drafters, once.by_drafter, stats.by_drafter, strict=False)) if stats.drafted else (),
        copied_from_prompt=_copied(recipe, once) if stats.drafted else None,
        choosing_share=_rounded(stats.choosing_share) if stats.choosing_seconds else None, stream=_stream(plain, ours))


def _stream(plain: Timings, ours: Timings) -> s.Stream | None:
    """None where nothing was learned from prompt to prompt."""
    learning = {sample.prompt for sample in ours.samples if sample.learning}
    if not learning:
        return None
    return s.Stream(learning=_part(plain, ours, lambda prompt: prompt in learning),
                    settled=_part(plain, ours, lambda prompt: prompt not in learning))


def _part(plain: Timings, ours: Timings, belongs: Callable[[int], bool]) -> s.StreamPart | None:
    theirs, mine = (timings.of(belongs) for timings in (plain, ours))
    if not mine.samples:
        return None
    speedup = mine.speedup_over(theirs)
    return s.StreamPart(prompts=mine.prompts, speedup=Interval.rounded(speedup.mean, speedup.low, speedup.high),
                        choosing_share=round_sig(mine.stats.choosing_share))


def _counts(kind: str, once: DrafterStats, every: DrafterStats, a_pass: float) -> s.DrafterCounts:
    """once: counts of each prompt taken once; every: of all repeats, which times are better for. a_pass: seconds of a plain pass."""
    timed = every.rounds > 0 and every.verify_seconds > 0
    return s.DrafterCounts(kind=kind, rounds=once.rounds, drafted=once.drafted, accepted=once.accepted, siblings=once.siblings,
                           beta=round_sig(every.draft_seconds / every.drafted / a_pass) if timed else None,
                           verify_ratio=round_sig(every.verify_seconds / every.rounds / a_pass) if timed else None)


def _copied(recipe: Recipe, stats: DecodeStats) -> float | None:
    """Share of all tokens that were copied from the prompt; None where nothing copies."""
    copied = [counts.copied for spec, counts in zip(recipe.drafters, stats.by_drafter, strict=False) if isinstance(spec, Lookup)]
    return _rounded(sum(copied) / stats.tokens) if copied else None


def _milliseconds(estimate: Estimate) -> Interval:
    return Interval.rounded(estimate.mean * 1e3, estimate.low * 1e3, estimate.high * 1e3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round_sig(value)

