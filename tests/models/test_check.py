"""The check at load: what drives a model is compared with the model's own forward, and what was
planted is found and named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.planted.recurrent import (
    recurrent_state_not_restored,
    riding_rows_counted_twice,
    states_of_a_draft_verify,
)
from helpers.marks import thorough
from torch import Tensor, nn

import skipsearch as ss
from skipsearch.errors import ModelError
from skipsearch.models import stored_checks
from skipsearch.models.check import SCENARIOS, CheckResult, _CheckRun, check_against
from skipsearch.models.generic.generic_adapter import GenericAdapter
from skipsearch.models.kv_cache import PassPlan
from skipsearch.models.loading import loader
from skipsearch.models.reference import (
    FORK_AT,
    ReferenceOutput,
    max_row_rmse,
    record_reference,
    record_reference_from,
)
from skipsearch.models.stored_checks import PACKAGE, code_hash

from .every_class import build
from .tiny import ADAPTED, adapted, hf_model

FAMILIES = ["starcoder2", "mimo_v2_flash", *thorough("arcee", "helium", "cohere2")]
WINDOWED = ["starcoder2", "mimo_v2_flash", *thorough("ministral", "cohere2", "phimoe")]
FUSED = [name for name in ADAPTED if ":" in name]
RECURRENT = ["lfm2", "qwen3_5_text", "qwen3_next", "falcon_h1", "granitemoehybrid", "jamba"]
Plant = Callable[[GenericAdapter], None]


def refused(model: nn.Module, adapter: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_against(adapter, record_reference(model, adapter.spec))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(part: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """A part of the adapter's copy returns something else; the model itself stays as it is."""
    call = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    part.forward = forward  # type: ignore[method-assign]


def a_scale_on_a_branch(adapter: GenericAdapter) -> None:
    """Another one for each feature: a norm behind the branch would take one for all out again."""
    changed(
        adapter._forward.instrumented.layers[1].mlp,
        lambda out: out * torch.linspace(1, 1.05, out.shape[-1], dtype=out.dtype),
    )


def a_bias_in_an_attention(adapter: GenericAdapter) -> None:
    changed(
        adapter._forward.instrumented.layers[1].self_attn,
        lambda out: out + torch.linspace(-0.05, 0.05, out.shape[-1], dtype=out.dtype),
    )


def positions_shifted_after_a_rollback(adapter: GenericAdapter) -> None:
    run, farthest = adapter.run, 0

    def shifted(
        tokens: Tensor, cache: Any, plan: PassPlan, mask: Any, last_only: bool
    ) -> Tensor | None:
        nonlocal farthest
        back = plan.first_slot is not None and 0 < plan.first_slot < farthest
        farthest = plan.n_keys
        return run(
            tokens,
            cache,
            replace(plan, positions=plan.positions + 1) if back else plan,
            mask,
            last_only,
        )

    adapter.run = shifted  # type: ignore[method-assign]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (a_scale_on_a_branch, "forward whole"),
        (a_bias_in_an_attention, "forward whole"),
        (positions_shifted_after_a_rollback, "after a rollback"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_difference_is_refused_and_named(family: str, plant: Plant, named: str) -> None:
    model = build(family)
    adapter = ss.adapt(model)
    assert isinstance(adapter, GenericAdapter)
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
        assert isinstance(adapter, GenericAdapter)
        known = record_reference(model, adapter.spec)
        assert any(sight.window == window for sight in known.attention_patterns or ())
        adapter.attention_patterns = [
            replace(sight, window=sight.window + off) if sight.window else sight
            for sight in adapter.attention_patterns
        ]
        with pytest.raises(ModelError, match="otherwise than its own forward") as caught:
            check_against(adapter, known)
        assert window == 8 or f"a window of {window + off}" in str(caught.value)


def test_a_sink_left_out_is_refused() -> None:
    model = build("mimo_v2_flash")
    adapter = ss.adapt(model)
    assert isinstance(adapter, GenericAdapter)
    attention = adapter._forward.instrumented.layers[1].self_attn
    attention.__dict__["_parameters"] = {
        **attention._parameters,
        "sinks": nn.Parameter(torch.full_like(attention.sinks, -1e4)),
    }
    assert "forward whole" in refused(model, adapter)


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(family, marks=pytest.mark.thorough) for family in RECURRENT[1:])],
)
def test_a_state_that_is_not_restored_or_is_moved_twice_is_refused(family: str) -> None:
    model = build(family)
    adapter = ss.adapt(model)
    assert adapter.spec.is_recurrent
    for plant, named in (
        (recurrent_state_not_restored, "a rollback"),
        (riding_rows_counted_twice, "after half a rollback"),
        (states_of_a_draft_verify, "a rollback"),
    ):
        with plant():
            assert named in refused(model, adapter)
    check_against(adapter, record_reference(model, adapter.spec))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3_text", "gpt_neox", "phi"])
def test_what_a_row_says_wrongly_is_refused_too(name: str) -> None:
    model, adapter = hf_model(name), adapted(name)
    layer = adapter._layers[2]
    wrong = [*adapter._layers[:2], replace(layer, attn=replace(layer.attn, scale=1.05))]
    adapter._layers = wrong
    assert "forward whole" in refused(model, adapter)


# `adapt` runs this check of each row whose modules drive the model, in every other test of it.
@pytest.mark.parametrize(
    "name", [*FUSED, *thorough(*(name for name in ADAPTED if name not in FUSED))]
)
def test_every_row_and_every_fused_model_passes(name: str) -> None:
    adapter: Any = adapted(name)
    found = check_against(adapter, record_reference(hf_model(name), adapter.spec))
    assert list(found.differences) == list(SCENARIOS)
    assert max(found.differences.values()) < found.tolerance < found.hidden_key
    assert found.spans or adapter.family.alibi  # whose masks hold a bias for each key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_embedded_model_passes_in_every_dtype_and_a_hidden_key_would_not(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[CheckResult] = []
    monkeypatch.setattr(stored_checks, "load_check_result", lambda *_: None)
    monkeypatch.setattr(
        stored_checks, "save_check_result", lambda spec, finding, _: kept.append(finding)
    )
    for engine in ("hf", "lean"):
        loader.load_adapter("demo", "cpu", dtype, None, engine)
    for found in kept:
        assert max(found.differences.values()) < 0.6 * found.tolerance
        assert found.hidden_key > 1.5 * found.tolerance
    assert len(kept) == 2


def test_a_check_is_kept_for_the_same_files_and_made_again_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    asked: list[str] = []
    monkeypatch.setattr(
        loader,
        "record_reference",
        lambda model, spec: asked.append(spec.engine) or record_reference(model, spec),
    )
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


@pytest.mark.parametrize(
    "changed_file",
    [
        "cache.py",
        "mask.py",
        "models/fused/fused_adapter.py",
        "engine/forward.py",
        "engine/native/native_adapter.py",
        "engine/native/src/forward.h",
        "engine/native/src/exports.cpp",
    ],
)
def test_a_kept_check_is_made_again_after_a_change_of_any_code_that_drives_a_pass(
    changed_file: str, tmp_path: Path
) -> None:
    package = tmp_path / "skipsearch"
    shutil.copytree(
        PACKAGE,
        package,
        ignore=lambda _, names: {name for name in names if name in ("demo", "__pycache__")},
    )
    before = code_hash(package)
    with (package / changed_file).open("a") as file:
        file.write("\n")
    assert code_hash(package) != before


def test_a_model_in_memory_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        loader,
        "record_reference",
        lambda model, spec: asked.append(1) or record_reference(model, spec),
    )
    model = build("glm")
    ss.adapt(model)
    ss.adapt(model)
    assert len(asked) == 1


def test_rows_before_the_fork_are_the_same_in_both_texts() -> None:
    model = hf_model("llama")
    known = record_reference(model, ss.adapt(model).spec)
    assert torch.equal(known.tokens[0, :FORK_AT], known.tokens[1, :FORK_AT])
    assert known.tokens[0, FORK_AT] != known.tokens[1, FORK_AT]


@cache
def embedded_model(dtype: str) -> tuple[Any, ReferenceOutput]:
    adapter: Any = loader.load_adapter("demo", "cpu", dtype, None, "hf")
    return adapter, record_reference_from(adapter)


@pytest.mark.parametrize(
    ("dtype", "noise", "difference", "passes"),
    [
        ("bfloat16", 0.15, 0.12, True),
        ("bfloat16", 0.08, 0.12, False),
        # MAX_TOLERANCE is 0.25; a processor's own rounding adds up to 0.02.
        ("bfloat16", 2.0, 0.22, True),
        ("bfloat16", 2.0, 0.28, False),
        ("bfloat16", 2.0, float("nan"), False),
        ("float32", 2.0, 0.01, False),
    ],
)
def test_in_16_bits_logits_may_differ_by_the_effect_of_rounding_each_layer_otherwise(
    dtype: str, noise: float, difference: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep model rounds by more than half the effect of a hidden key."""
    adapter, known = embedded_model(dtype)
    logit_std = float(known.logits.float().std())
    monkeypatch.setattr(_CheckRun, "measure_rounding_noise", lambda *_: noise * logit_std)
    moved = replace(known, logits=known.logits + difference * logit_std)
    if passes:
        result = check_against(adapter, moved)
        assert result.differences["whole"] == pytest.approx(difference, abs=0.02)
    else:
        with pytest.raises(ModelError, match="logits differ"):
            check_against(adapter, moved)


def test_the_effect_of_rounding_is_larger_in_fewer_bits_and_below_that_of_a_hidden_key() -> None:
    noises = {}
    for dtype in ("float32", "bfloat16"):
        run = _CheckRun(*embedded_model(dtype))
        noises[dtype] = run.measure_rounding_noise(torch.finfo(getattr(torch, dtype)).eps)
        assert 0 < noises[dtype] < max_row_rmse(*run.hide_one_key())
    assert 1000 * noises["float32"] < noises["bfloat16"]


def test_a_quantised_model_that_differs_is_not_sent_to_an_engine_that_cannot_run_it() -> None:
    adapter: Any = ss.load_model("demo", device="cpu", dtype="float32", quantization="native-8bit")
    known = record_reference_from(adapter)
    with pytest.raises(ModelError, match="leave --quantization out"):
        check_against(adapter, replace(known, logits=known.logits + 9, engine="hf"))
