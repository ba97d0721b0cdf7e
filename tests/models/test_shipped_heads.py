"""Whether a checkpoint ships draft heads, by the names of its tensors."""

from __future__ import annotations

import pytest

from skipsearch.models.loading.shipped_heads import has_head_tensors, ships_draft_head

LAYERS = 4
OWN = ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",  # Qwen3-Next, Qwen3.5
        "model.mtp.layers.0.enorm.weight",
        "model.layers.4.eh_proj.weight",  # DeepSeek-V3, GLM-4.5: after the last layer
        "blk.4.nextn.eh_proj.weight",  # GGUF
    ],
)
def test_a_head_is_found_by_the_names_of_its_tensors(name: str) -> None:
    assert not has_head_tensors(OWN, LAYERS)
    assert has_head_tensors([*OWN, name], LAYERS)


def test_models_without_a_head() -> None:
    assert not ships_draft_head("demo", 20)
    assert not ships_draft_head("synthetic:4x256", 4)
