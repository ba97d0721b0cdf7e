"""Checks of drafts by a head that the checkpoint ships."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from helpers.shipped_heads import draft_by_definition, save_checkpoint_with_head
from helpers.tiny import FullModel

from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.models import ModelAdapter
from skipsearch.models.loading.loader import load_adapter

from .count_checks import recorded
from .enumeration_checks import Law, check_law
from .sampling_checks import Warp

BRIEF = ("deepseek_v3", "qwen3_5_text")  # without and with recurrent layers
LOOKUP = Lookup(min_match=1, draft_length=3)
SHIPPED = Mtp(draft_length=4, exit=make_exit("fixed"))
FEW = 4  # tokens of the vocabulary whose texts are enumerated
PROMPTS = ((5, 17, 40, 3), (9, 2), (33, 34))


@cache
def shipped_world(family: str, **more: Any) -> tuple[ModelAdapter, Any]:
    """Return a loaded model that ships a head, and the model of `draft_by_definition`."""
    with tempfile.TemporaryDirectory() as folder:
        reference = save_checkpoint_with_head(family, Path(folder), **more)
        model = load_adapter(folder, device="cpu", dtype="float64", engine="hf")
        SHIPPED.build(model, [])  # reads the head while its file exists
    return model, reference


def check_shipped_drafts(families: Sequence[str] = BRIEF) -> DecodeStats:
    """Check that every draft is that of the definition, alone and after lookup."""
    total = DecodeStats()
    for family in families:
        total += check_drafts_of(*shipped_world(family))
    assert 0 < total.accepted < total.drafted
    return total


def check_drafts_of(model: ModelAdapter, reference: Any) -> DecodeStats:
    """Check every draft of a model. reference: as `save_checkpoint_with_head` returns it."""
    total = DecodeStats()
    for recipe in (Recipe((SHIPPED,)), Recipe((LOOKUP, SHIPPED))):
        full = FullModel(model.model)  # type: ignore[attr-defined]
        stats, rounds = recorded(model, full, recipe, PROMPTS, 16, [])
        total += stats
        for found in rounds:
            expected = draft_by_definition(reference, found.history, len(found.chain))
            assert found.chain == expected, (model.spec.family, recipe.shape)
    return total


def check_shipped_law(siblings: Siblings | None = None) -> Law:
    """Check that every sampled text has the full model's probability."""
    model, _ = shipped_world("deepseek_v3", vocab_size=FEW)
    spec = SHIPPED.model_copy(update={"draft_length": 2, "siblings": siblings})
    full = FullModel(model.model)  # type: ignore[attr-defined]
    return check_law(Decoder(model, Recipe((spec,))), full, (2, 0, 2, 0), 4, Warp(1.3, top_k=2))
