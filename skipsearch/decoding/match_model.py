"""Check whether a profile fits a model and this machine.

The rules are in `profile/compatibility.py`. This module collects the facts for them.
"""

from __future__ import annotations

from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.profile import Profile
from skipsearch.profile.compatibility import MachineFacts, ModelFacts, compatibility_warnings


def collect_model_facts(spec: ModelSpec) -> ModelFacts:
    return ModelFacts(**spec.facts())


def collect_machine_facts(spec: ModelSpec) -> MachineFacts:
    machine = describe_machine(spec.device)
    return MachineFacts(
        machine.kind, machine.name, machine.count, machine.threads, spec.engine, software_versions()
    )


def check_profile(profile: Profile, model: ModelAdapter) -> list[str]:
    """Return warnings about differences that cost speed.

    Raises: ProfileError if the profile is for another architecture.
    """
    return compatibility_warnings(
        profile, collect_model_facts(model.spec), collect_machine_facts(model.spec)
    )
