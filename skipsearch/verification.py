"""Does a profile's claim hold on this machine? The compiler's own measurement again, and what became of the claim, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from skipsearch.compiler import compile_profile, provenance
from skipsearch.decoding import Decoder
from skipsearch.decoding.matching import machine_facts, model_facts
from skipsearch.errors import ProfileError
from skipsearch.evaluation.prompts import workload
from skipsearch.evaluation.wall import race
from skipsearch.models.spec import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.profile.dump import as_dict
from skipsearch.profile.match import check
from skipsearch.profile.places import ANY
from skipsearch.profile.schema import Measured, Provenance, TaskInfo
from skipsearch.tasks.values import Task
from skipsearch.tuning import HOLDOUT_REPEATS

# What can become of a claim, and how it is told.
OUTCOMES: dict[str, str] = {
    "holds": "the claim holds here: the two intervals overlap, and both lie above 1",
    "faster": "the claim holds here, and more: it is faster than claimed",
    "slower": "the claim does not hold here: it is slower than claimed",
    "undecided": "the claim is neither shown nor refuted here: the two intervals overlap, but this one reaches down to plain decoding; "
                 "more prompts would tell",
    "loses": "the claim does not hold here: decoding with this profile is slower than plain decoding",
    "plain": "the claim holds here: this draft does not beat plain decoding beyond doubt",
    "beats": "the claim does not hold here: it says that nothing beat plain decoding, and here this draft does",
    "pays": "nothing was claimed; here it is faster than plain decoding",
    "does_not_pay": "nothing was claimed; here it does not beat plain decoding beyond doubt",
}
_BORNE_OUT = ("holds", "faster", "plain")


@dataclass(frozen=True)
class Verification:
    """claim: the profile that was verified. here: the same draft as measured on this machine, a profile of its own.

    differences: what is not as it was when the claim was made, a sentence each.
    """

    claim: Profile
    here: Profile
    differences: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """A key of `OUTCOMES`."""
        low, high = _measured(self.here).speedup.ci95
        if self.claim.measured is None:
            return "pays" if self.here.verdict == "speculate" else "does_not_pay"
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
        """Whether tokens are plain decoding's own, or differ by no more than rounding did where the claim was made."""
        found = _measured(self.here).lossless
        claimed = self.claim.measured.lossless.first_divergence_logit_gap if self.claim.measured else None
        gap = found.first_divergence_logit_gap
        return gap is None or (claimed is not None and gap <= claimed)

    @property
    def holds(self) -> bool:
        return self.outcome in _BORNE_OUT and self.lossless

    @property
    def sentence(self) -> str:
        """What became of the claim, in words."""
        told = OUTCOMES[self.outcome]
        return told if self.lossless else f"{told}; but tokens differ from plain decoding's by more than the profile says"

    def tokens_in_words(self) -> str:
        found = _measured(self.here).lossless
        if not found.prompts:
            return "not compared: this task draws its tokens at random"
        told = f"identical to plain decoding on {found.identical} of {found.prompts} prompts"
        if found.first_divergence_logit_gap is not None:
            told += f"; where they part, the model's two likeliest tokens lie {found.first_divergence_logit_gap:g} apart in logits at most"
        claim = self.claim.measured
        return f"{told} (claimed: {claim.lossless.identical} of {claim.lossless.prompts})" if claim else told

    def as_dict(self) -> dict[str, Any]:
        claim = self.claim.measured
        return {"outcome": self.outcome, "holds": self.holds, "sentence": self.sentence,
                "claim": claim.model_dump(mode="json") if claim else None, "here": as_dict(self.here),
                "differences": list(self.differences)}


def verify(model: ModelAdapter, profile: Profile, task: Task, prompts: int | None = None, seed: int = 0,
           progress: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Measure a profile's draft on the hold-out prompts of `task`, interleaved with plain decoding, as `tune` measures its winner.

    prompts: how many of them, all if None. progress(done, total).
    Raises: ProfileError if the profile is for another architecture or names no mask; SearchError for a model without files.
    """
    if not profile.candidate.drafters:
        raise ProfileError("this profile says that nothing beat plain decoding and names no draft that lost, so there is nothing to "
                           "measure: `skipsearch tune` finds out whether that is so here")
    holdout = workload(model, task, task.holdout[:prompts])
    check(profile, model_facts(model.spec), machine_facts(model.spec))  # before the work: it may be for another architecture
    candidate = Decoder(model, profile.candidate, prices=profile.prices, modules=profile.folders)
    plain, ours = race([Decoder(model), candidate], holdout, HOLDOUT_REPEATS, seed, progress)
    here = compile_profile(model, task, holdout, profile.candidate, plain, ours, provenance=_measured_now(profile.provenance, seed))
    facts = replace(machine_facts(model.spec), sampling=here.task.sampling)
    return Verification(profile, here, (*check(profile, model_facts(model.spec), facts), *_other_prompts(profile.task, here.task)))


def _measured_now(made: Provenance, seed: int) -> Provenance:
    """The same origin. What an imported profile does not know of its search is that one mask was judged, by the clock."""
    known = (made.objective or "wall", seed if made.seed is None else made.seed, 1 if made.trials is None else made.trials)
    return provenance(made.searcher, *known, made.search_seconds or 0.0).model_copy(update={"source": made.source})


def _other_prompts(claimed: TaskInfo, here: TaskInfo) -> Iterator[str]:
    if claimed.name not in (here.name, ANY):
        yield f"made for task {claimed.name}, verified on {here.name}: drafts are accepted at another rate"
    elif claimed.calibration_sha256 not in (None, here.calibration_sha256):
        yield f"task {here.name} has other text here than where the profile was made, so these are other prompts"
    if claimed.calibration_sha256 and claimed.chat_template_sha256 != here.chat_template_sha256:
        yield "prompts went through another chat template where the profile was made, so these are other prompts"


def _measured(here: Profile) -> Measured:
    assert here.measured is not None  # the compiler measures
    return here.measured
