"""What of a recipe an export carries: the mask of its one skip drafter. Engines that draft with a second model know no other drafter."""

from __future__ import annotations

from dataclasses import dataclass

from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.errors import ExportError
from skipsearch.mask import SkipMask
from skipsearch.profile import Profile
from skipsearch.recipe import DrafterSpec


@dataclass(frozen=True)
class CarriedDraft:
    """skip: the drafter that becomes a checkpoint. mask: what it leaves out. behind: the recipe's other drafters, which stay behind."""

    skip: Skip
    mask: SkipMask
    behind: tuple[DrafterSpec, ...] = ()

    @property
    def lookup(self) -> Lookup | None:
        """The lookup that stays behind; some engines have one of their own."""
        return next((drafter for drafter in self.behind if isinstance(drafter, Lookup)), None)


def carried(profile: Profile) -> CarriedDraft:
    """Raises: ExportError unless exactly one drafter of the profile's recipe skips sub-layers."""
    recipe = profile.candidate
    skips = [drafter for drafter in recipe.drafters if isinstance(drafter, Skip)]
    if not recipe.drafters:
        raise ExportError("this profile drafts nothing, so its draft would be the model itself: there is nothing to export")
    if len(skips) != 1:
        has = f"{len(skips)} skip drafters" if skips else "no skip drafter"
        raise ExportError(f"this profile drafts with {recipe.shape}, which has {has}, and an export carries the mask of one: use it "
                          "in skipsearch, or make one with `skipsearch tune --drafters skip`")
    if skips[0].modules:
        raise ExportError("this profile drafts with trained weights, and an export copies the model's own: use it in skipsearch, or make "
                          "one with `skipsearch tune --drafters skip`")
    return CarriedDraft(skips[0], skips[0].mask(profile.model.n_layers), tuple(d for d in recipe.drafters if d is not skips[0]))
