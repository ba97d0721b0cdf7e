"""Write a Llama model as a GGUF file, so that llama.cpp runs the same weights.

The file has no vocabulary: llama.cpp gets token ids and returns logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.engine.native.int8 import GROUP_SIZE, quantize_q8
from skipsearch.errors import DecodeError

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
Q8_0 = "Q8_0"


def unsupported_reason(model: Any, int8: bool = False) -> str | None:
    """Return why a Hugging Face model cannot be written, as half a sentence; None if it can."""
    config = model.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama":
        return f"it is written for llama models alone, and this is a {config.model_type} model"
    if (
        rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return "its rotary angles are scaled"
    if config.hidden_act != "silu":
        return f"llama.cpp's llama has no activation {config.hidden_act}"
    if int8 and any(
        weight.ndim == 2 and weight.shape[1] % GROUP_SIZE for weight in model.parameters()
    ):
        return f"{Q8_0} takes {GROUP_SIZE} inputs together, and a matrix has another number of them"
    dtype = next(model.parameters()).dtype
    return None if dtype in TYPES else f"GGUF has no {str(dtype).removeprefix('torch.')}"


def write_gguf(model: Any, path: Path, int8: bool = False) -> None:
    """Write a LlamaForCausalLM as a GGUF file.

    Matrices keep their dtype and vectors become float32, as in llama.cpp's own converter.
    int8: matrices become Q8_0, with the same numbers and scales that engine `native` uses. An
        untied embedding keeps its dtype.

    Raises: DecodeError for an unsupported model; ImportError if the package gguf is not installed.
    """
    import gguf

    if reason := unsupported_reason(model, int8):
        raise DecodeError(f"llama.cpp cannot take part: {reason}")
    config: Any = model.config
    kind = TYPES[next(model.parameters()).dtype]
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{Q8_0}" if int8 else FILE_TYPES[kind]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():  # a tied head is not listed
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        n_heads = next((count for part, count in heads.items() if f".{part}." in name), None)
        weight = (
            weight.detach() if n_heads is None else _interleave_halves(weight.detach(), n_heads)
        )
        matrix = weight.ndim == 2 and (config.tie_word_embeddings or "embed_tokens" not in name)
        _add_tensor(writer, gguf_name, weight, Q8_0 if int8 and matrix else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_halves(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key matrix in llama.cpp's order.

    llama.cpp rotates adjacent pairs of a head, Hugging Face pairs of its first and second half.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_tensor(writer: Any, name: str, weight: Tensor, kind: str) -> None:
    """Add one tensor to the file, as Q8_0, float32 or the dtype of the model."""
    import gguf
    import numpy as np

    if kind == Q8_0:
        writer.add_tensor(name, quantise_q8_0(weight), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        return
    if weight.ndim == 1 or kind != "BF16":
        writer.add_tensor(
            name, (weight.float() if weight.ndim == 1 else weight).contiguous().numpy()
        )
        return
    raw = weight.contiguous().view(torch.uint16).numpy().view(np.uint8)  # numpy has no bfloat16
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def quantise_q8_0(weight: Tensor) -> Any:
    """Quantize a matrix [out, in] to Q8_0. Returns bytes [out, n].

    Each block of 32 inputs is a float16 scale followed by 32 int8 numbers.
    """
    numbers, scales = quantize_q8(weight)
    blocks = numbers.view(torch.uint8).unflatten(1, (-1, GROUP_SIZE))
    return (
        torch.cat([scales.half()[..., None].view(torch.uint8), blocks], dim=-1).flatten(1).numpy()
    )
