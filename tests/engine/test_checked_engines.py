"""The engine that decodes is compared with the one checked at load, once a model and machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import thorough
from helpers.threads import one_thread
from helpers.tiny import to_native_8bit
from models.tiny import new_hf_model
from torch import Tensor

import skipsearch as ss
from skipsearch.engine import cuda_graph
from skipsearch.engine.cuda_graph import GraphAdapter, graph_model
from skipsearch.engine.native import (
    cached_library,
    native_adapter,
    structs,
    to_native,
    to_native_if_built,
)
from skipsearch.errors import ModelError
from skipsearch.models import load_adapter, stored_checks
from skipsearch.models.check import SCENARIOS
from skipsearch.models.fused import fused_adapter
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.loading import loader

__all__ = ["one_thread"]
pytestmark = pytest.mark.xdist_group("native")

Plant = Callable[
    [structs.ModelStruct, FusedAdapter], list[Any]
]  # returns what the structs point to now


def a_norm_of_the_other_sign(model: structs.ModelStruct, lean: FusedAdapter) -> list[Any]:
    norm = lean.layers[1][0].norm
    assert norm is not None
    weight = -norm.weight.to(torch.float32)
    model.layers[1].attn_norm.weight = weight.data_ptr()
    return [weight]


def a_bias_of_the_other_sign(model: structs.ModelStruct, lean: FusedAdapter) -> list[Any]:
    matrix: Any = lean.layers[1][0].qkv
    bias = -matrix.bias_fp32
    model.layers[1].qkv.bias = bias.data_ptr()
    return [bias]


def another_layers_matrix(model: structs.ModelStruct, lean: FusedAdapter) -> list[Any]:
    model.layers[1].down = model.layers[0].down
    return []


def another_scale(model: structs.ModelStruct, lean: FusedAdapter) -> list[Any]:
    model.layers[1].scale *= 2
    return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with biases, and an empty cache of checks; the library is built
    once for all.
    """
    code = cached_library()
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "cache"))
    if code is not None:
        monkeypatch.setattr("skipsearch.engine.native.load_or_build", lambda progress: code)
    new_hf_model("qwen2").to(torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were asked what another one has to compute."""
    engines: list[str] = []
    reference_by = stored_checks.record_reference_from
    monkeypatch.setattr(
        stored_checks,
        "record_reference_from",
        lambda model: engines.append(model.spec.engine) or reference_by(model),
    )
    return engines


@pytest.mark.parametrize("dtype", ["bfloat16", *thorough("float32")])
@pytest.mark.parametrize("quantization", [None, "native-8bit"])
@pytest.mark.parametrize(
    "plant",
    [a_norm_of_the_other_sign, a_bias_of_the_other_sign, another_layers_matrix, another_scale],
)
def test_a_wrong_native_weight_is_found_at_load(
    folder: Path,
    plant: Plant,
    quantization: str | None,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = native_adapter.build_model_struct

    def planted(
        lean: FusedAdapter, kinds: list[str | None]
    ) -> tuple[structs.ModelStruct, list[Any]]:
        model, held = described(lean, kinds)
        return model, [*held, *plant(model, lean)]

    monkeypatch.setattr(native_adapter, "build_model_struct", planted)
    other = "hf" if quantization else "lean"  # what the check compares with
    way_out = "leave --quantization out" if quantization else "--engine lean"
    for _ in range(2):  # an error is not stored
        with pytest.raises(
            ModelError, match=rf"engine native otherwise than by {other}.*{way_out}"
        ):
            ss.load_model(
                str(folder), device="cpu", dtype=dtype, quantization=quantization, engine="native"
            )
    monkeypatch.setattr(native_adapter, "build_model_struct", described)
    assert (
        ss.load_model(
            str(folder), device="cpu", dtype=dtype, quantization=quantization, engine="native"
        ).spec.engine
        == "native"
    )


def test_native_is_compared_once_for_each_model_dtype_and_quantization(
    folder: Path, asked: list[str]
) -> None:
    for dtype, quantization, count in (
        ("float32", None, 1),
        ("float32", None, 1),
        ("float32", "native-8bit", 2),
        ("bfloat16", None, 3),
        ("float32", None, 3),
        ("float32", "native-8bit", 3),
    ):
        model = ss.load_model(
            str(folder), device="cpu", dtype=dtype, quantization=quantization, engine="native"
        )
        assert (model.spec.engine, len(asked)) == ("native", count)
    assert asked == ["lean", "hf", "lean"]
    fused = load_adapter(str(folder), "cpu", "float32", None, "lean")
    assert isinstance(fused, FusedAdapter)
    built = to_native_if_built(fused)  # what `auto` takes
    assert built is not None
    assert len(asked) == 3
    found = stored_checks.load_check_result(built.spec, built.library.sha256)
    assert found is not None
    assert list(found.differences) == list(SCENARIOS)
    assert stored_checks.load_check_result(built.spec, "another library") is None


def test_weights_that_nobody_knows_are_compared_every_time(asked: list[str]) -> None:
    for count in (1, 2):
        to_native(ss.adapt(new_hf_model("qwen2"), fuse=True))  # type: ignore[arg-type]
        assert len(asked) == count
    to_native_8bit(new_hf_model("qwen2"))
    assert len(asked) == 3


def test_graph_is_compared_too_and_begins_without_recordings(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = load_adapter(str(folder), "cpu", "float32", None, "lean")
    assert isinstance(fused, FusedAdapter)
    recorded = cuda_graph._CapturedPass.__call__
    passes: list[int] = []

    def noted(self: Any, tokens: Tensor, *rest: Any) -> Any:
        passes.append(tokens.shape[1])
        return recorded(self, tokens, *rest)

    monkeypatch.setattr(cuda_graph._CapturedPass, "__call__", noted)
    model = graph_model(fused)
    assert isinstance(model, GraphAdapter)
    assert len(passes) > 3, "what was compared were no recordings"
    assert not model._caches
    graph_model(fused)
    assert len(asked) == 1
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(folder / "other"))
    monkeypatch.setattr(
        cuda_graph._CapturedPass, "__call__", lambda self, *given: recorded(self, *given) * 1.01
    )
    with pytest.raises(ModelError, match="by the engine graph otherwise than by lean"):
        graph_model(fused)


def test_a_model_in_memory_that_is_taken_apart_is_compared_with_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = fused_adapter.fuse_linears
    monkeypatch.setattr(
        fused_adapter,
        "fuse_linears",
        lambda modules, order=None: replace(fused(modules, order), bias=None),
    )
    with pytest.raises(ModelError, match="otherwise than its own forward"):
        ss.adapt(new_hf_model("qwen2"), fuse=True)


def test_a_model_that_cannot_be_taken_apart_is_refused_before_its_forward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "record_reference", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(ModelError, match="cannot drive"):
        ss.adapt(new_hf_model("gpt2"), fuse=True)
