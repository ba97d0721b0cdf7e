"""Recipe shapes: which drafters a recipe has, without their settings (`tune --drafters`)."""

from __future__ import annotations

from dataclasses import dataclass

# Drafters that choose their masks during decoding. `auto` leaves them out.
ONLINE_DRAFTERS = ("clasp", "asd", "swift")
# Drafters that need a module. `auto` tries those that a folder of modules has.
TRAINED_DRAFTERS = ("adapted", "kangaroo", "s3d", "mtp")
# The drafter that needs a second model. `auto` tries the models that --draft-models names.
DRAFT_MODEL = "draft-model"


@dataclass(frozen=True)
class RecipeShape:
    """A drafter, alone or after lookup."""

    kind: str  # the last drafter of the recipe; without lookup before it, the only one
    after_lookup: bool = False  # whether lookup comes first

    @classmethod
    def parse(cls, text: str) -> RecipeShape:
        """Read `skip` or `lookup,skip`, as `Recipe.shape` writes it."""
        before, _, kind = text.rpartition(",")
        return cls(kind, before == "lookup")

    def __str__(self) -> str:
        return f"lookup,{self.kind}" if self.after_lookup else self.kind


SKIP = RecipeShape("skip")
LOOKUP_SKIP = RecipeShape("skip", after_lookup=True)


def list_shapes(kind: str) -> tuple[str, str]:
    """Return the shapes of a drafter: alone, and after lookup."""
    return str(RecipeShape(kind)), str(RecipeShape(kind, after_lookup=True))


# The values of `--drafters`, and the shapes that each allows.
RECIPE_SHAPES: dict[str, tuple[str, ...]] = {
    "auto": ("lookup", "skip", "lookup,skip"),
    "lookup": ("lookup",),
    **{
        shape: (shape,)
        for kind in ("skip", *ONLINE_DRAFTERS, *TRAINED_DRAFTERS, DRAFT_MODEL)
        for shape in list_shapes(kind)
    },
}
