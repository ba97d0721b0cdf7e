"""Measure again on this machine what a profile claims, and say whether the claim is confirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skipsearch.decoding import Decoder
from skipsearch.decoding.match_model import collect_machine_facts, collect_model_facts
from skipsearch.errors import ProfileError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.profile.canonical import to_plain_data
from skipsearch.profile.compatibility import compatibility_warnings, sampling_warnings
from skipsearch.profile.measurement import NOT_COMPARED
from skipsearch.profile.paths import ANY
from skipsearch.profile.schema import Measurement, Provenance, TaskInfo
from skipsearch.replay.workload import make_workload
from skipsearch.tasks.task import Task
from skipsearch.timing.interleaved import measure_speedup
from skipsearch.tuning.profile_builder import build_profile, make_provenance

# Outcome of a verification -> its sentence.
OUTCOMES: dict[str, str] = {
    "holds": "the claim holds here: the two intervals overlap, and both lie above 1",
    "faster": "the claim holds here, and more: it is faster than claimed",
    "slower": "the claim does not hold here: it is slower than claimed",
    "undecided": "the claim is neither shown nor refuted here: the two intervals overlap, but this "
    "one reaches down to plain decoding; "
    "more prompts would tell",
    "loses": "the claim does not hold here: decoding with this profile is slower than plain "
    "decoding",
    "plain": "the claim holds here: this draft does not beat plain decoding beyond doubt",
    "beats": "the claim does not hold here: it says that nothing beat plain decoding, and here "
    "this draft does",
    "pays": "nothing was claimed; here it is faster than plain decoding",
    "does_not_pay": "nothing was claimed; here it does not beat plain decoding beyond doubt",
}
_CONFIRMED = ("holds", "faster", "plain")


@dataclass(frozen=True)
class Verification:
    """A claim and its measurement on this machine."""

    claim: Profile  # the profile that was verified
    remeasured: Profile  # the same recipe, measured on this machine
    differences: tuple[str, ...]  # from the conditions of the claim, a sentence each

    @property
    def outcome(self) -> str:
        """The outcome, as a key of `OUTCOMES`."""
        low, high = _require_measurement(self.remeasured).speedup.ci95
        if self.claim.measured is None:
            return "pays" if self.remeasured.verdict == "speculate" else "does_not_pay"
        if self.claim.verdict == "plain":
            return "beats" if low > 1 else "plain"
        claimed_low, claimed_high = self.claim.measured.speedup.ci95
        if high < 1:
            return "loses"
        if high < claimed_low:
            return "slower"
        if low <= 1:
            return "undecided"
        return "faster" if low > claimed_high else "holds"

    @property
    def lossless(self) -> bool:
        """Whether tokens are those of plain decoding, or differ no more than the profile says."""
        gap = _require_measurement(self.remeasured).lossless.first_divergence_logit_gap
        claimed_gap = (
            self.claim.measured.lossless.first_divergence_logit_gap if self.claim.measured else None
        )
        return gap is None or (claimed_gap is not None and gap <= claimed_gap)

    @property
    def holds(self) -> bool:
        return self.outcome in _CONFIRMED and self.lossless

    @property
    def sentence(self) -> str:
        """The outcome as a sentence."""
        sentence = OUTCOMES[self.outcome]
        if self.lossless:
            return sentence
        return f"{sentence}; but tokens differ from plain decoding's by more than the profile says"

    @property
    def measures_beginnings(self) -> bool:
        """Whether the profile's own figures are of answers cut at a repeated 6-gram."""
        return self.claim.measured is not None and self.claim.measured.measures_beginnings

    def describe_losslessness(self) -> str:
        measured, claim = _require_measurement(self.remeasured).lossless, self.claim.measured
        if not measured.prompts:
            return NOT_COMPARED
        text = f"identical to plain decoding on {measured.identical} of {measured.prompts} prompts"
        if (gap := measured.first_divergence_logit_gap) is not None:
            text += (
                f"; where they part, the model's two likeliest tokens lie {gap:g} apart in logits "
                "at most"
            )
        if claim:
            text += f" (claimed: {claim.lossless.identical} of {claim.lossless.prompts})"
        return text

    def as_dict(self) -> dict[str, Any]:
        claim = self.claim.measured
        return {
            "outcome": self.outcome,
            "holds": self.holds,
            "sentence": self.sentence,
            "claim": claim.model_dump(mode="json") if claim else None,
            "here": to_plain_data(self.remeasured),
            "differences": list(self.differences),
        }


def verify(
    model: ModelAdapter,
    profile: Profile,
    task: Task,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Measure a profile's recipe on the hold-out prompts of `task`, as `tune` measures its winner.

    n_prompts: measure at most the first n prompts; None: all. progress(done, total).
    Raises: ProfileError if the profile is for another architecture or has no recipe; SearchError
    for a model that was not loaded from files.
    """
    if not profile.measured_recipe.drafters:
        raise ProfileError(
            "this profile says that nothing beat plain decoding and names no draft that lost, so "
            "there is nothing to "
            "measure: `skipsearch tune` finds out whether that is so here"
        )
    holdout = make_workload(model, task, task.holdout[:n_prompts])
    # First, because this raises ProfileError for another architecture.
    compatibility_warnings(
        profile, collect_model_facts(model.spec), collect_machine_facts(model.spec)
    )
    candidate = Decoder(
        model,
        profile.measured_recipe,
        drafter_costs=profile.drafter_costs,
        module_folders=profile.module_folders,
    )
    measurement = measure_speedup(
        Decoder(model, draft_forced=False), candidate, holdout, seed, progress
    )
    remeasured = build_profile(
        model,
        task,
        holdout,
        profile.measured_recipe,
        measurement,
        provenance=_provenance_now(profile.provenance, seed),
    )
    facts = collect_machine_facts(model.spec)
    return Verification(
        profile,
        remeasured,
        (
            *compatibility_warnings(profile, collect_model_facts(model.spec), facts),
            *sampling_warnings(profile, remeasured.task.sampling),
            *_prompt_differences(profile.task, remeasured.task),
        ),
    )


def _provenance_now(claimed: Provenance, seed: int) -> Provenance:
    """Return the claim's provenance with the current date.

    An imported profile does not name its search. It counts as a search of one mask, which was
    measured.
    """
    provenance_facts = (
        claimed.objective or "wall",
        seed if claimed.seed is None else claimed.seed,
        1 if claimed.trials is None else claimed.trials,
    )
    return make_provenance(
        claimed.searcher, *provenance_facts, claimed.search_seconds or 0.0
    ).model_copy(update={"source": claimed.source})


def _prompt_differences(claimed: TaskInfo, remeasured: TaskInfo) -> Iterator[str]:
    if claimed.name not in (remeasured.name, ANY):
        yield (
            f"made for task {claimed.name}, verified on {remeasured.name}: drafts are accepted at "
            "another rate"
        )
    elif claimed.calibration_sha256 not in (None, remeasured.calibration_sha256):
        yield (
            f"task {remeasured.name} has other text here than where the profile was made, so these "
            "are other prompts"
        )
    if (
        claimed.calibration_sha256
        and claimed.chat_template_sha256 != remeasured.chat_template_sha256
    ):
        yield (
            "prompts went through another chat template where the profile was made, so these are "
            "other prompts"
        )


def _require_measurement(remeasured: Profile) -> Measurement:
    assert remeasured.measured is not None  # `build_profile` sets it
    return remeasured.measured
