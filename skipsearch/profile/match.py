"""Does a profile belong to this model and this machine?

A recipe for another architecture is refused. Everything else only costs speed, since verification by the full model keeps the
output what it is, and becomes a warning in plain words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from skipsearch.errors import ProfileError
from skipsearch.profile.schema import Profile, Sampling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a loaded model says about itself; None where it cannot say."""

    id: str
    family: str
    n_layers: int
    revision: str | None = None
    config_sha256: str | None = None
    weights_sha256: str | None = None
    dtype: str | None = None
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where and how it is going to decode; None, or a package left out, where that is not known or not to be compared.

    kind: "cpu", "cuda" or "mps". software: package -> version, as in a profile's `software`.
    """

    kind: str
    name: str
    count: int = 1
    threads: int | None = None
    engine: str | None = None
    software: Mapping[str, str | None] = field(default_factory=dict)
    sampling: Sampling | None = None


def check(profile: Profile, model: ModelFacts, machine: MachineFacts | None = None) -> list[str]:
    """Warnings about using `profile` with this model, on this machine if one is given; an empty list says that all agrees.

    What the profile leaves null is not compared.
    Raises: ProfileError if family, number of layers or configuration differ: the mask then means other sub-layers.
    """
    _refuse_another_architecture(profile, model)
    differences = [*_model_differences(profile, model), *(_machine_differences(profile, machine) if machine else ())]
    warnings = [f"{text}; the output stays the full model's own" for text in differences]
    if machine is not None and _sampling_differs(profile, machine):
        made, here = profile.task.sampling, machine.sampling
        warnings.append(f"made for {_sampling(made)}, used with {_sampling(here)}: drafts are accepted at another rate; "
                        "tokens still follow the full model's own distribution")
    return warnings


def _refuse_another_architecture(profile: Profile, model: ModelFacts) -> None:
    made = profile.model
    wrong = None
    if made.family != model.family:
        wrong = f"family {made.family}", model.family
    elif made.n_layers != model.n_layers:
        wrong = f"{made.n_layers} layers", f"{model.n_layers}"
    elif _differ(made.config_sha256, model.config_sha256):
        wrong = f"a configuration with hash {str(made.config_sha256)[:12]}…", f"{str(model.config_sha256)[:12]}…"
    if wrong:
        raise ProfileError(f"this profile is for {made.id} with {wrong[0]}, but {model.id} has {wrong[1]}; load the model it was "
                           f"made for, or make one for this model with `skipsearch tune --model {model.id}`")


def _model_differences(profile: Profile, model: ModelFacts) -> Iterator[str]:
    made = profile.model
    measured = profile.verdict != "unmeasured"
    if not measured:
        yield "this recipe was imported and never measured, so its speed is unknown"
    if not (made.weights_sha256 and made.weights_sha256 == model.weights_sha256):
        effect = "the recipe was not made for these weights, so fewer drafts may be accepted"
        if made.id != model.id:
            yield f"made for {made.id}, used with {model.id}: {effect}"
        if _differ(made.revision, model.revision):
            yield f"made for revision {made.revision}, used with {model.revision}: {effect}"
        if _differ(made.weights_sha256, model.weights_sha256):
            yield f"the weights are not those it was measured with (their hashes differ): {effect}"
    effect = "drafting and verifying cost different times here, and the speedup may differ"
    if _differ(made.dtype, model.dtype):
        yield f"measured in {made.dtype}, used in {model.dtype}: {effect}"
    if measured and made.quantization != model.quantization:
        yield f"measured with quantisation {made.quantization or 'none'}, used with {model.quantization or 'none'}: {effect}"


def _machine_differences(profile: Profile, machine: MachineFacts) -> Iterator[str]:
    if profile.hardware is None or profile.software is None:
        return
    there = profile.hardware
    if (there.kind, there.name) != (machine.kind, machine.name):
        yield f"measured on {there.name}, used on {machine.name}: another recipe may be best here, and the speedup may differ"
    if there.count != machine.count:
        yield f"measured on {there.count} device(s), used on {machine.count}: the speedup may differ"
    if _differ(there.threads, machine.threads):
        threads = f"{there.threads} thread{'' if there.threads == 1 else 's'}"
        yield f"measured with {threads}, used with {machine.threads}: the speedup may differ"
    if _differ(profile.engine, machine.engine):
        yield f"measured with engine {profile.engine}, used with {machine.engine}: the speedup may be smaller, or none"
    for package, version in profile.software.model_dump().items():
        if _differ(version, here := machine.software.get(package)):
            yield f"measured with {package} {version}, used with {here}: the speedup may differ"


def _sampling_differs(profile: Profile, machine: MachineFacts) -> bool:
    made, here = profile.task.sampling, machine.sampling
    both_greedy = here is not None and made.temperature == here.temperature == 0  # top-p and top-k then change nothing
    return _differ(made, here) and not both_greedy


def _differ(made: object, here: object) -> bool:
    """Whether both are known and not the same."""
    return made is not None and here is not None and made != here


def _sampling(sampling: Sampling | None) -> str:
    return f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}" if sampling else ""
