"""Make a `ModelAdapter` from a name or from a model in memory.

Each error is one plain sentence. Weights are read from safetensors files, or from PyTorch files
with `weights_only`. No code that comes with a model is ever run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from skipsearch.errors import ModelError
from skipsearch.models import synthetic
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.check import CheckableAdapter, check_against
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.families.table import Family, family_of
from skipsearch.models.fingerprint import forward_fingerprint, refuse_foreign_code
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model, why_not_fusable
from skipsearch.models.loading.config import (
    check_special_tokens,
    find_context_length,
    load_config,
    parse_eos_ids,
    read_generation_config,
)
from skipsearch.models.loading.config_check import check_config_matches_weights
from skipsearch.models.loading.gguf_model import (
    is_gguf,
    open_gguf,
    read_gguf_tokenizer,
    unpack_stored_modules,
)
from skipsearch.models.loading.hub import resolve_model
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.loading.model_files import find_model_file
from skipsearch.models.loading.placement import (
    choose_placement,
    out_of_memory,
    pick_device,
    pick_dtype,
    reject_offload,
)
from skipsearch.models.loading.pretrained import has_tokenizer, read_tokenizer, read_weights
from skipsearch.models.loading.quantize import (
    NATIVE_QUANTIZATIONS,
    is_native_quantization,
    make_quantization_config,
    name_with_activations,
    read_stored_quantization,
)
from skipsearch.models.loading.sampling_defaults import read_from_generation_config
from skipsearch.models.loading.weight_files import (
    StoredTensor,
    hash_config,
    hash_weight_files,
    list_stored_tensors,
    list_weight_files,
)
from skipsearch.models.memory import memory_errors_reported
from skipsearch.models.reference import record_reference
from skipsearch.models.stored_linear import list_stored_matrices
from skipsearch.models.third_party import first_line_of, silence_transformers

if TYPE_CHECKING:
    from skipsearch.models.generic.generic_adapter import GenericAdapter


# Model in memory -> its fingerprint at the time of its check.
_CHECKED: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


def load_adapter(
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    engine: str = "auto",
) -> ModelAdapter:
    """Load a model by name: `demo`, an alias (`llama-2-13b`), a Hub id (`org/name[@revision]`), a
    folder, or `synthetic:SHAPE` to measure speed only.

    device: auto (a CUDA GPU if there is one), cpu, cuda (the GPU with the most free memory, or all
        GPUs if the model needs them), cuda:1, …, or mps (Apple's GPU, with the engine hf only)
    dtype: auto (float32 on a CPU, bfloat16 on a GPU) or a name
    quantization: bitsandbytes-4bit, bitsandbytes-8bit, torchao-4bit, torchao-8bit
    engine: hf (unmodified modules), auto (fused weights if the model has the shape for them), any
        other name (fused weights)

    Raises: ModelError that says what to do."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    tensors = list[StoredTensor]()  # filled by the loader, for the error about a lack of memory
    with memory_errors_reported(
        chosen_device,
        lambda free: out_of_memory(name, tensors, chosen_device, chosen_dtype, quantization, free),
    ):
        settings = make_quantization_config(quantization, chosen_dtype, chosen_device)
        loaded = _open_model(name, chosen_device, chosen_dtype, quantization, settings, tensors)
        return _make_checked(loaded, engine)


def open_model(name: str, device: str, dtype: str, quantization: str | None = None) -> LoadedModel:
    """Return a model for the engine native to quantise. Its matrices are in the dtype of its files,
    and mapped from safetensors files if the dtype is theirs.

    quantization: one of NATIVE_QUANTIZATIONS, to estimate whether the result fits into memory.
    Raises: ModelError, as `load_adapter`.
    """
    place, tensors = pick_device(device), list[StoredTensor]()
    chosen_dtype = pick_dtype(dtype, place)
    with memory_errors_reported(
        place, lambda free: out_of_memory(name, tensors, place, chosen_dtype, quantization, free)
    ):
        return _open_model(name, place, chosen_dtype, quantization, None, tensors)


def _open_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    settings: Any,
    tensors: list[StoredTensor],
) -> LoadedModel:
    """Read a model, and fill `tensors` with those of its weights.

    settings: transformers' `quantization_config`, or None. Raises: ModelError.
    """
    if synthetic.is_synthetic(name):
        return _open_synthetic(name, device, dtype, settings, quantization, tensors)
    if is_gguf(name):
        return _open_unpacked_gguf(name, device, dtype, tensors)
    folder, identity, revision = resolve_model(name)
    config = load_config(folder, name)
    family = family_of(config)
    check_special_tokens(name, config, read_generation_config(folder, name))
    stored = read_stored_quantization(config)
    if quantization is not None and stored is not None:
        raise ModelError(
            f"{name} is stored as {stored} and cannot be quantised again; leave quantization "
            f"{quantization} out"
        )
    files = list_weight_files(folder, name)
    tensors += list_stored_tensors(files)
    placement = choose_placement(name, tensors, device, dtype, quantization)
    check_config_matches_weights(name, config, family, tensors, quantized=stored is not None)
    tokenizer = read_tokenizer(folder, config)  # may fail; before the weights, which take longer
    model = read_weights(
        folder,
        name,
        config,
        None if quantization in NATIVE_QUANTIZATIONS else dtype,
        placement,
        settings,
        family,
        use_safetensors=files[0].suffix == ".safetensors",
    )
    spec = _make_spec(
        model,
        config,
        id=identity,
        revision=revision,
        quantization=quantization or stored,
        weights_sha256=hash_weight_files(files),
    )
    return LoadedModel(model, replace(spec, dtype=dtype), family, tokenizer)


def _open_unpacked_gguf(
    name: str, device: torch.device, dtype: torch.dtype, tensors: list[StoredTensor]
) -> LoadedModel:
    """Read a GGUF file, and unpack its matrices. Raises: ModelError, also if they do not fit."""
    stored = open_gguf(name, dtype)
    tensors += [
        StoredTensor(matrix.name, matrix.shape, None)
        for matrix in list_stored_matrices(stored.model)
    ]
    device = choose_placement(name, tensors, device, dtype, None).device
    unpack_stored_modules(stored.model)
    model: Any = stored.model.to(device)
    quantization = name_with_activations(str(stored.spec.quantization), "float")
    spec = replace(stored.spec, device=device, quantization=quantization)
    return replace(stored, model=model, spec=spec)


def load_tokenizer(name: str) -> tuple[Any, int | None]:
    """Return (tokenizer of a model, context in tokens or None if unknown), without its weights.

    Raises: ModelError, also if the model has no tokenizer.
    """
    name = find_model_file(name)
    if is_gguf(name):
        tokenizer, context_length = read_gguf_tokenizer(name)
        if tokenizer is None:
            raise ModelError(f"{name} has no tokenizer, so nothing says how it reads text")
        return tokenizer, context_length
    folder, identity, _ = resolve_model(name, weights=False)
    if not has_tokenizer(folder):
        raise ModelError(
            f"{identity} has no tokenizer, so nothing says how it reads text: put its tokenizer "
            "files beside its weights"
        )
    config = load_config(folder, name)
    family_of(config)
    return read_tokenizer(folder, config), find_context_length(config.get_text_config(decoder=True))


def _make_checked(loaded: LoadedModel, engine: str) -> ModelAdapter:
    """Return an adapter that was checked against the model's own forward. Raises: ModelError."""
    from skipsearch.models.stored_checks import build_checked

    model, spec = loaded.model, loaded.spec

    def build() -> CheckableAdapter:
        return make_adapter(model, spec, loaded.family, loaded.tokenizer, engine)

    # Synthetic models are not checked: their weights are not a file's, and only speed is measured.
    if synthetic.is_synthetic(spec.id):
        return build()
    engine_spec = replace(spec, engine=_pick_engine(model, spec, loaded.family, engine))
    return build_checked(engine_spec, lambda: record_reference(model, spec), build)


def _open_synthetic(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    settings: Any,
    quantization: str | None,
    tensors: list[StoredTensor],
) -> LoadedModel:
    if settings is not None:
        raise ModelError(
            f"{name} has random weights, which are not quantised; leave quantization "
            f"{quantization} out"
        )
    shape, _ = synthetic.parse_synthetic_name(name)
    tensors += synthetic.list_synthetic_tensors(shape)
    placement = choose_placement(name, tensors, device, dtype, None)
    if placement.multi_gpu:
        raise ModelError(
            f"{name} does not fit on one GPU as {dtype}, and a synthetic model is not spread over "
            "several; use a smaller one"
        )
    model: Any = synthetic.build_synthetic_model(name, dtype, placement.device)
    spec = _make_spec(model, model.config, id=name)
    return LoadedModel(model, spec, family_of(model.config), None)


def make_adapter(
    model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any, engine: str
) -> HFAdapter | FusedAdapter | GenericAdapter:
    """Return the adapter for an engine: unmodified modules for hf, fused weights for all others.

    Fusing consumes the model. Raises: ModelError if the engine needs fused weights and the model
    cannot be fused.
    """
    if _pick_engine(model, spec, family, engine) == "lean":
        return fuse_model(model, replace(spec, engine="lean"), family, tokenizer)
    return (
        _make_generic_adapter(model, spec, tokenizer)
        if family.is_generic
        else HFAdapter(model, spec, family, tokenizer)
    )


def why_not_fused(model: nn.Module, spec: ModelSpec, family: Family) -> str | None:
    """Return why a loaded model cannot be fused, as a phrase; None if it can."""
    if family.is_generic:
        return (
            f"{spec.family} models have no row in the table of families, so their own forward "
            "drives them"
        )
    return (
        "it was never run on Apple's GPUs"
        if spec.device.type == "mps"
        else why_not_fusable(
            model.config,
            None if is_native_quantization(spec.quantization) else spec.quantization,
            spec.n_devices,
        )
    )


def _pick_engine(model: nn.Module, spec: ModelSpec, family: Family, engine: str) -> str:
    """Return hf or lean. Raises: ModelError if this engine cannot run the model."""
    reason = None if engine == "hf" else why_not_fused(model, spec, family)
    if engine not in ("auto", "hf") and reason is not None:
        raise ModelError(f"the engine {engine} cannot drive {spec.id}: {reason}; use --engine hf")
    # transformers has grouped kernels for experts on a GPU, and lean a loop over them.
    config: Any = model.config
    has_experts = getattr(config.get_text_config(), "num_experts_per_tok", None) is not None
    leaves_experts = engine == "auto" and has_experts and spec.device.type != "cpu"
    return "hf" if engine == "hf" or reason is not None or leaves_experts else "lean"


def _make_generic_adapter(model: nn.Module, spec: ModelSpec, tokenizer: Any) -> GenericAdapter:
    from skipsearch.models.generic.recurrent import adapter_from_structure

    try:
        with silence_transformers():
            return adapter_from_structure(model, spec, tokenizer)
    except ModelError as error:
        raise ModelError(
            f"{spec.family} models have no row in the table of families, and {spec.id} cannot be "
            f"driven by its structure: {error}; use another model"
        ) from None
    except Exception as error:  # from the model's own forward, which may not accept our cache
        raise ModelError(
            f"{spec.family} models have no row in the table of families, and the forward of "
            f"{spec.id} does not take our cache ({first_line_of(error)}); use another model"
        ) from None


def adapt(model: nn.Module, tokenizer: Any = None, fuse: bool = False) -> ModelAdapter:
    """Return an adapter of a Hugging Face model that is in memory. The model is not altered.

    fuse: move the weights to fused matrices for the engine lean, which is faster. The model itself
    cannot be used afterwards. Raises: ModelError. After an error, the model can still be used,
    unless the check of the fused weights failed."""
    family, spec = inspect_model(model)
    if fuse:
        _pick_engine(model, spec, family, "lean")  # may fail; before anything runs
        reference = record_reference(model, spec)
        fused = make_adapter(model, spec, family, tokenizer, "lean")
        check_against(fused, reference)
        return fused
    adapter = make_adapter(model, spec, family, tokenizer, "hf")
    # The forward of a model that was split over devices by hand cannot run.
    is_spread_by_hand = spec.n_devices > 1 and not getattr(model, "hf_device_map", None)
    fingerprint = (spec, forward_fingerprint(model))
    if _CHECKED.get(model) != fingerprint and not is_spread_by_hand:
        check_against(adapter, record_reference(model, spec))
        _CHECKED[model] = fingerprint
    return adapter


def inspect_model(model: nn.Module) -> tuple[Family, ModelSpec]:
    """Return family and facts of a Hugging Face model in memory, without running it.

    Raises: ModelError if `adapt` cannot take the model.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ModelError(
            f"a {type(model).__name__} is not a Hugging Face model: give an AutoModelForCausalLM"
        )
    family = family_of(config)
    attention = config.get_text_config(decoder=True)._attn_implementation
    if attention not in {"sdpa", "eager"}:
        raise ModelError(
            f"this model attends with {attention!r}, which takes no explicit mask: load it with "
            f"attn_implementation={family.attn_implementation!r}"
        )
    if model.training:
        raise ModelError(
            "this model is in training mode, where dropout changes its output: call model.eval() "
            "first"
        )
    reject_offload("this model", getattr(model, "hf_device_map", None) or {})
    refuse_foreign_code(model)
    return family, _make_spec(
        model,
        config,
        id=getattr(config, "_name_or_path", "") or config.model_type,
        quantization=read_stored_quantization(config),
    )


def _make_spec(model: Any, config: Any, **identity: Any) -> ModelSpec:
    text, embedding = config.get_text_config(decoder=True), model.get_input_embeddings().weight
    return ModelSpec(
        revision=identity.pop("revision", None),
        family=config.model_type,
        n_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=find_context_length(text),
        dtype=embedding.dtype,
        device=embedding.device,
        config_sha256=hash_config(config),
        eos_token_ids=_read_eos_ids(model, text),
        sampling_defaults=read_from_generation_config(getattr(model, "generation_config", None)),
        n_devices=len({weight.device for weight in model.parameters()}),
        **identity,
    )


def _read_eos_ids(model: Any, config: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return parse_eos_ids(
        config.eos_token_id if eos is None else eos,
        config.vocab_size,
        "the eos_token_id of this model",
    )
