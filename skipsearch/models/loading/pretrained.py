"""Read the weights and the tokenizer of a model folder with transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from skipsearch.errors import ModelError, UnusedWeightsWarning
from skipsearch.models.families.table import Family
from skipsearch.models.loading.config_check import COMPUTED_TENSOR, MISMATCH_HINT
from skipsearch.models.loading.placement import Placement, reject_offload
from skipsearch.models.loading.shipped_heads import can_load_head, has_head_tensors
from skipsearch.models.third_party import first_line_of, panics_as_errors, silence_transformers


def read_weights(
    folder: Path,
    name: str,
    config: Any,
    dtype: torch.dtype | None,
    placement: Placement,
    quantization: Any,
    family: Family,
    use_safetensors: bool,
) -> Any:
    """Return a folder's model in evaluation mode, without gradients.

    dtype: None keeps that of the config or the files, so that weights stay mapped.
    Raises: ModelError.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    device_map: Any = "auto" if placement.multi_gpu else {"": placement.device}
    # With `ignore_mismatched_sizes`, transformers returns wrong shapes in its report. Without it,
    # it prints a table to the terminal.
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "device_map": device_map}
    # None would override the quantization of stored weights.
    if quantization is not None:
        options["quantization_config"] = quantization
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped kernels do not support float64
    try:
        with silence_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype="auto" if dtype is None else dtype,
                attn_implementation=family.attn_implementation,
                use_safetensors=use_safetensors,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except SafetensorError as error:
        raise ModelError(
            f"{name}: a weight file is damaged ({error}); delete it and download it again"
        ) from None
    except ImportError as error:
        raise ModelError(
            f"{name} needs a library that is not installed ({first_line_of(error)}); install it"
        ) from None
    except Exception as error:  # any error of a family or a quantizer
        way_out = (
            "download it again, or try it with transformers alone"
            if quantization is None
            else "try another quantization, or none"
        )
        raise ModelError(f"{name} cannot be loaded ({first_line_of(error)}); {way_out}") from None
    _reject_mismatched_weights(name, report)
    _report_unused_weights(name, model, sorted(map(str, report.get("unexpected_keys", ()))))
    if placement.multi_gpu:
        reject_offload(name, model.hf_device_map)
    return model.eval().requires_grad_(False)


def _reject_mismatched_weights(name: str, report: Any) -> None:
    missing = sorted(map(str, report.get("missing_keys", ())))
    mismatched = sorted(report.get("mismatched_keys", ()), key=str)
    if mismatched:
        key, stored, expected = mismatched[0]
        raise ModelError(
            f"{name}: {key} is stored as {list(stored)} and the config asks for {list(expected)}: "
            f"{MISMATCH_HINT}"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{name}: the weights lack {missing[0]}{more} of what the config asks for: "
            f"{MISMATCH_HINT}"
        )


def _report_unused_weights(name: str, model: Any, keys: list[str]) -> None:
    """Raise ModelError if a weight was dropped that belongs to a part that the model has, since it
    would change the text; warn of others, such as a value head.

    keys: of weights for which transformers has no place. A draft head has a reader of its own, and
    a quantizer may store more than it reads.
    """
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    can_load = can_load_head(model.config.model_type)
    unused = [
        key
        for key in keys
        if not COMPUTED_TENSOR.search(key) and not (can_load and has_head_tensors([key], n_layers))
    ]
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    modules = {} if is_quantized else dict(model.named_modules())
    parts = set(modules) - {"", model.base_model_prefix}
    for key in unused:
        names = key.split(".")
        if any(".".join(names[:n]) in parts for n in range(1, len(names))):
            raise ModelError(
                f"{name}: the weights hold {key}, which is no part of the model that config.json "
                f"describes: {MISMATCH_HINT}"
            )
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        warnings.warn(
            f"{name}: the weights hold {unused[0]}{more}, of which the model has no part, and it "
            "is loaded without: check that its text does not need them",
            UnusedWeightsWarning,
            stacklevel=2,
        )


def has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / f).is_file()
        for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    )


def read_tokenizer(folder: Path, config: Any) -> Any:
    """Return a folder's tokenizer; None if it has none, because decoding works with token ids.

    Raises: ModelError.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not has_tokenizer(folder):
        return None
    try:
        with silence_transformers(), panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, trust_remote_code=False, local_files_only=True
            )
        # tokenizer_config.json may name any class of transformers.
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"it is a {type(tokenizer).__name__}")
    except Exception as error:  # tokenizers raises Exception itself
        raise ModelError(
            f"the tokenizer in {folder} cannot be read ({first_line_of(error)}); download it "
            "again, or remove its files and work on token ids"
        ) from None
    return tokenizer
