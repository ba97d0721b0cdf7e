"""Weights of a draft's own: where they go, what they leave alone, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.modules import (
    SMALL_MASK,
    make_card,
    module_folder,
    noisy_copies,
    noisy_low_rank_changes,
    save_adapted,
)
from helpers.tiny import tiny_llama, tiny_model_and_reference, use_engine
from models.tiny import new_hf_model

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.trained.module_weights import (
    apply_module,
    load_drafting_model,
    merge_low_rank,
)
from skipsearch.engine import forward
from skipsearch.engine.on_same_engine import base_adapter, overlay_weights
from skipsearch.errors import ModuleError
from skipsearch.models import ModelAdapter, adapt, weight_overlay
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.kv_cache import Planner

TOKENS = torch.tensor([[5, 17, 40, 3, 22, 5]])


@torch.no_grad()
def logits(model: ModelAdapter, mask: SkipMask | None = None) -> torch.Tensor:
    cache, planner = model.new_cache(1, 8), Planner(8, torch.device("cpu"))
    return forward(model, TOKENS, cache, planner.plan_chain(0, 6), mask)


@pytest.mark.parametrize(
    "engine", ["hf", "lean", "graph", "native", "native-8bit-float-activations"]
)
def test_copies_that_nobody_changed_are_the_plain_mask(engine: str) -> None:
    with use_engine(engine):
        model, _ = tiny_model_and_reference()
    same = apply_module(
        model, make_card(model, SMALL_MASK), noisy_copies(model, SMALL_MASK, 0.0), "x"
    )
    torch.testing.assert_close(
        logits(same, SMALL_MASK), logits(model, SMALL_MASK), rtol=0, atol=1e-12
    )


def own_weights(model: ModelAdapter) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for i, kind in weight_overlay.kept_sublayers(SMALL_MASK)
        for name, weight in weight_overlay.get_sublayer_weights(
            base_adapter(model), i, kind
        ).items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [None, 2])
def test_every_engine_drafts_alike_with_the_same_module_and_the_model_itself_stays_as_it_was(
    rank: int | None,
) -> None:
    model, _ = tiny_model_and_reference()
    tensors = (
        noisy_low_rank_changes(model, SMALL_MASK, rank, 0.1)
        if rank
        else noisy_copies(model, SMALL_MASK, 0.3)
    )
    drafts = []
    for engine in ("hf", "lean", "graph", "native"):
        with use_engine(engine):
            base, _ = tiny_model_and_reference()
        before = logits(base).clone()
        held = {name: weight.clone() for name, weight in own_weights(base).items()}
        drafts.append(
            logits(apply_module(base, make_card(base, SMALL_MASK, rank), tensors, "x"), SMALL_MASK)
        )
        assert torch.equal(logits(base), before)
        assert all(torch.equal(weight, held[name]) for name, weight in own_weights(base).items())
        assert (drafts[-1] - logits(base, SMALL_MASK)).abs().max() > 1e-3
    for other in drafts[1:]:
        torch.testing.assert_close(
            other, drafts[0], rtol=0, atol=1e-4
        )  # norms of Hugging Face round to float32


def test_a_low_rank_change_is_added_to_the_weight_that_it_is_for() -> None:
    model, _ = tiny_model_and_reference()
    tensors = noisy_low_rank_changes(model, SMALL_MASK, 3, 0.2)
    own = noisy_copies(model, SMALL_MASK, 0.0)
    whole = merge_low_rank(model, tensors)
    assert whole.keys() == own.keys()
    for name, weight in own.items():
        expected = (
            weight if weight.ndim == 1 else weight + tensors[f"{name}:up"] @ tensors[f"{name}:down"]
        )
        torch.testing.assert_close(whole[name], expected, rtol=0, atol=1e-12)


def test_a_file_is_read_back_as_it_was_written() -> None:
    model, _ = tiny_model_and_reference()
    tensors = noisy_copies(model, SMALL_MASK, 0.3)
    spec = save_adapted(model, SMALL_MASK, tensors, "round-trip.safetensors")
    assert spec.module.parameters == sum(t.numel() for t in tensors.values())
    found = load_drafting_model(model, spec.module, [module_folder()])
    assert torch.equal(
        logits(found, SMALL_MASK), logits(overlay_weights(model, tensors), SMALL_MASK)
    )


def refused(change: dict[str, torch.Tensor | None], mask: SkipMask = SMALL_MASK) -> str:
    model, _ = tiny_model_and_reference()
    tensors = {
        name: t
        for name, t in (noisy_copies(model, SMALL_MASK, 0.1) | change).items()
        if t is not None
    }
    with pytest.raises(ModuleError) as error:
        apply_module(model, make_card(model, mask), tensors, "x.safetensors")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"0.attn.run.q_proj.weight": torch.zeros(3, 3)},
            "0.attn.run.q_proj.weight is (32, 32) in",
        ),
        ({"0.attn.run.q_proj.weight": None}, "left out here"),
        ({"0.attn.run.z_proj.weight": torch.zeros(3, 3)}, "nothing"),
        ({"9.attn.run.q_proj.weight": torch.zeros(3, 3)}, "no sub-layer 9.attn"),
        ({"0.heart.run.q_proj.weight": torch.zeros(3, 3)}, "no sub-layer 0.heart"),
        (
            {
                "1.attn.run.q_proj.weight:down": torch.zeros(1, 32),
                "1.attn.run.q_proj.weight:up": torch.zeros(32, 1),
            },
            "disagree",
        ),
        ({"zero": torch.zeros(1)}, "does not fit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tensors_that_do_not_fit_the_model_are_refused_in_one_sentence(
    change: dict[str, torch.Tensor | None], reason: str
) -> None:
    said = refused(change)
    assert said.startswith("x.safetensors: this module does not fit")
    assert reason in said
    assert "\n" not in said


def test_a_module_for_another_mask_than_its_tensors_is_refused() -> None:
    assert "disagree" in refused({}, SkipMask(SMALL_MASK.n_layers, (1,), (0, 2)))


def test_a_module_of_another_model_is_refused() -> None:
    model = adapt(tiny_llama(layers=3))
    mask = SkipMask(3, (1,), (0,))
    other, _ = tiny_model_and_reference()
    with pytest.raises(ModuleError, match=r"a llama of 3 layers, and .* a llama of 5"):
        apply_module(other, make_card(model, mask), noisy_copies(model, mask, 0.0), "x")


def test_weights_of_interleaved_rope_keep_the_names_and_rows_of_their_modules() -> None:
    model = new_hf_model("glm4")
    whole = adapt(model)
    assert isinstance(whole, HFAdapter)
    expected = {
        name: weight.clone()
        for name, weight in weight_overlay.get_sublayer_weights(whole, 1, "attn").items()
    }
    lean = fuse_model(model, replace(whole.spec, engine="lean"), family_of(model.config))
    mine = weight_overlay.get_sublayer_weights(lean, 1, "attn", expected)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], weight) for name, weight in expected.items())
    before = logits(lean)
    torch.testing.assert_close(
        logits(weight_overlay.overlay_sublayer_weights(lean, expected)), before
    )
    other = expected | {"1.attn.run.q_proj.weight": 0.5 * expected["1.attn.run.q_proj.weight"]}
    changed = weight_overlay.overlay_sublayer_weights(adapt(new_hf_model("glm4")), other)  # type: ignore[arg-type]
    torch.testing.assert_close(
        logits(weight_overlay.overlay_sublayer_weights(lean, other)),
        logits(changed),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (logits(changed) - before).abs().max() > 1e-4
