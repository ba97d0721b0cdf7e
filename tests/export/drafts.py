"""Models on disk to cut drafts out of, and the profiles that say what to leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.skip.spec import Skip
from skipsearch.profile import Profile, load_profile

GOLDEN = Path(__file__).parents[1] / "profile" / "golden"


def profile_for(model: str, family: str, mask: SkipMask, *before: DrafterSpec) -> Profile:
    """An unmeasured profile: it names no hashes, so any model of this family and depth will do.
    before: drafters asked before the mask.
    """
    golden = load_profile(GOLDEN / "v3_unmeasured.yaml")
    made_for = golden.model.model_copy(
        update={"id": model, "family": family, "n_layers": mask.n_layers}
    )
    return golden.model_copy(
        update={
            "model": made_for,
            "drafters": (*before, Skip.from_mask(mask, 5, Confidence(threshold=0.6))),
        }
    )


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def logits_of_checkpoint(folder: Path, tokens: Tensor) -> Tensor:
    """[1, T] -> [T, V], by transformers alone."""
    options: dict[str, Any] = {
        "experts_implementation": "eager"
    }  # the grouped kernels know no fp64
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, local_files_only=True, **options
    ).eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[0]
