"""Experts: how many a model has, and how much of them a row reads."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_llama
from helpers.tiny_experts import tiny_experts
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skipsearch.engine import forward, no_grad
from skipsearch.engine.engines import wrap_engine
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.experts import FAMILIES, find_experts
from skipsearch.models.families.table import family_of
from skipsearch.models.families.unmodified import experts_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.kv_cache import Planner

from .every_class import build

TEXT = torch.tensor([[5, 17, 40, 3, 22, 5]])


@no_grad
def logits_of(model: ModelAdapter) -> torch.Tensor:
    cache, planner = model.new_cache(1, 6), Planner(6, torch.device("cpu"))
    return forward(model, TEXT, cache, planner.plan_chain(0, 6))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_experts_of_each_family_are_known(family: str) -> None:
    assert family in CONFIG_MAPPING
    experts = find_experts(build(family))
    assert experts is not None
    assert (experts.n_experts, experts.per_token) == (4, 2)


@pytest.mark.parametrize("engine", ["lean", "native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
@no_grad
def test_fused_engines_run_the_same_experts(family: str, engine: str) -> None:
    hf, unfused = tiny_experts(family), adapt(tiny_experts(family))
    model = wrap_engine(fuse_model(hf, adapt(hf).spec, family_of(hf.config)), engine)
    assert torch.allclose(logits_of(model), logits_of(unfused), atol=1e-5)
    ours, theirs = experts_of(model), experts_of(unfused)
    assert str(ours) == str(theirs)
    assert ours is not None
    assert theirs is not None
    assert ours.expert_bytes == theirs.expert_bytes
    if engine == "lean":  # panels of native have padding
        assert model.read_bytes == unfused.read_bytes
        assert model.weight_bytes == unfused.weight_bytes


def test_bytes_that_a_row_reads() -> None:
    hf = tiny_experts("mixtral")
    experts, model = find_experts(hf), adapt(hf)
    assert experts is not None
    assert str(experts) == "reads 3 of 6 experts a token"
    assert experts.expert_bytes == 8 * 3 * 32 * 32
    table = hf.get_input_embeddings().weight.nbytes
    assert model.read_bytes == model.weight_bytes - table - 3 * 3 * experts.expert_bytes
    assert experts_of(adapt(tiny_llama())) is None
