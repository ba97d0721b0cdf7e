"""Models for drafts that read less: the same numbers as the verifying model's, for fewer tokens or
from rounded weights.
"""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.tiny import (
    LAYERS,
    NATIVE_8BIT,
    VOCAB,
    tiny_llama,
    tiny_model_and_reference,
    use_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import BITS_OF_WEIGHTS, DraftWeights, Reading, Vocabulary
from skipsearch.engine import forward, load_model, no_grad
from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.native.blocks import quantize, round_weight, split_blocks
from skipsearch.engine.reduced_model import (
    can_restrict_head,
    get_draft_copy,
    list_draft_weights,
    make_reduced_model,
    release_draft_copies,
)
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.fused.int4_linear import pack_int4, round_to_int4
from skipsearch.models.fused.linear import PlainLinear
from skipsearch.models.kv_cache import Planner

pytestmark = pytest.mark.xdist_group("native")
ENGINES = ["hf", "lean", "graph", "native", NATIVE_8BIT]
FORMATS = sorted(BITS_OF_WEIGHTS)
TEXT = (5, 17, 40, 3, 22, 5, 17)


def model_on(engine: str) -> ModelAdapter:
    with use_engine(engine):
        return tiny_model_and_reference()[0]


@no_grad
def logits_of(model: ModelAdapter, mask: SkipMask | None = None) -> Tensor:
    """The logits of all tokens of a text, [T, V]."""
    cache, planner = model.new_cache(1, len(TEXT)), Planner(len(TEXT), torch.device("cpu"))
    return forward(model, torch.tensor([TEXT]), cache, planner.plan_chain(0, len(TEXT)), mask)[0]


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.sets(st.integers(0, VOCAB - 1), max_size=40),
    added=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9), max_size=5),
)
def test_a_restricted_head_scores_its_tokens_as_the_whole_head_does(
    engine: str, weights: DraftWeights, tokens: set[int], added: list[list[int]]
) -> None:
    model = model_on(engine)
    reading = Reading(weights, Vocabulary.from_ids(tokens))
    reduced_model = make_reduced_model(model, reading)
    assert reduced_model.new_head is not None
    head = reduced_model.new_head()
    for more in added:
        head.add(more)
    ids = head.token_ids
    assert len(set(ids.tolist())) == head.count
    assert {*tokens, *(token for more in added for token in more)} <= set(ids.tolist())
    assert torch.equal(head.rows_of(ids), torch.arange(head.count))
    whole = logits_of(get_draft_copy(model, weights))[:, ids]
    restricted = logits_of(reduced_model.restrict(head))
    if engine in ("native", NATIVE_8BIT):
        assert torch.equal(restricted, whole)
    else:
        torch.testing.assert_close(restricted, whole)


def test_requests_do_not_see_each_others_tokens() -> None:
    reduced_model = make_reduced_model(
        model_on("native"), Reading("int8", Vocabulary.from_ids([1]))
    )
    assert reduced_model.new_head is not None
    first, second = reduced_model.new_head(), reduced_model.new_head()
    first.add([60, 61])
    second.add([63])
    assert not {60, 61} & set(second.token_ids.tolist())
    assert torch.equal(
        logits_of(reduced_model.restrict(second))[:, -1],
        logits_of(get_draft_copy(model_on("native"), "int8"))[:, 63],
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
def test_a_copy_computes_with_rounded_layers(weights: DraftWeights, tied: bool) -> None:
    bits = BITS_OF_WEIGHTS[weights]
    hf = tiny_llama(hidden=64)
    rounded = tiny_llama(hidden=64)
    if tied:
        hf.lm_head.weight = hf.model.embed_tokens.weight
        rounded.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.clone())
        rounded.model.embed_tokens.weight = hf.model.embed_tokens.weight
    with torch.no_grad():
        for module in rounded.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(round_weight(module.weight, bits))
    expected = logits_of(adapt(rounded))
    for engine in ("hf", "lean", "native"):
        model = adapt(hf)
        if engine != "hf":
            fused = fuse_model(hf_copy(hf), model.spec, family_of(hf.config))
            model = wrap_engine(fused, engine)
        before = logits_of(model)
        copied = logits_of(get_draft_copy(model, weights))
        assert torch.equal(logits_of(model), before)
        assert not torch.equal(copied, before)
        # The engine native rounds activations and the head, too.
        scale = float(expected.std())
        assert (
            float((copied - expected).abs().max()) < (0.2 if engine == "native" else 1e-3) * scale
        )


@pytest.mark.parametrize("weights", FORMATS)
def test_the_head_of_a_copy_has_8_bits_on_native(weights: DraftWeights) -> None:
    model = model_on("native")
    head = get_draft_copy(model, weights).fused_model.unembed.to_dense()
    assert torch.equal(head, round_weight(model.fused_model.unembed.to_dense(), 8))
    stored_in_8_bits = model_on(NATIVE_8BIT)
    copied = get_draft_copy(stored_in_8_bits, weights)
    assert copied.fused_model.unembed is stored_in_8_bits.fused_model.unembed


@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (16, 256)])
def test_matrices_in_4_bits_are_packed_for_torch_by_the_same_rule(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, :32] = 0
    numbers, scales = round_to_int4(weight)
    own_numbers, own_scales = split_blocks(quantize(weight, 4))
    assert torch.equal(numbers, own_numbers.flatten(1).int())
    assert torch.equal(scales, own_scales.float())
    bias = torch.ones(shape[0], dtype=torch.bfloat16)
    matrix = pack_int4(PlainLinear(weight, bias))
    assert torch.equal(matrix.to_dense(), round_weight(weight, 4))
    assert matrix.nbytes < weight.nbytes / 2.5
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = PlainLinear(matrix.to_dense(), bias)(x)
    assert torch.allclose(matrix(x), expected, atol=0.05, rtol=0.02)
    hidden = torch.ones_like(expected)
    assert torch.allclose(matrix.add_to(hidden, x), expected + 1, atol=0.1, rtol=0.02)
    assert torch.equal(hidden, torch.ones_like(hidden))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["lean", "graph"])
def test_on_a_gpu_a_copy_in_4_bits_has_its_own_kernel(engine: str) -> None:
    model = load_model("demo", device="cuda", dtype="bfloat16", engine=engine)
    assert list_draft_weights(model) == ("stored", "int4")
    copied = get_draft_copy(model, "int4")
    assert copied.read_bytes < 0.4 * model.read_bytes
    assert type(copied) is type(model)


def hf_copy(hf: torch.nn.Module) -> torch.nn.Module:
    """A model with the same weights, which fusing may consume."""
    other = tiny_llama(hidden=64)
    if hf.lm_head.weight is hf.model.embed_tokens.weight:  # type: ignore[union-attr]
        other.lm_head.weight = other.model.embed_tokens.weight
    other.load_state_dict(hf.state_dict())
    return other


def test_a_copy_is_made_once_and_goes_with_its_model() -> None:
    hf = tiny_llama()
    fused = fuse_model(hf, adapt(hf).spec, family_of(hf.config))
    model = wrap_engine(fused, "native")
    copied = get_draft_copy(model, "int6")
    assert get_draft_copy(model, "int6") is copied
    assert get_draft_copy(model, "stored") is model
    release_draft_copies(model, {"int4"})
    assert get_draft_copy(model, "int6") is not copied
    del copied
    gc.collect()


def test_only_formats_that_read_less_are_listed() -> None:
    assert list_draft_weights(model_on("native"))[0] == "stored"
    assert "int8" in list_draft_weights(model_on("native"))
    assert "int8" not in list_draft_weights(model_on(NATIVE_8BIT))
    assert "int4" in list_draft_weights(model_on(NATIVE_8BIT))
    assert list_draft_weights(model_on("hf")) == ("stored",)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_restricts_its_head(engine: str) -> None:
    assert can_restrict_head(model_on(engine))


@no_grad
def test_on_graph_a_model_with_few_rows_of_the_head_shares_captured_layers() -> None:
    model = model_on("graph")
    assert isinstance(model, GraphAdapter)
    reduced_model = make_reduced_model(model, Reading(vocabulary=Vocabulary.from_ids([1, 5])))
    assert reduced_model.new_head is not None
    head, mask = reduced_model.new_head(), SkipMask(LAYERS, (1,))
    restricted = reduced_model.restrict(head)
    assert isinstance(restricted, GraphAdapter)
    cache, planner = model.new_cache(1, 64), Planner(64, model.spec.device)
    prompt = torch.tensor([[3, 9, 4]])
    forward(model, prompt, cache, planner.plan_chain(0, 3))
    token = torch.tensor([[7]])
    passes = []
    for added in ((), (8,), (8, 9, 11)):  # rows that are added to the head after the capture
        head.add(added)
        logits = forward(restricted, token, cache, planner.plan_chain(3, 1), mask)
        whole = forward(model, token, cache, planner.plan_chain(3, 1), mask)
        torch.testing.assert_close(logits, whole[..., head.token_ids])
        passes.append(len(model._caches[cache].passes))
    assert passes[0] == 2, "one with the head and one without"
    assert passes == passes[:1] * 3


def test_a_token_outside_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=str(VOCAB)):
        make_reduced_model(model_on("native"), Reading(vocabulary=Vocabulary.from_ids([VOCAB])))


def test_a_model_of_another_kind_has_no_such_draft() -> None:
    class Other:
        spec = model_on("hf").spec

    with pytest.raises(ModelError, match="fewer bits or fewer tokens"):
        get_draft_copy(Other(), "int8")  # type: ignore[arg-type]


def test_a_mask_applies_to_a_copy_too() -> None:
    model = model_on("native")
    mask = SkipMask(LAYERS, (1,), (2,))
    copied = get_draft_copy(model, "int8")
    assert not torch.equal(logits_of(copied, mask), logits_of(copied))
