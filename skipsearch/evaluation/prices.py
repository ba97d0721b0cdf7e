"""What the guard weighs the drafters of a profile by that nobody measured: the latency table of this machine, where there is one."""

from __future__ import annotations

from dataclasses import replace

from skipsearch.evaluation.table import kept_costs
from skipsearch.models.spec import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.stats import Price


def prices_here(profile: Profile, model: ModelAdapter) -> tuple[Price | None, ...]:
    """The profile's own prices; of a profile without measurements, β and v as the latest latency table of this model has them."""
    costs = kept_costs(model) if profile.measured is None else None
    if costs is None:
        return profile.prices
    found: list[Price | None] = []
    for drafter, price in zip(profile.candidate.drafters, profile.prices, strict=True):
        mask = drafter.mask(model.spec.n_layers)
        beta = 0.0 if mask is None else costs.draft(mask) / costs.verify[0]
        rows = 0 if price is None else round(price.rows)
        found.append(price and replace(price, beta=beta, verify_ratio=max(1.0, costs.verifying(rows) / costs.verify[0])))
    return tuple(found)
