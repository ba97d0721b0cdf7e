"""What is the fused path's own: which models it takes, one copy of each weight, and masks that are
views.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.tiny import FUSED, TINY, Run, adapted, new_hf_model, some_tokens
from skipsearch.errors import ModelError
from skipsearch.models import adapt, load_adapter
from skipsearch.models.families.table import FAMILIES, family_of
from skipsearch.models.fused.causal_masks import MAX_CACHED_ROWS, MAX_HIDDEN_KEYS, CausalMaskCache
from skipsearch.models.fused.fused_adapter import FUSABLE, fuse_model, why_not_fusable
from skipsearch.models.fused.linear import MkldnnLinear, PlainLinear, pack_linear
from skipsearch.models.kv_cache import Planner


def test_a_family_that_it_takes_has_a_row_and_a_tiny_model() -> None:
    assert set(FAMILIES) > FUSABLE
    assert {tiny.family for tiny in TINY.values()} > FUSABLE


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("phi", {}, "phi models are not of its shape"),
        (
            "gemma2",
            {},
            "gemma2 models are not of its shape",
        ),  # caps its attention scores, which no fused kernel does
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "change with the length of the text",
        ),
    ],
)
def test_what_it_does_not_take_is_said(name: str, changes: dict, reason: str) -> None:
    model = new_hf_model(name, **changes)
    said = why_not_fusable(model.config, None, 1)
    assert said is not None
    assert reason in said


def test_quantised_weights_and_several_gpus_are_not_taken() -> None:
    config = new_hf_model("llama").config
    assert "quantised (torchao-8bit)" in str(why_not_fusable(config, "torchao-8bit", 1))
    assert "several GPUs" in str(why_not_fusable(config, None, 2))
    assert why_not_fusable(config, None, 1) is None


def test_asked_for_by_name_it_says_why_it_cannot(tmp_path) -> None:
    new_hf_model("phi").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"engine lean cannot drive .*phi models are not of its shape.*use --engine hf",
    ):
        load_adapter(str(tmp_path), device="cpu", dtype="float64", engine="lean")
    assert load_adapter(str(tmp_path), device="cpu", dtype="float64").spec.engine == "hf"


@pytest.mark.parametrize("name", [name.partition(":")[0] for name in FUSED])
@torch.no_grad()
def test_in_bfloat16_it_is_as_near_to_the_model_as_the_models_own_modules(name: str) -> None:
    """Some families keep rotary angles in float32 whatever their weights are.

    At a near-tie, either may choose another expert than the exact model, which changes the rest of
    a text: so several texts are compared.
    """
    exact = new_hf_model(name).bfloat16().double()
    rounded = adapt(new_hf_model(name).bfloat16())
    lean = adapt(new_hf_model(name).bfloat16(), fuse=True)
    texts = [some_tokens(20, seed) for seed in range(5)]
    expected = torch.cat([exact(text).logits[0] for text in texts])
    logits = [torch.cat([Run(model)(text) for text in texts]) for model in (rounded, lean)]
    errors = [float((one.double() - expected).abs().mean(-1).median()) for one in logits]
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "phi3", "gemma3_text"])
def test_no_weight_is_held_twice(name: str) -> None:
    """What the fused form holds is what the model held, and the model holds no matrix of a layer
    any more.
    """
    model = new_hf_model(name)
    whole = sum(w.nbytes for w in model.parameters())
    lean = fuse_model(model, adapt(model).spec, family_of(model.config))
    held: dict[int, int] = {}
    matrices = [m for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [
        lean.unembed
    ]
    for matrix in matrices:
        held[matrix.weight.data_ptr()] = matrix.nbytes
    left = {w.data_ptr(): w.nbytes for w in model.parameters() if w.ndim > 1}
    vectors = sum(w.nbytes for w in model.parameters() if w.ndim == 1)
    assert sum((held | left).values()) + vectors <= whole


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float64, PlainLinear),
        (torch.float32, (MkldnnLinear, PlainLinear)),
        (torch.bfloat16, (MkldnnLinear, PlainLinear)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["shared with an embedding", "alone"])
def test_a_layout_computes_the_product_that_it_lays_out(
    dtype: torch.dtype, kind: type, biased: bool, shared: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(24, 16, generator=generator).to(dtype),
        torch.randn(24, generator=generator).to(dtype),
    )
    matrix = pack_linear(weight, bias if biased else None, shared)
    assert not shared or matrix.weight is weight
    assert isinstance(matrix, kind)
    assert matrix.nbytes == weight.nbytes
    for rows in (1, 3, 8):
        x, h = (
            torch.randn(rows, 16, generator=generator).to(dtype),
            torch.randn(rows, 24, generator=generator).to(dtype),
        )
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), bias.double() if biased else None
        )
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(matrix(x).double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            matrix.add_to(h, x).double(), h.double() + expected, rtol=tolerance, atol=4 * tolerance
        )


def shown(mask: Tensor) -> list[list[bool]]:
    return (mask[0, 0] == 0).tolist()


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize(
    ("start", "rows"), [(0, 1), (0, 5), (7, 1), (7, 5), (100, 9), (0, 80), (20, 80)]
)
def test_a_band_shows_each_row_what_stands_before_it(
    start: int, rows: int, window: int | None
) -> None:
    bands = CausalMaskCache(torch.float32, torch.device("cpu"))
    bands.grow_to(128)
    plan = Planner(128, torch.device("cpu")).plan_chain(start, rows)
    for keys in (plan.n_keys, plan.n_keys + 5, plan.n_keys + MAX_HIDDEN_KEYS + 1):
        expected = [
            [
                key <= start + row and (window is None or key > start + row - window)
                for key in range(keys)
            ]
            for row in range(rows)
        ]
        assert shown(bands.for_plan(replace(plan, n_keys=keys), window)) == expected


def test_masks_share_one_buffer_wherever_they_start_and_whatever_their_length() -> None:
    bands, planner = (
        CausalMaskCache(torch.float32, torch.device("cpu")),
        Planner(128, torch.device("cpu")),
    )
    bands.grow_to(128)
    masks = [
        bands.for_plan(planner.plan_chain(start, rows), None)
        for start, rows in ((10, 4), (90, 4), (90, 1), (0, MAX_CACHED_ROWS))
    ]
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1


def test_a_larger_cache_asked_for_later_is_served_too() -> None:
    model = adapted("mistral-window:lean")
    for capacity in (16, 90):
        cache, planner = model.new_cache(1, capacity), Planner(capacity, torch.device("cpu"))
        tokens = torch.zeros(1, capacity, dtype=torch.long)
        h = model.embed(tokens)
        assert model.block(0, h, cache, planner.plan_chain(0, capacity)).shape == h.shape
