"""Candidates, for the race, of drafters that choose their masks during decoding.

Replay cannot predict what such a drafter will choose. A list of settings is therefore combined with
a few draft policies, and all of them race.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from skipsearch.core.recipe import Recipe
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import DraftPolicy, make_exit
from skipsearch.drafters.swift.spec import SWIFT, SiblingSchedule
from skipsearch.errors import MaskError, SearchError
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import RecipeShape

DRAFT_POLICIES = (
    DraftPolicy(8, make_exit("confidence", threshold=0.5)),
    DraftPolicy(6, make_exit("confidence", threshold=0.7)),
    DraftPolicy(4, make_exit("fixed")),
)
# The first setting of each drafter is the published one.
# asd: (cosine from which an attention is skipped, skip every n-th layer, last layers that are kept)
ASD_SETTINGS = ((0.985, 3, 2), (0.985, 2, 1), (0.995, 3, 2), (0.998, 2, 2), (0.998, 4, 1))
# clasp: (what is skipped as one, share of these units, rounds between two plans)
NEVER_REPLAN = 100_000  # rounds; more than any request has
CLASP_SETTINGS = (
    ("layer", 0.5, 8),
    ("layer", 0.6, 8),
    ("layer", 0.4, NEVER_REPLAN),
    ("layer", 0.8, NEVER_REPLAN),
    ("sublayer", 0.6, NEVER_REPLAN),
    ("sublayer", 0.8, 32),
)
TREE = SiblingSchedule(thresholds=(0.8, 0.5), widths=(1, 2, 3))  # published widths go up to 10
# swift: (share of sub-layers that is skipped, tokens on which a mask is tried, rounds between two
# trials, siblings)
SWIFT_SETTINGS = (
    (0.45, 32, 1, None),
    (0.45, 16, 1, None),
    (0.6, 16, 4, None),
    (0.75, 16, 1, None),
    (0.75, 16, 1, TREE),
    (0.85, 16, 4, None),
)
# Stop rules of swift's search, which has to end within the prompts of one measurement.
SWIFT_TOLERANCE, SWIFT_MAX_TRIALS = 60, 200
SPECS: dict[str, type[ASD | CLaSp | SWIFT]] = {"asd": ASD, "clasp": CLaSp, "swift": SWIFT}


def list_online_candidates(shape: RecipeShape, objective: ReplayObjective) -> list[Candidate]:
    """Return the recipes to race of one of `ONLINE_DRAFTERS`.

    Raises: SearchError if no setting skips anything of the model.
    """
    model = objective.replay.model
    lookups = objective.list_lookups(shape.after_lookup)[0]
    recipes = dict[Recipe, None]()  # without duplicates: shares of few layers may be equal
    for setting, policy in product(_list_settings(shape.kind, model.spec.n_layers), DRAFT_POLICIES):
        length = min(policy.draft_length, objective.max_draft)
        spec = SPECS[shape.kind](**setting, draft_length=length, exit=policy.exit)
        try:
            spec.build(model, [])
        except MaskError:  # clasp cannot skip sub-layers of a model with a parallel residual
            continue
        recipes[Recipe((*lookups, spec))] = None
    if not recipes:
        raise SearchError(
            f"{shape.kind} has no setting that skips anything of a model with "
            f"{model.spec.n_layers} layers"
        )
    return [Candidate(recipe) for recipe in recipes]


def _list_settings(kind: str, n_layers: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of a drafter that skip something of a model with `n_layers` layers."""
    if kind == "asd":
        for threshold, every, keep_last in ASD_SETTINGS:
            if every <= n_layers - keep_last:
                yield {"threshold": threshold, "every": every, "keep_last": keep_last}
    elif kind == "clasp":
        n_units = {"layer": n_layers, "sublayer": 2 * n_layers}
        for unit, share, interval in CLASP_SETTINGS:
            if n_units[unit] > 1:
                skip = min(n_units[unit] - 1, max(1, round(share * n_units[unit])))
                yield {"unit": unit, "skip": skip, "interval": interval}
    else:
        stop = {"tolerance": SWIFT_TOLERANCE, "most_trials": SWIFT_MAX_TRIALS}
        for ratio, window, interval, tree in SWIFT_SETTINGS:
            if int(2 * (n_layers - 2) * ratio) > 0:  # swift keeps both ends
                yield {
                    "skip_ratio": ratio,
                    "window": window,
                    "interval": interval,
                    "tree": tree,
                } | stop
