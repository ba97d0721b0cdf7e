"""Open a GGUF file as a model of transformers whose matrices stay in the file."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from skipsearch.models.adapter import ModelSpec
from skipsearch.models.families.table import family_of
from skipsearch.models.loading.gguf_config import (
    NORMS_PLUS_ONE,
    ROTATES_NEIGHBOURS,
    read_config,
    read_shape,
    read_token,
    rotary_factors,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile, has_magic, read_gguf
from skipsearch.models.loading.gguf_tokenizer import read_tokenizer
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.loading.quantize import GGUF_PREFIX
from skipsearch.models.loading.weight_files import hash_weight_files
from skipsearch.models.stored_linear import (
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    unpack_matrix,
)
from skipsearch.models.third_party import first_line_of, silence_transformers

SUFFIX = ".gguf"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+\-]{0,79}")  # no slash, which marks a Hub id


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file: one that begins as such files do, whatever its
    name, or a name that ends with .gguf and is no folder's.
    """
    with suppress(OSError, RuntimeError, ValueError):  # `resolve_model` names what is wrong
        path = Path(name).expanduser()
        if path.is_dir():
            return False
        if path.is_file() and has_magic(path):
            return True
    return name.lower().endswith(SUFFIX)


def name_model(file: GGUFFile) -> str:
    """Return the id of the model in a file: the file's name without its ending if it contains the
    name in the metadata, since it may say more, and otherwise that name.
    """
    # Other dots belong to the name.
    stem = file.name[: -len(SUFFIX)] if file.name.lower().endswith(SUFFIX) else file.name
    parts = [_read_name(file, key) for key in ("basename", "size_label", "finetune")]
    basename = parts[0] or _read_name(file, "name")
    if not basename or _letters_of(basename) in _letters_of(stem):
        return stem
    return "-".join(part for part in parts if part) if parts[0] else basename


def _read_name(file: GGUFFile, key: str) -> str:
    """Return a text of the metadata as a part of an id; empty if it cannot be one."""
    text = file.metadata.get(f"general.{key}")
    return text.replace(" ", "-") if isinstance(text, str) and NAME.fullmatch(text) else ""


def _letters_of(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def find_gguf(name: str) -> Path:
    """Return the path of a file. Raises: GGUFError if there is none."""
    path = Path(name).expanduser()
    with suppress(OSError):
        if path.is_file():
            return path
    raise GGUFError(f"there is no file {name}; check the path")


def read_gguf_tokenizer(name: str) -> tuple[Any, int]:
    """Return (tokenizer of a file or None, context in tokens). No matrix is read.

    Raises: GGUFError, ModelError.
    """
    file = read_gguf(find_gguf(name))
    config = read_config(file)
    family_of(config)
    return read_tokenizer(file, config.vocab_size), config.max_position_embeddings


def identify_gguf(name: str) -> tuple[str, str, int, str]:
    """Return (model id, family, number of layers, quantization) of a file, by its header.

    Raises: GGUFError.
    """
    file = read_gguf(find_gguf(name))
    return name_model(file), *read_shape(file), name_quantization(file)


def open_gguf(name: str, dtype: torch.dtype) -> LoadedModel:
    """Open a file for a CPU. No matrix is read.

    dtype: of activations, and of weights after they are unpacked.
    Raises: GGUFError, ModelError.
    """
    path = find_gguf(name)
    file = read_gguf(path)
    config = read_config(file)
    family = family_of(config)
    with silence_transformers():
        model = _build_model(file, config, dtype)
    tokenizer = read_tokenizer(file, config.vocab_size)
    return LoadedModel(model, _make_spec(file, config, dtype), family, tokenizer)


def name_quantization(file: GGUFFile) -> str:
    """Return the name of what a file holds by its most common format, such as gguf-q4_k."""
    weights: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) >= 2:
            weights[tensor.format] += math.prod(tensor.shape)
    return GGUF_PREFIX + weights.most_common(1)[0][0]


def unpack_stored_modules(model: nn.Module) -> None:
    """Read the matrices of a model, so that its own forward can run fast."""
    tables = dict[int, nn.Embedding]()  # a tied head shares the embedding's table
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, StoredEmbedding):
                table = module.unpack()
                tables[module.weight.data_ptr()] = table
                setattr(parent, name, table)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, StoredExperts):
                setattr(parent, name, module.unpack())
            if not isinstance(module, StoredLinear):
                continue
            shared = tables.get(module.matrix.data.ctypes.data)
            linear = module.unpack(None if shared is None else shared.weight)
            setattr(parent, name, linear)


class _MetaWeights(TorchFunctionMode):
    """A mode in which weights have shapes and no memory. Buffers, which are computed, have both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _build_model(file: GGUFFile, config: Any, dtype: torch.dtype) -> nn.Module:
    import gguf
    from transformers import AutoModelForCausalLM

    try:
        with _MetaWeights():
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # each family checks its config in its own way
        raise GGUFError(
            f"{file.name}: its model cannot be built ({first_line_of(error)})"
        ) from None
    architecture = file.metadata["general.architecture"]
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)

    def name_in_file(parameter: str) -> str:
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise GGUFError(f"{file.name}: {parameter} has no place in a GGUF file")
        return str(name)

    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if child == "shared_expert_gate":  # a vector in the file
            weight = file.vector(name_in_file(f"{path}.weight"), module.in_features)
            module.weight = nn.Parameter(weight[None].to(dtype), requires_grad=False)
        elif isinstance(module, nn.Linear):
            is_tied = path == "lm_head" and config.tie_word_embeddings
            source = "token_embd.weight" if is_tied else name_in_file(f"{path}.weight")
            matrix = file.matrix(source, (module.out_features, module.in_features))
            bias = None
            if module.bias is not None:
                bias = file.vector(name_in_file(f"{path}.bias"), module.out_features)
            heads = {
                "q_proj": config.num_attention_heads,
                "k_proj": config.num_key_value_heads,
            }.get(child)
            if architecture in ROTATES_NEIGHBOURS and heads:
                order = (
                    torch.arange(module.out_features).view(heads, -1, 2).transpose(1, 2).flatten()
                )
                matrix, bias = (
                    replace(matrix, row_order=order),
                    None if bias is None else bias[order],
                )
            stored: nn.Module = StoredLinear(
                matrix, None if bias is None else bias.to(dtype), dtype
            )
            setattr(model.get_submodule(parent), child, stored)
        elif isinstance(module, nn.Embedding):
            shape = (module.num_embeddings, module.embedding_dim)
            stored = StoredEmbedding(file.matrix("token_embd.weight", shape), module, dtype)
            setattr(model.get_submodule(parent), child, stored)
        elif child == "experts":
            layer = name_in_file(f"{parent}.gate.weight").removesuffix("ffn_gate_inp.weight")
            setattr(model.get_submodule(parent), child, _open_experts(file, layer, module, dtype))
    for path, weight in list(model.named_parameters()):
        # Other matrices stay in the file, and the gate of a shared expert was read above.
        if any(name in path for name in (".table.", ".experts.", ".shared_expert_gate.")):
            continue
        if weight.dim() == 2:  # a router
            shape = (weight.shape[0], weight.shape[1])
            value = unpack_matrix(file.matrix(name_in_file(path), shape), dtype)
        else:
            value = file.vector(name_in_file(path), weight.numel())
        if config.model_type in NORMS_PLUS_ONE:
            value = value - 1
        parent, _, child = path.rpartition(".")
        parameter = nn.Parameter(value.to(dtype), requires_grad=False)
        setattr(model.get_submodule(parent), child, parameter)
    _scale_rotary(file, model)
    file.require_read()
    return model.eval().requires_grad_(False)


def _open_experts(file: GGUFFile, layer: str, module: Any, dtype: torch.dtype) -> StoredExperts:
    """Return the experts of a layer. layer: the start of its tensors' names, such as `blk.3.`."""
    n, twice_width, hidden = module.gate_up_proj.shape
    gate, up, down = (
        file.stacked_matrix(f"{layer}ffn_{name}_exps.weight", (n, *shape))
        for name, shape in (
            ("gate", (twice_width // 2, hidden)),
            ("up", (twice_width // 2, hidden)),
            ("down", (hidden, twice_width // 2)),
        )
    )
    return StoredExperts(module, (gate, up), None, down, dtype)


def _scale_rotary(file: GGUFFile, model: nn.Module) -> None:
    factors = rotary_factors(file)
    if factors is None:
        return
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor):
            if frequencies.shape != factors.shape or not bool((factors > 0).all()):
                raise GGUFError(f"{file.name}: rope_freqs.weight does not fit the model")
            frequencies.div_(factors)


def _make_spec(file: GGUFFile, config: Any, dtype: torch.dtype) -> ModelSpec:
    from skipsearch.models.loading.config import parse_eos_ids
    from skipsearch.models.loading.sampling_defaults import read_from_gguf
    from skipsearch.models.loading.weight_files import hash_config

    eos = [config.eos_token_id, *_list_end_tokens(file, config.vocab_size)]
    eos_ids = [token for token in dict.fromkeys(eos) if token is not None]
    return ModelSpec(
        id=name_model(file),
        revision=None,
        family=config.model_type,
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        device=torch.device("cpu"),
        config_sha256=hash_config(config),
        eos_token_ids=parse_eos_ids(eos_ids, config.vocab_size, f"{file.name}: an end token"),
        n_devices=1,
        sampling_defaults=read_from_gguf(file.metadata),
        quantization=name_quantization(file),
        weights_sha256=hash_weight_files(file.paths),
    )


def _list_end_tokens(file: GGUFFile, vocab_size: int) -> list[int]:
    """Return the other tokens that end an answer, as llama.cpp reads them."""
    tokens = [read_token(file, name, vocab_size) for name in ("eot", "eom")]
    return [token for token in tokens if token is not None]
