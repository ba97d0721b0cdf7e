"""Write a Llama or Mixtral model as a GGUF file, so that llama.cpp runs the same weights.

The file has no vocabulary: llama.cpp gets token ids and returns logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.engine.native.blocks import GROUP_SIZE, quantize, split_blocks
from skipsearch.errors import DecodeError

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
BITS = (8, 5, 4)  # of blocks that GGUF and the engine native both have


def unsupported_reason(model: Any, bits: int | None = None) -> str | None:
    """Return why a model cannot become a GGUF file, as a clause; None if it can.

    model: in Hugging Face's modules.
    """
    config = model.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in ("llama", "mixtral"):
        return (
            "it is written for llama and mixtral models alone, and this is a "
            f"{config.model_type} model"
        )
    if (
        rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return "its rotary angles are scaled"
    if config.hidden_act != "silu":
        return f"llama.cpp's llama has no activation {config.hidden_act}"
    if bits not in (None, *BITS):
        return f"GGUF has no blocks of {bits} bits without a minimum"
    if bits and any(
        weight.ndim >= 2 and weight.shape[-1] % GROUP_SIZE for weight in model.parameters()
    ):
        return (
            f"Q{bits}_0 takes {GROUP_SIZE} inputs together, and a matrix has another number of them"
        )
    dtype = next(model.parameters()).dtype
    return None if dtype in TYPES else f"GGUF has no {str(dtype).removeprefix('torch.')}"


def write_gguf(model: Any, path: Path, bits: int | None = None) -> None:
    """Write a LlamaForCausalLM or a MixtralForCausalLM as a GGUF file.

    Matrices keep their dtype and vectors become float32, as in llama.cpp's own converter.
    bits: 8, 5 or 4: matrices become Q8_0, Q5_0 or Q4_0, with the numbers and scales of engine
    `native`. An untied embedding keeps its dtype, and a router becomes float32.

    Raises: DecodeError for an unsupported model; ImportError if the package gguf is not installed.
    """
    import gguf

    if reason := unsupported_reason(model, bits):
        raise DecodeError(f"llama.cpp cannot take part: {reason}")
    config: Any = model.config
    kind = TYPES[next(model.parameters()).dtype]
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_Q{bits}_0" if bits else FILE_TYPES[kind]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():  # a tied head is not listed
        if ".experts." in name:
            layer = f"blk.{name.split('.')[2]}."
            parts = {"ffn_down_exps": weight.detach()}
            if name.endswith("gate_up_proj"):
                gate, up = weight.detach().chunk(2, dim=1)
                parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
            for part, matrices in parts.items():
                _add_tensor(
                    writer, f"{layer}{part}.weight", matrices, f"Q{bits}_0" if bits else kind
                )
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        n_heads = next((count for part, count in heads.items() if f".{part}." in name), None)
        weight = (
            weight.detach() if n_heads is None else _interleave_halves(weight.detach(), n_heads)
        )
        if name.endswith("mlp.gate.weight"):
            _add_tensor(writer, gguf_name, weight.float(), "F32")
            continue
        matrix = weight.ndim == 2 and (config.tie_word_embeddings or "embed_tokens" not in name)
        _add_tensor(writer, gguf_name, weight, f"Q{bits}_0" if bits and matrix else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_halves(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key matrix in llama.cpp's order.

    llama.cpp rotates adjacent values of a head together. Hugging Face rotates a value of the first
    half of a head with one of the second half.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_tensor(writer: Any, name: str, weight: Tensor, kind: str) -> None:
    """Add one tensor to the file, as Q8_0, float32 or the dtype of the model."""
    import gguf
    import numpy as np

    if kind.startswith("Q"):
        bits = int(kind[1])
        raw_dtype = gguf.GGMLQuantizationType[kind]
        rows = pack_rows(weight.flatten(0, -2), bits).reshape(*weight.shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=raw_dtype)
        return
    if weight.ndim == 1 or kind != "BF16":
        writer.add_tensor(
            name, (weight.float() if weight.ndim == 1 else weight).contiguous().numpy()
        )
        return
    raw = weight.contiguous().view(torch.uint16).numpy().view(np.uint8)  # numpy has no bfloat16
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def pack_rows(weight: Tensor, bits: int) -> Any:
    """Return a weight [out, in] in blocks of 32 as GGUF stores them: bytes [out, n].

    A block has a float16 scale and 32 numbers. With 5 bits, the fifth bits of all numbers follow
    the scale, and the other four bits come last.
    """
    numbers, scales = split_blocks(quantize(weight, bits))
    parts = [scales[..., None].view(torch.uint8)]
    if bits == 8:
        parts.append((numbers.short() - 128).to(torch.int8).view(torch.uint8))
    else:
        if bits == 5:
            fifth = (numbers >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
            parts.append(fifth.sum(dim=-1, dtype=torch.uint8))
        low = numbers & 15
        parts.append(low[..., : GROUP_SIZE // 2] | low[..., GROUP_SIZE // 2 :] << 4)
    return torch.cat(parts, dim=-1).flatten(1).numpy()
