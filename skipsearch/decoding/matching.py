"""Does a profile belong to this model, here? The rules are the profile room's; this gathers the facts they ask for."""

from __future__ import annotations

from skipsearch.machine import software, this_machine
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.profile import Profile
from skipsearch.profile.match import MachineFacts, ModelFacts, check


def model_facts(spec: ModelSpec) -> ModelFacts:
    return ModelFacts(id=spec.id, family=spec.family, n_layers=spec.n_layers, revision=spec.revision, config_sha256=spec.config_sha256,
                      weights_sha256=spec.weights_sha256, dtype=spec.dtype_name, quantization=spec.quantization)


def machine_facts(spec: ModelSpec) -> MachineFacts:
    here = this_machine(spec.device)
    return MachineFacts(here.kind, here.name, here.count, here.threads, spec.engine, software())


def check_profile(profile: Profile, model: ModelAdapter) -> list[str]:
    """Warnings, in plain words, of what differs and costs speed. Raises: ProfileError for another architecture."""
    return check(profile, model_facts(model.spec), machine_facts(model.spec))
