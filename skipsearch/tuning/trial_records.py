"""Write and read a judged mask as an Optuna trial, with its parameters and attributes."""

from __future__ import annotations

import math
from typing import Any

from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial, TrialState

# Fields of `Trial` that are stored as attributes under their own names.
_TRIAL_ATTRS = (
    "stderr",
    "fidelity",
    "alpha",
    "tau",
    "beta",
    "baseline_seconds_per_token",
    "searcher",
    "search_seconds",
)


def parameter_names(n_layers: int) -> list[str]:
    """Return the parameter names, one for each sub-layer in the flat order of `SkipMask`.

    The value 1 of a parameter means that the sub-layer is skipped.
    """
    return [f"{kind}_{i:03d}" for i in range(n_layers) for kind in ("attn", "mlp")]


def mask_parameters(mask: SkipMask) -> dict[str, int]:
    return dict(zip(parameter_names(mask.n_layers), mask.bits, strict=True))


def format_bits(mask: SkipMask) -> str:
    """Return a mask as the text of the attribute `mask`.

    A claimed trial needs it, because it has no parameters yet.
    """
    return "".join(map(str, mask.bits))


def read_mask(frozen: FrozenTrial, n_layers: int) -> SkipMask | None:
    """Return the mask of a trial; None if the trial has no mask of `n_layers` layers."""
    bits = frozen.user_attrs.get("mask") or "".join(
        str(frozen.params.get(name, "")) for name in parameter_names(n_layers)
    )
    return SkipMask.from_bits([int(bit) for bit in bits]) if len(bits) == 2 * n_layers else None


def trial_attrs(trial: Trial) -> dict[str, Any]:
    """Return the attributes to store with a finished trial."""
    attrs = {key: getattr(trial, key) for key in _TRIAL_ATTRS if getattr(trial, key) is not None}
    if trial.recipe is not None:
        attrs["recipe"] = trial.recipe.as_data()
    return attrs if trial.has_time else {**attrs, "failed": True}


def read_trial(frozen: FrozenTrial, mask: SkipMask) -> Trial:
    """Return a stored trial."""
    has_time = frozen.state is OptunaState.COMPLETE and frozen.value is not None
    attrs = {key: frozen.user_attrs[key] for key in _TRIAL_ATTRS if key in frozen.user_attrs}
    stored_recipe = frozen.user_attrs.get("recipe")
    return Trial(
        mask,
        float(frozen.value) if has_time else math.inf,
        state=TrialState.COMPLETE if has_time else TrialState.FAILED,
        recipe=None if stored_recipe is None else Recipe.from_data(stored_recipe),
        **attrs,
    )


def is_judged(frozen: FrozenTrial) -> bool:
    """Return whether a trial is judged: it has a time, or the mask could not be timed."""
    return frozen.state is OptunaState.COMPLETE or (
        frozen.state is OptunaState.FAIL and "failed" in frozen.user_attrs
    )
