"""What a model with recurrent layers does not decode: their states stand at one place of the text, so its passes are chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipsearch.drafters import WatchingDrafter
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelSpec
from skipsearch.recipe import DrafterSpec


def refuse_more_than_chains(spec: ModelSpec, drafters: Sequence[tuple[DrafterSpec, Any]], exact: bool) -> None:
    """drafters: settings, and what was built from them. Raises: DecodeError."""
    if not spec.recurrent:
        return
    if exact:
        raise DecodeError(f"the layers of {spec.id} keep a recurrent state, whose bits depend on how its text was cut into passes, so "
                          "there is no exact mode for it: leave that out")
    for settings, drafter in drafters:
        if isinstance(drafter, WatchingDrafter):
            raise DecodeError(f"{settings.kind} reads hidden states while it decodes, and {spec.id}, whose layers keep a recurrent state, "
                              "shows none: draft with skip or lookup")
        if settings.scratch:
            raise DecodeError(f"this {settings.kind} drafts siblings, and the recurrent states of {spec.id} stand at one place of the "
                              "text: leave siblings out")
