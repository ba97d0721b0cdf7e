"""Get the costs of a profile's drafters, by which the guard decides when to pause a drafter.

For an unmeasured profile, they are from this machine's latency table.
"""

from __future__ import annotations

from dataclasses import replace

from skipsearch.core.stats import DrafterCost
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.timing.latency_table import read_cached_costs


def resolve_drafter_costs(profile: Profile, model: ModelAdapter) -> tuple[DrafterCost | None, ...]:
    """Return the costs of each drafter in the profile, for the guard; None where they are unknown.

    If the profile is unmeasured, β and v are from this model's latest latency table. Without such a
    table, they are the profile's own.
    """
    sampling = SamplingParams(**profile.task.sampling.model_dump())
    costs = read_cached_costs(model, sampling) if profile.measured is None else None
    if costs is None:
        return profile.drafter_costs
    resolved: list[DrafterCost | None] = []
    for drafter, stored in zip(
        profile.measured_recipe.drafters, profile.drafter_costs, strict=True
    ):
        mask = drafter.mask(model.spec.n_layers)
        beta = 0.0 if mask is None else costs.draft_step_seconds(mask) / costs.verify[0]
        rows = 0 if stored is None else round(stored.rows_per_round)
        resolved.append(
            stored
            and replace(
                stored,
                beta=beta,
                verify_ratio=max(1.0, costs.verify_seconds(rows) / costs.verify[0]),
            )
        )
    return tuple(resolved)
