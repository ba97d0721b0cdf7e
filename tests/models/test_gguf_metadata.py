"""A GGUF file is read as llama.cpp reads it, or refused: no key and no tensor that would change the
text is passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from helpers.gguf_files import write_model

import skipsearch as ss
from models.tiny import new_hf_model
from skipsearch.errors import ModelError
from skipsearch.models.loading.gguf_config import read_config
from skipsearch.models.loading.gguf_file import GGUFError, can_dequantize, read_gguf
from skipsearch.models.loading.gguf_model import open_gguf

HEAD_DIM, KV_HEADS = 16, 2


def write_llama(tmp_path: Path, extra: dict[str, torch.Tensor] | None = None, **keys: Any) -> Path:
    """Write a tiny model. extra: more tensors. keys: of the architecture, with __ for a dot."""
    model = new_hf_model(
        "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=HEAD_DIM,
        num_key_value_heads=KV_HEADS, mlp_bias=False,
    ).float()  # fmt: skip
    metadata = {f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}
    write_model(model, tmp_path / "m.gguf", metadata=metadata, extra=extra)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor is 2.0, and .* only if it is 1.0"),
        ({"rope__scaling__factor": float("nan")}, "factor is nan; it has to be 1 to"),
        ({"rope__scaling__factor": -2.0}, "factor is -2; it has to be 1 to"),
        ({"rope__freq_base": 0.0}, "freq_base is 0; it has to be 1 to"),
        ({"rope__dimension_count": 8}, "dimension_count is 8; .* from 16 to 16"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "epsilon is 0; it has to be 1e-30 to 1"),
        ({"attention__value_length": 8}, "value_length is 8, and .* only if it is 16"),
        ({"attention__causal": False}, "causal is False, and .* only if it is True"),
        ({"attention__head_count_kv": [2, 1, 2]}, "head_count_kv differs from layer to layer"),
    ],
)
def test_a_key_that_would_change_the_model_is_named(
    keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match=sentence):
        read_config(read_gguf(write_llama(tmp_path, **keys)))


def test_a_model_that_sees_and_has_its_rows_in_another_order_is_refused(tmp_path: Path) -> None:
    sections = {"glm4.rope.dimension_sections": [4, 2, 2, 0]}
    write_model(new_hf_model("glm4").float(), tmp_path / "m.gguf", metadata=sections)
    with pytest.raises(GGUFError, match="the text part of a model that sees"):
        read_config(read_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["blk.0.ffn_down.bias", "blk.9.attn_q.weight", "output.bias"])
def test_a_tensor_that_no_part_of_the_model_reads_is_named(name: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path, {name: torch.ones(64)})
    with pytest.raises(GGUFError, match=f"holds the tensor {name}, which is no part"):
        open_gguf(str(path), torch.float32)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__factor": 4.0}, ("linear", 4.0)),
        ({"rope__scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope__scaling__factor": 0.0}, ("default", None)),
        ({"rope__scaling__factor": 4.0, "rope__scaling__type": "none"}, ("default", None)),
    ],
)
def test_rotary_angles_are_scaled_as_llama_cpp_scales_them(
    keys: dict[str, Any], scaling: tuple[str, float | None], tmp_path: Path
) -> None:
    rope = read_config(read_gguf(write_llama(tmp_path, **keys))).rope_parameters
    assert (rope["rope_type"], rope.get("factor")) == scaling


NUMBERS = {kind.name for kind in gguf.GGMLQuantizationType} - {
    *("I8", "I16", "I32", "I64", "F64"),  # no weights are stored in them
    *("Q8_1", "Q8_K"),  # of inputs
    "Q1_0",  # gguf cannot read it yet
}


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_format_without_kernels_is_unpacked(name: str) -> None:
    assert can_dequantize(name.lower())


def test_a_number_may_be_given_once_for_each_layer(tmp_path: Path) -> None:
    path = write_llama(tmp_path, attention__head_count_kv=[KV_HEADS] * 3)
    assert read_config(read_gguf(path)).num_key_value_heads == KV_HEADS


def test_a_context_shorter_than_the_text_of_the_check_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path, context_length=4)
    with pytest.raises(ModelError, match="names a context of 4 tokens"):
        ss.load_model(str(path), device="cpu", engine="hf", dtype="float32")
