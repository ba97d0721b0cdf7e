"""`load_adapter`: from a name to a `ModelAdapter`, with one plain sentence for each way that can fail.

Weights are read from safetensors, or from PyTorch files by torch's reader of tensors alone; no code that comes with a model is ever run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from skipsearch.errors import ModelError
from skipsearch.models import synthetic
from skipsearch.models.check import compared, reference
from skipsearch.models.config import check_tokens, end_tokens, known_config, read_generation
from skipsearch.models.families import Family, family_of
from skipsearch.models.files import config_hash, stored_tensors, weight_files, weights_hash
from skipsearch.models.fit import refuse_misfit
from skipsearch.models.hf import HFAdapter
from skipsearch.models.hub import locate
from skipsearch.models.lean import LeanAdapter, fuse, why_not
from skipsearch.models.place import Placement, pick_device, pick_dtype, place, refuse_offload
from skipsearch.models.quantize import quantization_config, stored_quantization
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.models.telling import in_short, no_panic, quietly

if TYPE_CHECKING:
    from skipsearch.models.own import OwnAdapter


_SOUND: WeakSet[nn.Module] = WeakSet()   # models in memory that were checked


def load_adapter(name: str, device: str = "auto", dtype: str = "auto", quantization: str | None = None,
               engine: str = "auto") -> ModelAdapter:
    """Load `demo`, an alias (`llama-2-13b`), a Hub id (`org/name[@revision]`) or a local folder; `synthetic:SHAPE` for speed only.

    device: auto (a GPU of CUDA if there is one), cpu, cuda (the GPU with most room; all of them, where one is too small), cuda:1, …; mps,
    Apple's GPU, which the engine hf alone drives.
    dtype: auto (float32 on a CPU, bfloat16 on a GPU) or a name. quantization: bitsandbytes-4bit, -8bit, torchao-4bit, -8bit.
    engine: hf (the unmodified modules), auto (fused weights where the model is of their shape), or any other name: fused weights.
    Raises: ModelError with what to do.
    """
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    if synthetic.is_synthetic(name):
        return _synthetic(name, chosen_device, chosen_dtype, quantization, engine)
    settings = quantization_config(quantization, chosen_dtype, chosen_device)  # refused before a download
    folder, identity, revision = locate(name)
    config = known_config(folder, name)
    family = family_of(config)
    check_tokens(name, config, read_generation(folder, name))
    stored = stored_quantization(config)
    if quantization is not None and stored is not None:
        raise ModelError(f"{name} is stored as {stored} and cannot be quantised again; leave quantization {quantization} out")
    files = weight_files(folder, name)
    tensors = list(stored_tensors(files))
    placement = place(name, tensors, chosen_device, chosen_dtype, quantization)
    refuse_misfit(name, config, family, tensors, quantized=stored is not None)
    tokenizer = _read_tokenizer(folder, config)  # before the weights, which take longer
    model = _read_weights(folder, name, config, chosen_dtype, placement, settings, family,
                          use_safetensors=files[0].suffix == ".safetensors")
    spec = _spec(model, config, id=identity, revision=revision, quantization=quantization or stored,
                 weights_sha256=weights_hash(files))
    return _checked(model, spec, family, tokenizer, engine)


def load_tokenizer(name: str) -> tuple[Any, int | None]:
    """(tokenizer, context in tokens) of what `load_adapter` would load, without the weights; context None where none is said.

    Raises: ModelError, also for a model without a tokenizer.
    """
    folder, identity, _ = locate(name, weights=False)
    if not _has_tokenizer(folder):
        raise ModelError(f"{identity} has no tokenizer, so nothing says how it reads text: put its tokenizer files beside its weights")
    config = known_config(folder, name)
    family_of(config)
    return _read_tokenizer(folder, config), _context(config.get_text_config(decoder=True))


def _checked(model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any, engine: str) -> ModelAdapter:
    """The adapter, found to compute what the model's own forward does. Raises: ModelError where it does not."""
    from skipsearch.models.checked import keep, kept_finding  # which imports transformers

    known = None if kept_finding(replace(spec, engine=_engine(model, spec, family, engine))) else reference(model, spec)
    adapter = drive(model, spec, family, tokenizer, engine)
    if known is not None:
        keep(adapter.spec, compared(adapter, known))
    return adapter


def _synthetic(name: str, device: torch.device, dtype: torch.dtype, quantization: str | None, engine: str) -> ModelAdapter:
    if quantization is not None:
        raise ModelError(f"{name} has random weights, which are not quantised; leave quantization {quantization} out")
    shape, _ = synthetic.parse(name)
    placement = place(name, synthetic.tensors(shape), device, dtype, None)
    if placement.spread:
        raise ModelError(f"{name} does not fit on one GPU as {dtype}, and a synthetic model is not spread over several; use a smaller one")
    model: Any = synthetic.build(name, dtype, placement.device)
    return drive(model, _spec(model, model.config, id=name), family_of(model.config), None, engine)


def drive(model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any, engine: str) -> HFAdapter | LeanAdapter | OwnAdapter:
    """The adapter for `engine`: hf, or the fused weights that all others stand on, which use the model up.

    Raises: ModelError where fused weights were asked for and are not possible.
    """
    if _engine(model, spec, family, engine) == "lean":
        return fuse(model, replace(spec, engine="lean"), family, tokenizer)
    return _by_structure(model, spec, tokenizer) if family.by_structure else HFAdapter(model, spec, family, tokenizer)


def why_not_lean(model: nn.Module, spec: ModelSpec, family: Family) -> str | None:
    """What keeps a loaded model from the fused path, as half a sentence; None if nothing does."""
    if family.by_structure:
        return f"{spec.family} models have no row in the table of families, so their own forward drives them"
    return "it was never run on Apple's GPUs" if spec.device.type == "mps" else why_not(model.config, spec.quantization, spec.n_devices)


def _engine(model: nn.Module, spec: ModelSpec, family: Family, engine: str) -> str:
    """hf or lean. Raises: ModelError where an engine was asked for that is not possible."""
    reason = None if engine == "hf" else why_not_lean(model, spec, family)
    if engine not in ("auto", "hf") and reason is not None:
        raise ModelError(f"the engine {engine} cannot drive {spec.id}: {reason}; use --engine hf")
    return "hf" if engine == "hf" or reason is not None else "lean"


def _by_structure(model: nn.Module, spec: ModelSpec, tokenizer: Any) -> OwnAdapter:
    """Raises: ModelError."""
    from skipsearch.models.recurrent import by_structure

    try:
        with quietly():
            return by_structure(model, spec, tokenizer)
    except ModelError as error:
        raise ModelError(f"{spec.family} models have no row in the table of families, and {spec.id} cannot be driven by its structure: "
                         f"{error}; use another model") from None
    except Exception as error:   # its own forward, called in a way that it may not know
        raise ModelError(f"{spec.family} models have no row in the table of families, and the forward of {spec.id} does not take our cache "
                         f"({in_short(error)}); use another model") from None


def adapt(model: nn.Module, tokenizer: Any = None, fuse: bool = False) -> ModelAdapter:
    """The adapter of a Hugging Face model that is already in memory; the model is not altered.

    fuse: take it apart for the engine lean, which is faster: its weights are moved into fused ones, and the model itself is of no use
    afterwards. Raises: ModelError, before anything is taken apart.
    """
    family, spec = family_and_spec(model)
    if fuse:
        return drive(model, spec, family, tokenizer, "lean")
    adapter = drive(model, spec, family, tokenizer, "hf")
    by_hand = spec.n_devices > 1 and not getattr(model, "hf_device_map", None)   # its own forward knows nothing of several devices
    if model not in _SOUND and not by_hand:
        compared(adapter, reference(model, spec))
        _SOUND.add(model)
    return adapter


def family_and_spec(model: nn.Module) -> tuple[Family, ModelSpec]:
    """What is known of a Hugging Face model in memory before anything of it runs. Raises: ModelError where `adapt` would."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ModelError(f"a {type(model).__name__} is not a Hugging Face model: give an AutoModelForCausalLM")
    family = family_of(config)
    attention = config.get_text_config(decoder=True)._attn_implementation
    if attention not in {"sdpa", "eager"}:
        raise ModelError(f"this model attends with {attention!r}, which takes no explicit mask: load it with "
                         f"attn_implementation={family.attention!r}")
    if model.training:
        raise ModelError("this model is in training mode, where dropout changes its output: call model.eval() first")
    refuse_offload("this model", getattr(model, "hf_device_map", None) or {})
    return family, _spec(model, config, id=getattr(config, "_name_or_path", "") or config.model_type,
                         quantization=stored_quantization(config))


def _spec(model: Any, config: Any, **identity: Any) -> ModelSpec:
    text, embedding = config.get_text_config(decoder=True), model.get_input_embeddings().weight
    return ModelSpec(
        revision=identity.pop("revision", None), family=config.model_type, n_layers=text.num_hidden_layers,
        hidden=text.hidden_size, vocab=text.vocab_size, context=_context(text), dtype=embedding.dtype, device=embedding.device,
        config_sha256=config_hash(config), eos_token_ids=_eos_ids(model, text),
        n_devices=len({weight.device for weight in model.parameters()}), **identity)


def _context(config: Any) -> int | None:
    """Tokens that the model was made for.

    Past its original context, `longrope` turns keys by other angles than those in the cache, and a round that crosses the border
    would differ from plain decoding: such a model is driven up to there.
    """
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = [part.get("original_max_position_embeddings") for part in (rope, *rope.values())
                if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    return min((n for n in (context, *original) if n), default=None)


def _read_weights(folder: Path, name: str, config: Any, dtype: torch.dtype, placement: Placement, quantization: Any,
                  family: Family, use_safetensors: bool) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    device_map: Any = "auto" if placement.spread else {"": placement.device}
    # Left to itself, transformers answers a wrong shape with a table on the terminal; asked to ignore it, it tells us.
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "device_map": device_map}
    if quantization is not None:  # None itself would hide what the stored weights are quantised with
        options["quantization_config"] = quantization
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped kernels know no float64
    try:
        with quietly():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=family.attention, use_safetensors=use_safetensors,
                trust_remote_code=False, local_files_only=True, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ModelError(f"{name}: a weight file is damaged ({error}); delete it and download it again") from None
    except (torch.OutOfMemoryError, MemoryError):
        raise ModelError(f"{name} does not fit into memory as {dtype}; use a smaller dtype, a quantization or another "
                         "device") from None
    except ImportError as error:
        raise ModelError(f"{name} needs a library that is not installed ({in_short(error)}); install it") from None
    except Exception as error:  # each family and each quantizer fails in its own way
        way_out = "download it again, or try it with transformers alone" if quantization is None else "try another quantization, or none"
        raise ModelError(f"{name} cannot be loaded ({in_short(error)}); {way_out}") from None
    _refuse_strange_weights(name, report)
    if placement.spread:
        refuse_offload(name, model.hf_device_map)
    return model.eval().requires_grad_(False)


def _refuse_strange_weights(name: str, report: Any) -> None:
    missing, mismatched = sorted(map(str, report.get("missing_keys", ()))), sorted(report.get("mismatched_keys", ()), key=str)
    if mismatched:
        key, stored, expected = mismatched[0]
        raise ModelError(f"{name}: {key} is stored as {list(stored)} and the config asks for {list(expected)}: config.json and "
                         "weights belong to two models, download both again")
    if missing:
        raise ModelError(f"{name}: the weights lack {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                         + " of what the config asks for: config.json and weights belong to two models, download both again")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"))


def _read_tokenizer(folder: Path, config: Any) -> Any:
    """The folder's tokenizer, or None: a model without one still works on token ids."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not _has_tokenizer(folder):
        return None
    try:
        with quietly(), no_panic():
            tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):  # its config names any class of transformers
            raise TypeError(f"it is a {type(tokenizer).__name__}")
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"the tokenizer in {folder} cannot be read ({in_short(error)}); download it again, "
                         "or remove its files and work on token ids") from None
    return tokenizer


def _eos_ids(model: Any, config: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return end_tokens(config.eos_token_id if eos is None else eos, config.vocab_size, "the eos_token_id of this model")
