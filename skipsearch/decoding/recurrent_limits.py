"""Limits on decoding with models that have recurrent layers.

A recurrent state belongs to one position of the text, so passes must be chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.core.recipe import DrafterSpec
from skipsearch.drafters import Drafter
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelSpec


def check_recurrent_limits(
    spec: ModelSpec, drafters: Sequence[tuple[DrafterSpec, Drafter]], exact: bool
) -> None:
    """Raise DecodeError if a recurrent model cannot decode with these drafters, or exactly.

    drafters: (settings, drafter) pairs."""
    if not spec.is_recurrent:
        return
    if exact:
        raise DecodeError(
            f"the layers of {spec.id} keep a recurrent state, whose bits depend on how its text "
            "was cut into passes, so "
            "there is no exact mode for it: leave that out"
        )
    for settings, drafter in drafters:
        session = drafter.new_session()
        if session.observes_hidden and not session.observes_last_hidden_only:
            raise DecodeError(
                f"{settings.kind} reads hidden states while it decodes, and {spec.id}, whose "
                "layers keep a recurrent state, "
                "shows only the last: draft with skip or lookup"
            )
        if settings.scratch_slots:
            raise DecodeError(
                f"this {settings.kind} drafts siblings, and the recurrent states of {spec.id} "
                "stand at one place of the "
                "text: leave siblings out"
            )
