"""Drafts that run fewer experts leave the full model's text as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from helpers.marks import thorough
from helpers.tiny import FullModel
from helpers.tiny_experts import EXPERT_FAMILIES, tiny_experts
from hypothesis import given, settings
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import draft_model
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.native import NativeAdapter
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.experts import with_fewer_experts
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model

from .checks import Drafting, assert_partly_accepted, check_greedy
from .enumeration_checks import check_law
from .sampling_checks import Warp

QUICK = ("mixtral", "qwen3_moe")  # a rule of each kind for the weights of the chosen experts
# Plain experts, experts with biases and attention sinks, and experts with a shared one.
KINDS = ("qwen3_moe", "gpt_oss", "qwen2_moe")
LAYERS = 3
PROMPTS = ((1, 2, 3), (7,), (40, 5, 5, 40, 9, 2, 11))
ALL = SkipMask(LAYERS)
DRAFTINGS = (
    Drafting(ALL, 5, reading=Reading(experts=1)),
    Drafting(ALL, 7, reading=Reading(experts=2)),
    Drafting(ALL, 4, siblings=Siblings(below=0.9, most=2), reading=Reading(experts=1)),
    Drafting(SkipMask(LAYERS, (1,), (2,)), 3, reading=Reading(experts=2)),
)


def model_on(engine: str, family: str, seed: int = 0) -> ModelAdapter:
    hf = tiny_experts(family, seed)
    if engine == "hf":
        return adapt(hf)
    return wrap_engine(fuse_model(hf, adapt(hf).spec, family_of(hf.config)), engine)


def check_fewer_experts(
    family: str, draftings: Sequence[Drafting] = DRAFTINGS, engine: str = "hf"
) -> DecodeStats:
    """Check greedy text; some drafts must be accepted and some rejected."""
    world = model_on(engine, family), FullModel(tiny_experts(family))
    total = check_greedy(draftings, [(prompt, 16) for prompt in PROMPTS], world)
    assert_partly_accepted(total)
    return total


@pytest.mark.parametrize(
    "family", [*QUICK, *thorough(*(name for name in EXPERT_FAMILIES if name not in QUICK))]
)
def test_greedy_tokens_are_the_full_models_own(family: str) -> None:
    check_fewer_experts(family)


@pytest.mark.parametrize("engine", ["native", *thorough("lean")])
@pytest.mark.parametrize("family", [*KINDS, *thorough("mixtral", "olmoe")])
def test_on_other_engines_too(family: str, engine: str) -> None:
    rounded = Drafting(ALL, 4, reading=Reading("int8", experts=2))
    check_fewer_experts(family, (*DRAFTINGS, *((rounded,) if engine == "native" else ())), engine)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_the_check_fails_if_the_verify_pass_runs_the_experts_of_the_draft(family: str) -> None:
    def in_place(module: Any, per_token: int) -> Any:
        for part in module.modules():
            if hasattr(part, "top_k"):
                part.top_k = per_token
        return module

    with patch.object(draft_model, "with_fewer_experts", in_place), pytest.raises(AssertionError):
        check_fewer_experts(family, DRAFTINGS[:1])
    assert draft_model.with_fewer_experts is with_fewer_experts


def test_the_check_fails_if_the_kernels_verify_with_fewer_experts() -> None:
    model = model_on("native", "mixtral")
    assert isinstance(model, NativeAdapter)
    fewer = NativeAdapter(model.fused_model.with_fewer_experts(1), model.library)
    full = FullModel(tiny_experts("mixtral"))
    with pytest.raises(AssertionError):
        check_greedy([Drafting(DRAFTINGS[3].mask, 3)], [(p, 16) for p in PROMPTS], (fewer, full))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_sampled_texts_have_the_full_models_probabilities(family: str) -> None:
    hf = tiny_experts(family, vocab=6, layers=2)
    skip = Skip.from_mask(SkipMask(2), 2, make_exit("fixed"), None, Reading(experts=1))
    law = check_law(
        Decoder(adapt(hf), Recipe((skip,))), FullModel(hf), (1, 4), 3, Warp(1.3, top_k=3)
    )
    assert 0 < law.accepted < law.drafted


ENGINES = ("hf", "lean", "native")


@cache
def world_of(engine: str, family: str, seed: int) -> tuple[ModelAdapter, FullModel]:
    return model_on(engine, family, seed), FullModel(tiny_experts(family, seed))


@st.composite
def draftings(draw: st.DrawFn, engine: str) -> Drafting:
    layers = st.lists(st.integers(0, LAYERS - 1), max_size=2, unique=True)
    return Drafting(
        SkipMask(LAYERS, tuple(draw(layers)), tuple(draw(layers))),
        draw(st.integers(1, 8)),
        draw(st.sampled_from(["fixed", "confidence"])),
        siblings=draw(st.sampled_from([None, Siblings(below=0.9, most=2)])),
        reading=Reading(
            draw(st.sampled_from(["stored", "int8", "int4"] if engine == "native" else ["stored"])),
            draw(st.sampled_from([None, Vocabulary(lowest=20, tokens="30-40")])),
            experts=draw(st.integers(1, 2)),
        ),
    )


def fuzz(engine: str, family: str, n_requests: int, seeds: int) -> DecodeStats:
    """Check greedy text of random requests; return what drafting did in all of them."""
    total = DecodeStats()

    @given(
        drafting=draftings(engine),
        prompt=st.lists(st.integers(0, 47), min_size=1, max_size=8),
        seed=st.integers(0, seeds - 1),
    )
    @settings(max_examples=n_requests, deadline=None)
    def check(drafting: Drafting, prompt: list[int], seed: int) -> None:
        nonlocal total
        total += check_greedy([drafting], [(tuple(prompt), 12)], world_of(engine, family, seed))

    check()
    return total


def test_fuzz() -> None:
    total = DecodeStats()
    for engine, family in (("hf", "mixtral"), ("native", "gpt_oss"), ("native", "qwen2_moe")):
        total += fuzz(engine, family, 3, seeds=2)
    assert_partly_accepted(total)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_that_holds_of_thousands_of_requests(engine: str) -> None:
    """Run it by hand: `pytest -m slow tests/decoding/test_fewer_experts.py -s`."""
    for family in EXPERT_FAMILIES:
        total = fuzz(engine, family, 400, seeds=4)
        assert_partly_accepted(total)
        print(f"\n{engine}, {family}: {total.drafted} drafted, {total.accepted} accepted", end="")


def test_requests_of_a_batch_get_the_full_models_own_tokens() -> None:
    model, full = adapt(tiny_experts("mixtral")), FullModel(tiny_experts("mixtral"))
    results = DRAFTINGS[3].decoder(model).generate_batch([Request(p, 12) for p in PROMPTS])
    assert [r.tokens for r in results] == [full.greedy(prompt, 12) for prompt in PROMPTS]
    total = results[0].stats
    for result in results[1:]:
        total += result.stats
    assert_partly_accepted(total)
