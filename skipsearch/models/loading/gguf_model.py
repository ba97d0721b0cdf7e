"""Open a GGUF file as a model of transformers whose matrices stay in the file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from skipsearch.models.adapter import ModelSpec
from skipsearch.models.experts import name_input_weight
from skipsearch.models.families.table import family_of
from skipsearch.models.loading.config import find_context_length, parse_eos_ids
from skipsearch.models.loading.gguf_architectures import Source
from skipsearch.models.loading.gguf_architectures.shared import list_numbers
from skipsearch.models.loading.gguf_config import (
    read_architecture,
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
    StackedLinear,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
)
from skipsearch.models.third_party import first_line_of, silence_transformers

SUFFIX = ".gguf"
# Of parameters of transformers.
LAYER = re.compile(r"[\w.]+?\.(?:layers|h|blocks)\.(\d+)\.(.+)")
UNPACKED_MODULES = (".dt_proj",)  # small matrices that modules multiply themselves
HEADS = ("lm_head", "embed_out")
TABLE = "token_embd.weight"
# Weights of modules that read them from the file.
IN_STORED_MODULES = (
    ".table.weight",
    ".module.gate_up_proj",
    ".module.up_proj",
    ".module.down_proj",
)
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


def read_gguf_tokenizer(name: str) -> tuple[Any, int | None]:
    """Return (tokenizer of a file or None, context in tokens). No matrix is read.

    Raises: GGUFError, ModelError.
    """
    file = read_gguf(find_gguf(name))
    config = read_config(file)
    family_of(config)
    return read_tokenizer(file, config.vocab_size), find_context_length(config)


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
    from transformers import AutoModelForCausalLM

    try:
        with _MetaWeights():
            model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=family_of(config).attn_implementation
            )
    except Exception as error:  # each family checks its config in its own way
        raise GGUFError(
            f"{file.name}: its model cannot be built ({first_line_of(error)})"
        ) from None
    _fill(model, _ParameterReader(file, config, dtype))
    _scale_rotary(file, model)
    file.require_read(config.num_hidden_layers)
    model.stored_head = StoredHead(file, dtype)
    return model.eval().requires_grad_(False)


def _fill(
    model: nn.Module, reader: _ParameterReader, find_name: Callable[[str], str] = lambda path: path
) -> None:
    """Give a model without memory its matrices and numbers.

    find_name: of a module or parameter in the model of the file, by its path in `model`.
    """
    for path, module in list(model.named_modules()):
        stored = reader.open_module(find_name(path), module)
        if stored is not None:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, stored)
    for path, value in list(model.state_dict(keep_vars=True).items()):
        if path.endswith(IN_STORED_MODULES):
            continue
        parent, _, child = path.rpartition(".")
        name = find_name(path.replace(".experts.module.", ".experts."))
        numbers = reader.read_numbers(name, value.shape)
        if isinstance(value, nn.Parameter):
            numbers = nn.Parameter(numbers.to(reader.dtype), requires_grad=False)
        setattr(model.get_submodule(parent), child, numbers)


@dataclass
class StoredHead:
    """The first draft head of a file, which is the layer after the model's last one."""

    file: GGUFFile
    dtype: torch.dtype
    # Makes the modules that read matrices from the file run fast.
    finish: Callable[[nn.Module], None] = unpack_stored_modules

    def has_head(self, n_layers: int) -> bool:
        """Return whether the file has one. n_layers: of the model."""
        return f"blk.{n_layers}.nextn.eh_proj.weight" in self.file.tensors

    def load(self, model: Any, make_head: Callable[[], Any]) -> nn.Module:
        """Return the head. make_head: makes transformers' `MtpModel` of one layer of the model.

        Raises: GGUFError.
        """
        from transformers.initialization import no_init_weights, no_tie_weights

        config = model.config.get_text_config()
        n = config.num_hidden_layers
        if not self.has_head(n):
            raise GGUFError(f"{self.file.name} has no tensors of a draft head")
        # The head shares modules with the model, and these have their weights already.
        with no_init_weights(), no_tie_weights(), _MetaWeights():
            head = make_head()
        layer = f"model.layers.{n}"
        has_norm = f"blk.{n}.nextn.shared_head_norm.weight" in self.file.tensors
        names = {
            "mtp_block": layer,
            **{name: f"{layer}.nextn.{name}" for name in ("enorm", "hnorm", "eh_proj")},
            "post_norm": f"{layer}.nextn.shared_head_norm" if has_norm else "model.norm",
        }

        def find_name(path: str) -> str:
            part, dot, ending = path.partition(".")
            return names.get(part, part) + dot + ending

        _fill(head.layers[0], _ParameterReader(self.file, config, self.dtype, n + 1), find_name)
        self.finish(head.layers[0])
        loaded: nn.Module = head
        return loaded


@dataclass
class _ParameterReader:
    """Reads the parameters of a model, by their names in transformers, from a file."""

    file: GGUFFile
    config: Any
    dtype: torch.dtype
    n_layers: int = 0  # that have names; 0: those of the model

    @cached_property
    def names(self) -> Any:
        """What `gguf` knows of the names of tensors."""
        import gguf

        name = self.file.metadata["general.architecture"]
        code = next(code for code, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        return gguf.get_tensor_name_map(code, self.n_layers or self.config.num_hidden_layers)

    def find_layer(self, path: str) -> int:
        """Return the number of the layer that a module is in. Raises: GGUFError."""
        match = LAYER.fullmatch(path)
        if match is None:
            raise GGUFError(f"{self.file.name} has no layer for {path} of its model")
        return int(match[1])

    def find_source(self, parameter: str) -> Source:
        """Return the tensors of a parameter, with their whole names. Raises: GGUFError."""
        layer, ending = "", parameter
        if (match := LAYER.fullmatch(parameter)) is not None:
            layer, ending = f"blk.{match[1]}.", match[2]
        for source in read_architecture(self.file).sources.get(ending, ()):
            tensors = tuple(layer + name for name in source.tensors)
            if all(name in self.file.tensors for name in tensors):
                return replace(source, tensors=tensors)
        if ending.startswith("nextn."):
            return Source((layer + ending,))
        name = self.names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise GGUFError(f"{self.file.name} has no tensor for {parameter} of its model")
        return Source((str(name),))

    def open_module(self, path: str, module: Any) -> nn.Module | None:
        """Return what reads the matrices of a module from the file when they are needed.

        None: they are read as numbers. Raises: GGUFError.
        """
        if isinstance(module, nn.Embedding):
            shape = (module.num_embeddings, module.embedding_dim)
            name = self.find_source(f"{path}.weight").tensors[0]
            return StoredEmbedding(self.file.matrix(name, shape), module, self.dtype)
        if path.endswith(".experts"):
            return self._open_experts(path, module)
        linear_shape = _find_linear_shape(module)
        if linear_shape is None or linear_shape[0] == 1 or path.endswith(UNPACKED_MODULES):
            return None
        outputs, inputs = linear_shape
        is_tied = path in HEADS and self.config.tie_word_embeddings
        source = Source((TABLE,)) if is_tied else self.find_source(f"{path}.weight")
        if len(source.tensors) > 1:
            return self._stack(source, outputs, inputs) if module.bias is None else None
        first, total = source.part(self.config) if source.part is not None else (0, outputs)
        matrix = replace(
            self.file.matrix(source.tensors[0], (total, inputs)).take_rows(first, outputs),
            row_order=source.rows and source.rows(self.config, outputs),
            column_order=source.columns and source.columns(self.config, inputs),
        )
        bias = None
        if module.bias is not None:
            bias = self.read_numbers(f"{path}.bias", (outputs,)).to(self.dtype)
        return StoredLinear(matrix, bias, self.dtype)

    def _stack(self, source: Source, outputs: int, inputs: int) -> StackedLinear | None:
        """Return a matrix that several tensors make; None: they are joined by numbers."""
        if source.join is not None:
            return None
        rows = [self.file.tensors[name].shape[0] for name in source.tensors]
        if sum(rows) != outputs:
            return None  # `read_numbers` says what is wrong
        matrices = [
            self.file.matrix(name, (n, inputs))
            for name, n in zip(source.tensors, rows, strict=True)
        ]
        return StackedLinear(
            [StoredLinear(matrix, None, self.dtype) for matrix in matrices],
            source.rows and source.rows(self.config, outputs),
        )

    def _open_experts(self, path: str, module: Any) -> StoredExperts:
        n, twice_width, hidden = getattr(module, name_input_weight(module)).shape
        if module.is_transposed:
            hidden, twice_width = twice_width, hidden
        width = twice_width // 2 if module.has_gate else twice_width
        layer = f"blk.{self.find_layer(path)}.ffn_"
        order = None
        if (fused := f"{layer}gate_up_exps.weight") in self.file.tensors:
            gate_up = [self.file.stacked_matrix(fused, (n, twice_width, hidden))]
            order = torch.arange(n * twice_width).view(n, 2, width).transpose(0, 1).flatten()
        else:
            gate_up = [
                self.file.stacked_matrix(f"{layer}{name}_exps.weight", (n, width, hidden))
                for name in (("gate", "up") if module.has_gate else ("up",))
            ]
        down = self.file.stacked_matrix(f"{layer}down_exps.weight", (n, hidden, width))
        return StoredExperts(module, tuple(gate_up), order, down, self.dtype)

    def read_numbers(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter or a buffer in float32. Raises: GGUFError."""
        source = self.find_source(parameter)
        if source.key is not None:
            return self._read_setting(parameter, source.key, shape)
        if source.part is not None:
            first, total = source.part(self.config)
            whole = self.file.tensor(source.tensors[0], (total, *shape[1:]))
            return whole[first : first + shape[0]]
        if len(source.tensors) == 1:
            parts = [self.file.tensor(source.tensors[0], shape)]
        else:
            shapes = [self.file.tensors[name].shape for name in source.tensors]
            parts = [
                self.file.tensor(name, own)
                for name, own in zip(source.tensors, shapes, strict=True)
            ]
        try:
            numbers = torch.cat(parts) if source.join is None else source.join(parts)
        except (IndexError, RuntimeError):
            raise GGUFError(
                f"{self.file.name}: the tensors {' and '.join(source.tensors)} do not fit "
                "together; download the file again"
            ) from None
        if numbers.shape != shape:
            raise GGUFError(
                f"{self.file.name}: the tensors {' and '.join(source.tensors)} make "
                f"{list(numbers.shape)}, and its model needs {list(shape)}; download the file again"
            )
        if source.rows is not None:
            numbers = numbers[source.rows(self.config, shape[0])]
        is_norm = source.tensors[0].endswith("norm.weight")
        if (
            is_norm
            and read_architecture(self.file).norms_plus_one
            and "ssm_" not in source.tensors[0]
        ):
            numbers = numbers - 1
        return numbers

    def _read_setting(self, parameter: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return the number of a layer in a list of the metadata. Raises: GGUFError."""
        number = list_numbers(self.file, key, self.config.num_hidden_layers)[
            self.find_layer(parameter)
        ]
        if not isinstance(number, float) or not math.isfinite(number):
            raise GGUFError(f"{self.file.name}: {key} has to hold numbers; download the file again")
        return torch.full(shape, number)


def _find_linear_shape(module: Any) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a linear module; None for another module."""
    from transformers.pytorch_utils import Conv1D  # has its weight transposed

    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return (module.out_features, module.in_features) if isinstance(module, nn.Linear) else None


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
        context_length=find_context_length(config),
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
