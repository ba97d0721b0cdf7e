"""Find the part of a recipe that a checkpoint can hold: the mask of its only skip drafter."""

from __future__ import annotations

from dataclasses import dataclass

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import ExportError
from skipsearch.profile import Profile


@dataclass(frozen=True)
class ExportableDraft:
    """A skip drafter that can become a checkpoint."""

    skip: Skip
    mask: SkipMask  # the sub-layers that the checkpoint lacks
    left_out: tuple[DrafterSpec, ...] = ()  # other drafters of the recipe, which are not exported

    @property
    def lookup(self) -> Lookup | None:
        """The lookup of the recipe, which is not exported; None if the recipe has none.

        Some engines have a lookup of their own.
        """
        return next((drafter for drafter in self.left_out if isinstance(drafter, Lookup)), None)


def extract_exportable(profile: Profile) -> ExportableDraft:
    """Return the skip drafter of a profile's recipe.

    Raises: ExportError unless exactly one drafter skips sub-layers, without trained weights.
    """
    recipe = profile.measured_recipe
    skips = [drafter for drafter in recipe.drafters if isinstance(drafter, Skip)]
    if not recipe.drafters:
        raise ExportError(
            "this profile drafts nothing, so its draft would be the model itself: there is nothing "
            "to export"
        )
    if len(skips) != 1:
        has = f"{len(skips)} skip drafters" if skips else "no skip drafter"
        raise ExportError(
            f"this profile drafts with {recipe.shape}, which has {has}, and an export carries the "
            "mask of one: use it "
            "in skipsearch, or make one with `skipsearch tune --drafters skip`"
        )
    if skips[0].modules:
        raise ExportError(
            "this profile drafts with trained weights, and an export copies the model's own: use "
            "it in skipsearch, or make "
            "one with `skipsearch tune --drafters skip`"
        )
    if not profile.mask.n_skipped:
        raise ExportError(
            f"this profile's draft skips no sub-layer: it reads {skips[0].reading}, and an export "
            "leaves out whole sub-layers: use it in skipsearch"
        )
    return ExportableDraft(
        skips[0],
        skips[0].mask(profile.model.n_layers),
        tuple(d for d in recipe.drafters if d is not skips[0]),
    )
