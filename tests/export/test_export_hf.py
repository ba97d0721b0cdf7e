"""Whole layers out: transformers, loading the exported folder, computes what a draft pass
computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import in_turn
from models.tiny import LAYERS, TINY, hf_model, logits_without, new_hf_model, some_tokens
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ExportError
from skipsearch.export import export_draft

from .drafts import logits_of_checkpoint, profile_for, saved

TOKENS = some_tokens(20)  # longer than the windows of 8
REFUSED = {"gemma3": "it is the text part of a model that also sees images"}


def exported(name: str, layers: tuple[int, ...], folder: Path, model: Any = None) -> Path:
    source = saved(model or hf_model(name), folder / "model")
    profile = profile_for(str(source), TINY[name].family, SkipMask.from_layers(LAYERS, layers))
    export_draft(profile, str(source), folder / "draft")
    return folder / "draft"


@pytest.mark.parametrize(
    ("name", "layers"), in_turn(sorted(TINY.keys() - REFUSED), [(1,), (0,), (0, 2)])
)
def test_the_checkpoint_computes_what_the_draft_does(
    name: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    draft = exported(name, layers, tmp_path)
    expected = logits_without(name, TOKENS, SkipMask.from_layers(LAYERS, layers))
    torch.testing.assert_close(logits_of_checkpoint(draft, TOKENS), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_cannot_lose_a_layer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=REFUSED[name]):
        exported(name, (1,), tmp_path)
    assert not (tmp_path / "draft").exists()


def test_a_model_whose_layers_compute_by_their_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="divides attention scores by the number of the layer"):
        exported("gpt2", (1,), tmp_path, new_hf_model("gpt2", scale_attn_by_inverse_layer_idx=True))


def test_a_base_model_saved_by_itself_names_its_layers_without_a_prefix(tmp_path: Path) -> None:
    draft = exported("gpt2", (1,), tmp_path, hf_model("gpt2").transformer)
    expected = logits_without("gpt2", TOKENS, SkipMask.from_layers(LAYERS, (1,)))
    torch.testing.assert_close(logits_of_checkpoint(draft, TOKENS), expected, rtol=1e-9, atol=1e-9)


def test_the_kinds_of_layers_are_written_down_where_the_config_meant_a_pattern(
    tmp_path: Path,
) -> None:
    """Hub configs of Gemma 2 say nothing: every other layer, by number, has a window."""
    source = saved(hf_model("gemma2"), tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    del config["layer_types"]
    (source / "config.json").write_text(json.dumps(config))
    mask = SkipMask.from_layers(LAYERS, (0,))
    export_draft(profile_for(str(source), "gemma2", mask), str(source), tmp_path / "draft")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["layer_types"] == [
        "full_attention",
        "sliding_attention",
    ]
    torch.testing.assert_close(
        logits_of_checkpoint(tmp_path / "draft", TOKENS),
        logits_without("gemma2", TOKENS, mask),
        rtol=1e-9,
        atol=1e-9,
    )
    assert (
        "tells layers with a sliding window by their number"
        in (tmp_path / "draft" / "README.md").read_text()
    )


@pytest.mark.parametrize(("layers", "first"), [((0,), 0), ((1,), 1)])
def test_a_number_of_first_layers_counts_those_that_are_left(
    layers: tuple[int, ...], first: int, tmp_path: Path
) -> None:
    """Of Qwen 2's layers the first one has no window here. Transformers goes by layer_types; others
    go by this.
    """
    assert (
        json.loads((exported("qwen2", layers, tmp_path) / "config.json").read_text())[
            "max_window_layers"
        ]
        == first
    )


def test_config_keys_that_say_nothing_of_single_layers_stay_as_they_were_written(
    tmp_path: Path,
) -> None:
    draft = exported("llama", (1,), tmp_path)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "model", draft)
    )
    assert after == before | {"num_hidden_layers": LAYERS - 1}
    assert list(after) == list(before)


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    draft = exported("llama-tied", (1,), tmp_path)
    with safe_open(draft / "model.safetensors", framework="pt") as weights:
        assert not [name for name in weights.keys() if "lm_head" in name]  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(draft)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_the_dtype_that_they_are_stored_in(dtype: torch.dtype, tmp_path: Path) -> None:
    draft = exported("llama", (1,), tmp_path, new_hf_model("llama").to(dtype))
    with safe_open(draft / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {dtype}  # noqa: SIM118


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (
            SkipMask(LAYERS, (1, 2), (2,)),
            "skips the attention but not the MLP of layer 1.*--whole-layers",
        ),
        (SkipMask(LAYERS, (1,), (1, 2)), "skips the MLP but not the attention of layer 2"),
        (SkipMask.from_layers(LAYERS, range(LAYERS)), "skips all 3 layers"),
    ],
    ids=["half a layer", "the other half", "all"],
)
def test_a_mask_that_leaves_no_ordinary_checkpoint_is_refused(
    mask: SkipMask, rule: str, tmp_path: Path
) -> None:
    source = saved(hf_model("llama"), tmp_path / "model")
    with pytest.raises(ExportError, match=rule):
        export_draft(profile_for(str(source), "llama", mask), str(source), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
