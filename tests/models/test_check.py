"""The check at load: what drives a model is compared with the model's own forward, and what was planted is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.planted.recurrent import recurrent_state_not_restored, riding_rows_counted_twice, states_of_a_draft_verify
from torch import Tensor, nn

import skipsearch as ss
from skipsearch.cache import PassPlan
from skipsearch.errors import ModelError
from skipsearch.models import checked, loader
from skipsearch.models.check import FORK, WAYS, Finding, compared, reference
from skipsearch.models.own import OwnAdapter

from .every_class import build
from .tiny import ADAPTED, adapted, hf_model

FAMILIES = ["starcoder2", "arcee", "gpt_oss", "ministral3", "helium", "cohere2"]
WINDOWED = ["starcoder2", "gpt_oss", "ministral", "cohere2", "ministral3", "phimoe"]
RECURRENT = ["lfm2", "qwen3_5_text", "qwen3_next", "falcon_h1", "granitemoehybrid", "jamba"]
Plant = Callable[[OwnAdapter], None]


def refused(model: nn.Module, adapter: Any) -> str:
    with pytest.raises(ModelError) as caught:
        compared(adapter, reference(model, adapter.spec))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(part: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """A part of the adapter's copy returns something else; the model itself stays as it is."""
    call = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    part.forward = forward  # type: ignore[method-assign]


def a_scale_on_a_branch(adapter: OwnAdapter) -> None:
    """Another one for each feature: a norm behind the branch would take one for all out again."""
    changed(adapter._own.skeleton.layers[1].mlp, lambda out: out * torch.linspace(1, 1.05, out.shape[-1], dtype=out.dtype))


def a_bias_in_an_attention(adapter: OwnAdapter) -> None:
    changed(adapter._own.skeleton.layers[1].self_attn, lambda out: out + torch.linspace(-0.05, 0.05, out.shape[-1], dtype=out.dtype))


def positions_shifted_after_a_rollback(adapter: OwnAdapter) -> None:
    run, farthest = adapter.run, 0

    def shifted(tokens: Tensor, cache: Any, plan: PassPlan, mask: Any, last_only: bool) -> Tensor | None:
        nonlocal farthest
        back = plan.start is not None and 0 < plan.start < farthest
        farthest = plan.keys
        return run(tokens, cache, replace(plan, positions=plan.positions + 1) if back else plan, mask, last_only)

    adapter.run = shifted  # type: ignore[method-assign]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("plant", "named"), [
    (a_scale_on_a_branch, "behind layer 1"), (a_bias_in_an_attention, "behind layer 1"),
    (positions_shifted_after_a_rollback, "after a rollback")], ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_difference_is_refused_and_named(family: str, plant: Plant, named: str) -> None:
    model = build(family)
    adapter = ss.adapt(model)
    assert isinstance(adapter, OwnAdapter)
    plant(adapter)
    assert named in refused(model, adapter)
    assert ss.adapt(model).spec == adapter.spec, "the model itself was altered"


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_refused(family: str, off: int) -> None:
    """8, inside the texts of the check, and 64, which only the model's own mask shows."""
    model = build(family)
    for window in (8, 64):
        config: Any = model.config
        config.sliding_window = window
        adapter = ss.adapt(model)
        assert isinstance(adapter, OwnAdapter)
        known = reference(model, adapter.spec)
        assert any(sight.window == window for sight in known.sights or ())
        adapter.sights = [replace(sight, window=sight.window + off) if sight.window else sight for sight in adapter.sights]
        with pytest.raises(ModelError, match="otherwise than its own forward") as caught:
            compared(adapter, known)
        assert window == 8 or f"a window of {window + off}" in str(caught.value)


def test_a_sink_left_out_is_refused() -> None:
    model = build("gpt_oss")
    adapter = ss.adapt(model)
    assert isinstance(adapter, OwnAdapter)
    attention = adapter._own.skeleton.layers[0].self_attn
    attention.__dict__["_parameters"] = {**attention._parameters, "sinks": nn.Parameter(torch.full_like(attention.sinks, -1e4))}
    assert "behind layer 0" in refused(model, adapter)


@pytest.mark.parametrize("family", ["lfm2", *(pytest.param(family, marks=pytest.mark.thorough) for family in RECURRENT[1:])])
def test_a_state_that_is_not_restored_or_is_moved_twice_is_refused(family: str) -> None:
    model = build(family)
    adapter = ss.adapt(model)
    assert adapter.spec.recurrent
    for plant, named in ((recurrent_state_not_restored, "a rollback"), (riding_rows_counted_twice, "after half a rollback"),
                         (states_of_a_draft_verify, "a rollback")):
        with plant():
            assert named in refused(model, adapter)
    compared(adapter, reference(model, adapter.spec))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3_text", "gpt_neox", "phi"])
def test_what_a_row_says_wrongly_is_refused_too(name: str) -> None:
    model, adapter = hf_model(name), adapted(name)
    layer = adapter._layers[2]
    wrong = [*adapter._layers[:2], replace(layer, attn=replace(layer.attn, scale=1.05))]
    adapter._layers = wrong
    assert "behind layer 2 or in the head" in refused(model, adapter)


@pytest.mark.parametrize("name", ADAPTED)
def test_every_row_and_every_fused_model_passes(name: str) -> None:
    adapter: Any = adapted(name)
    found = compared(adapter, reference(hf_model(name), adapter.spec))
    assert list(found.differences) == list(WAYS)
    assert max(found.differences.values()) < found.tolerance < found.hidden_key
    assert found.spans or adapter.family.alibi   # whose masks hold a bias for each key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_embedded_model_passes_in_every_dtype_and_a_hidden_key_would_not(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Finding] = []
    monkeypatch.setattr(checked, "kept_finding", lambda spec: None)
    monkeypatch.setattr(checked, "keep", lambda spec, finding: kept.append(finding))
    for engine in ("hf", "lean"):
        loader.load_adapter("demo", "cpu", dtype, None, engine)
    for found in kept:
        assert max(found.differences.values()) < 0.6 * found.tolerance
        assert found.hidden_key > 1.5 * found.tolerance
    assert len(kept) == 2


def test_a_check_is_kept_for_the_same_files_and_made_again_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    asked: list[str] = []
    monkeypatch.setattr(loader, "reference", lambda model, spec: asked.append(spec.engine) or reference(model, spec))
    for engine, count in (("lean", 1), ("lean", 1), ("hf", 2), ("hf", 2)):
        loader.load_adapter("demo", "cpu", "float32", None, engine)
        assert len(asked) == count
    kept = sorted((tmp_path / "checked").iterdir())
    assert len(kept) == 2
    assert json.loads(kept[0].read_text())["tolerance"] == 2e-3
    kept[0].write_text("{")
    kept[1].write_text("{")
    loader.load_adapter("demo", "cpu", "float32", None, "lean")
    assert len(asked) == 3


def test_a_model_in_memory_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(loader, "reference", lambda model, spec: asked.append(1) or reference(model, spec))
    model = build("glm")
    ss.adapt(model)
    ss.adapt(model)
    assert len(asked) == 1


def test_rows_before_the_fork_are_the_same_in_both_texts() -> None:
    model = hf_model("llama")
    known = reference(model, ss.adapt(model).spec)
    assert torch.equal(known.tokens[0, :FORK], known.tokens[1, :FORK])
    assert known.tokens[0, FORK] != known.tokens[1, FORK]
