"""The check at load of a model that enlarges rounding, as Gemma 3 does: norms with large weights
and many layers. It passes with rounded inputs, and no wrong kernel or weight passes with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import write_model

import skipsearch as ss
from models.tiny import new_hf_model
from skipsearch.errors import ModelError
from skipsearch.models.check import check_against
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.loading.gguf_model import open_gguf
from skipsearch.models.reference import TOLERANCE, ReferenceOutput, record_reference_from

pytestmark = pytest.mark.xdist_group("native")
LAYERS = 24


def write_gemma(path: Path, scale: float = 1.0) -> Path:
    """Write a random model. scale: a factor of one norm before an MLP."""
    model = new_hf_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        head_dim=16,
        num_hidden_layers=LAYERS,
        layer_types=None,
        final_logit_softcapping=None,
        sliding_window=8,
        query_pre_attn_scalar=16,
        tie_word_embeddings=True,
    ).float()
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.copy_(2 * torch.randn(weight.shape, generator=generator).abs())
            if name == "model.layers.3.post_feedforward_layernorm.weight":
                weight.copy_((weight + 1) * scale - 1)
    write_model(model, path, "Q8_0")
    return path


def record(path: Path) -> ReferenceOutput:
    loaded = open_gguf(str(path), torch.float32)
    return record_reference_from(
        HFAdapter(loaded.model, loaded.spec, loaded.family, loaded.tokenizer)
    )


def load(path: Path, activations: str = "int8") -> Any:
    """Load a model, which is checked on the way, for the kernels of the check."""
    options: Any = {"device": "cpu", "dtype": "float32", "engine": "native"}
    model: Any = ss.load_model(str(path), activations=activations, **options)
    model.use_activations("int16" if activations == "int8" else activations)
    return model


def test_rounded_inputs_pass_and_wrong_kernels_and_weights_do_not(tmp_path: Path) -> None:
    path = write_gemma(tmp_path / "sound.gguf")
    reference = record(path)
    model = load(path)
    result = check_against(model, reference)
    rounding = max(result.differences.values())
    assert 2 * TOLERANCE[torch.float32] < rounding < result.tolerance < result.hidden_key / 2
    # The kernels lose no digits: without rounding, the same passes come close.
    exact = check_against(load(path, "float"), reference)
    assert max(exact.differences.values()) < rounding / 20
    model.use_activations("int8")  # as if a kernel lost the lower half of an input
    with pytest.raises(ModelError, match="logits differ by"):
        check_against(model, reference)
    wrong = load(write_gemma(tmp_path / "wrong.gguf", scale=1.1))
    with pytest.raises(ModelError, match="logits differ by"):
        check_against(wrong, reference)
