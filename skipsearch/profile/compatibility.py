"""Check whether a profile fits a model and a machine.

A recipe for another architecture is refused. Any other difference becomes a warning: it costs speed
alone, since the full model verifies every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from skipsearch.errors import ProfileError
from skipsearch.profile.schema import Profile, ProfileSampling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The known facts about a model; None: not known."""

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
    """The machine and the settings with which a profile will be used; None: do not compare."""

    kind: str  # "cpu", "cuda" or "mps"
    name: str  # of the device
    count: int = 1
    threads: int | None = None
    engine: str | None = None
    # package -> version, as in a profile's `software`; packages left out are not compared
    software: Mapping[str, str | None] = field(default_factory=dict)


def compatibility_warnings(
    profile: Profile, model: ModelFacts, machine: MachineFacts | None = None
) -> list[str]:
    """Return warnings about using `profile` with this model, on this machine if one is given.

    Keys that are null in the profile are not compared. Raises: ProfileError if family, number of
    layers or configuration differ, because the mask then means other sub-layers.
    """
    _require_same_architecture(profile, model)
    differences = [
        *_model_differences(profile, model),
        *(_machine_differences(profile, machine) if machine else ()),
    ]
    return [f"{text}; the output stays the full model's own" for text in differences]


def sampling_warnings(
    profile: Profile, used: ProfileSampling, use: str = "is used with"
) -> list[str]:
    """Return a warning about decoding with other sampling than that the profile was made for.

    use: what the warning says of `used`.
    """
    made = profile.task.sampling
    # Top-p and top-k have no effect if both are greedy.
    if (
        not profile.measured_recipe.drafters
        or made == used
        or made.temperature == used.temperature == 0
    ):
        return []
    return [
        f"this profile was made for {_describe_sampling(made)}, and {use} "
        f"{_describe_sampling(used)}: drafts are then accepted at another rate, so `tune` with "
        "these values may find a faster one; tokens still follow the full model's own distribution"
    ]


def _require_same_architecture(profile: Profile, model: ModelFacts) -> None:
    made = profile.model
    mismatch = None
    if made.family != model.family:
        mismatch = f"family {made.family}", model.family
    elif made.n_layers != model.n_layers:
        mismatch = f"{made.n_layers} layers", f"{model.n_layers}"
    elif _differs(made.config_sha256, model.config_sha256):
        mismatch = (
            f"a configuration with hash {str(made.config_sha256)[:12]}…",
            f"{str(model.config_sha256)[:12]}…",
        )
    if mismatch:
        raise ProfileError(
            f"this profile is for {made.id} with {mismatch[0]}, but {model.id} has {mismatch[1]}; "
            "load the model it was made for, or make one for this model with `skipsearch tune "
            f"--model {model.id}`"
        )


def _model_differences(profile: Profile, model: ModelFacts) -> Iterator[str]:
    made = profile.model
    measured = profile.verdict != "unmeasured"
    if not measured:
        yield "this recipe was imported and never measured, so its speed is unknown"
    if not (made.weights_sha256 and made.weights_sha256 == model.weights_sha256):
        effect = "the recipe was not made for these weights, so fewer drafts may be accepted"
        if made.id != model.id:
            yield f"made for {made.id}, used with {model.id}: {effect}"
        if _differs(made.revision, model.revision):
            yield f"made for revision {made.revision}, used with {model.revision}: {effect}"
        if _differs(made.weights_sha256, model.weights_sha256):
            yield f"the weights are not those it was measured with (their hashes differ): {effect}"
    effect = "drafting and verifying cost different times here, and the speedup may differ"
    if _differs(made.dtype, model.dtype):
        yield f"measured in {made.dtype}, used in {model.dtype}: {effect}"
    if measured and made.quantization != model.quantization:
        yield (
            f"measured with quantisation {made.quantization or 'none'}, used with "
            f"{model.quantization or 'none'}: {effect}"
        )


def _machine_differences(profile: Profile, machine: MachineFacts) -> Iterator[str]:
    if profile.hardware is None or profile.software is None:
        return
    device = profile.hardware
    if (device.kind, device.name) != (machine.kind, machine.name):
        yield (
            f"measured on {device.name}, used on {machine.name}: another recipe may be best here, "
            "and the speedup may differ"
        )
    if device.count != machine.count:
        yield (
            f"measured on {device.count} device(s), used on {machine.count}: the speedup may differ"
        )
    if _differs(device.threads, machine.threads):
        threads = f"{device.threads} thread{'' if device.threads == 1 else 's'}"
        yield f"measured with {threads}, used with {machine.threads}: the speedup may differ"
    if _differs(profile.engine, machine.engine):
        yield (
            f"measured with engine {profile.engine}, used with {machine.engine}: the speedup may "
            "be smaller, or none"
        )
    for package, version in profile.software.model_dump().items():
        if _differs(version, used := machine.software.get(package)):
            yield f"measured with {package} {version}, used with {used}: the speedup may differ"


def _differs(claimed: object, current: object) -> bool:
    """Return whether both values are known and differ."""
    return claimed is not None and current is not None and claimed != current


def _describe_sampling(sampling: ProfileSampling) -> str:
    return f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}"
