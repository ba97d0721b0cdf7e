"""Drafts of mixtures of experts leave the full model's text as it is on every engine."""

from __future__ import annotations

import pytest
from helpers.marks import thorough
from helpers.tiny import FullModel
from helpers.tiny_experts import tiny_experts

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Siblings
from skipsearch.engine.engines import wrap_engine
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model

from .checks import Drafting, assert_partly_accepted, check_greedy

# Plain experts, experts with biases and attention sinks, and experts with a shared one.
KINDS = ("qwen3_moe", "gpt_oss", "qwen2_moe")
LAYERS = 3
PROMPTS = ((1, 2, 3), (7,), (40, 5, 5, 40, 9, 2, 11))
DRAFTINGS = (
    Drafting(SkipMask(LAYERS, (1,)), 5),
    Drafting(SkipMask(LAYERS, (1,), (2,)), 4, siblings=Siblings(below=0.9, most=2)),
)
ROUNDED = Drafting(SkipMask(LAYERS), 4, reading=Reading("int4"))  # on the engine native


def model_on(engine: str, family: str) -> ModelAdapter:
    hf = tiny_experts(family)
    if engine == "hf":
        return adapt(hf)
    return wrap_engine(fuse_model(hf, adapt(hf).spec, family_of(hf.config)), engine)


@pytest.mark.parametrize("engine", ["native", *thorough("hf", "lean")])
@pytest.mark.parametrize("family", [*KINDS, *thorough("mixtral", "olmoe")])
def test_greedy_tokens_are_the_full_models_own(family: str, engine: str) -> None:
    world = model_on(engine, family), FullModel(tiny_experts(family))
    draftings = (*DRAFTINGS, ROUNDED) if engine == "native" else DRAFTINGS
    assert_partly_accepted(check_greedy(draftings, [(prompt, 16) for prompt in PROMPTS], world))
