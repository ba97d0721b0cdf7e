"""Read config.json and generation_config.json, and remove keys that a config must not decide.

A config is untrusted. transformers reads more from it than a model's shape: kernels to download,
modules to import, other files to load. It therefore gets a copy without these keys, at every level
of nesting.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.loading.weight_files import read_config, read_json
from skipsearch.models.third_party import first_line_of, silence_transformers

MAX_NESTING = 30  # levels of nesting; a real config has five
MAX_COUNT = 1_000_000  # of layers, heads, experts, labels, …

# The implementations of attention and experts, which the loader chooses. transformers takes
# `org/name` for a kernel to download from the Hub and run.
KERNEL_KEYS = {
    "attn_implementation",
    "attn_implementation_internal",
    "experts_implementation",
    "experts_implementation_internal",
}
# Keys that name code, or files other than the checked ones. `transformers_weights` and
# `configuration_files` name files, `fusion_config` patches classes, and `attribute_map` renames
# keys.
DROPPED_KEYS = {
    "auto_map",
    "attribute_map",
    "configuration_files",
    "custom_generate",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "kernel_config",
    "name_or_path",
    "transformers_weights",
    "trust_remote_code",
    "use_kernels",
}


def load_config(folder: Path, name: str) -> Any:
    """Return a folder's config as an object of its transformers class.

    Nothing is downloaded and no code of the model runs. Raises: ModelError.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
    from transformers import __version__ as installed

    data = read_config(folder, name)
    family = data["model_type"]
    if family not in CONFIG_MAPPING:
        if "auto_map" in data:
            raise ModelError(
                f"{name}: {family} models bring their own code, which is never run; use a model of "
                "a family that transformers has"
            )
        raise ModelError(
            f"{name}: transformers {installed} knows no model_type {family!r}; if it is new, "
            "update transformers"
        )
    cleaned = _clean(data, name, CONFIG_MAPPING[family])
    _refuse_unknown_quantization(cleaned, name)
    try:
        with TemporaryDirectory() as clean_folder, silence_transformers():
            Path(clean_folder, "config.json").write_text(json.dumps(cleaned), "utf-8")
            config = AutoConfig.from_pretrained(
                clean_folder, trust_remote_code=False, local_files_only=True
            )
        config.name_or_path = str(folder)
        text = config.get_text_config(decoder=True)
    except Exception as error:  # any error of a family's own checks
        raise ModelError(
            f"{name}: its config.json cannot be used ({first_line_of(error)}); take the original "
            "model's"
        ) from None
    # transformers may return a value of any type for an inner config.
    if not isinstance(text, PreTrainedConfig):
        parts = ("decoder", "generator", "text_config")
        part = next((key for key in parts if getattr(config, key, None) is text), "text_config")
        raise ModelError(
            f"{name}: its config.json has {part} {_short_json(data.get(part))}, and {family} "
            "models have no such part: take the original model's"
        )
    return config


def read_generation_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of generation_config.json; {} if it is missing.

    Raises: ModelError if it cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    way_out = "download it again, or remove it, and the eos_token_id of config.json ends an answer"
    data = read_json(path, name, way_out)
    if not isinstance(data, dict):
        raise ModelError(f"{name}: {path} holds no settings; {way_out}")
    return data


def check_special_tokens(name: str, config: Any, generation: dict[str, Any]) -> None:
    """Raise ModelError if an end-of-sequence or padding token is not in the vocabulary."""
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    # A negative id is valid, because torch counts it from the end.
    if pad is not None and (not _is_integer(pad) or not -text.vocab_size <= pad < text.vocab_size):
        raise ModelError(
            f"{name}: the pad_token_id of config.json is {_short_json(pad)}, "
            f"{_token_rule(text.vocab_size)}: write null there"
        )
    eos, source = generation.get("eos_token_id"), "generation_config.json"
    if eos is None:
        eos, source = getattr(text, "eos_token_id", None), "config.json"
    parse_eos_ids(eos, text.vocab_size, f"{name}: the eos_token_id of {source}")


def parse_eos_ids(value: Any, vocab_size: int, setting_name: str) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`, which is a token, a list of tokens, or None.

    Raises: ModelError for anything else.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        if not _is_integer(token) or not 0 <= token < vocab_size:
            raise ModelError(
                f"{setting_name} is {_short_json(value)}, {_token_rule(vocab_size)}: write the id "
                "of the token that ends an answer, a list of such ids, or null"
            )
    return ids


def find_context_length(config: Any) -> int | None:
    """Return the longest sequence that the model can decode, in tokens.

    Beyond its original context, `longrope` rotates keys by other angles than those in the cache. A
    round across this position would differ from plain decoding, so the original context is the
    limit.
    """
    context = getattr(config, "max_position_embeddings", None) or getattr(
        config, "max_seq_len", None
    )
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = [
        part.get("original_max_position_embeddings")
        for part in (rope, *rope.values())
        if isinstance(part, dict) and part.get("rope_type") == "longrope"
    ]
    return min((n for n in (context, *original) if n), default=None)


def _token_rule(vocab_size: int) -> str:
    return f"and tokens are whole numbers from 0 to {vocab_size - 1}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short_json(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _clean(value: Any, name: str, config_class: type, depth: int = 0) -> Any:
    """Return a copy without keys that a config must not decide.

    config_class: the class that the config will become; no key may replace its attributes.
    Raises: ModelError for a kernel from the Hub, and for numbers or nesting that no model has.
    """
    if depth > MAX_NESTING:
        raise ModelError(
            f"{name}: its config.json is nested more than {MAX_NESTING} levels deep; take the "
            "original model's"
        )
    if isinstance(value, list):
        return [_clean(item, name, config_class, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned, protected = {}, _protected_names(config_class)
    for key, inner in value.items():
        if key.strip("_") in KERNEL_KEYS:
            _refuse_kernels(key, inner, name)
        elif key.strip("_") not in DROPPED_KEYS and key not in protected:
            is_count = key.startswith(("num_", "n_")) and isinstance(inner, int | float)
            if is_count and not abs(inner) <= MAX_COUNT:
                raise ModelError(
                    f"{name}: its config.json asks for {key} {_short_json(inner)}, and no model "
                    f"has more than {MAX_COUNT}; take the original model's"
                )
            cleaned[key] = _clean(inner, name, config_class, depth + 1)
    return cleaned


def _protected_names(config_class: type) -> set[str]:
    """Return the names that no key may replace: methods, and class attributes that are not fields.

    `model_type` is allowed, because every config contains it.
    """
    fields = {field.name for field in dataclasses.fields(config_class)} | {"model_type"}
    return {
        key
        for key in dir(config_class)
        if key not in fields and getattr(_find_in_mro(config_class, key), "fset", None) is None
    }


def _find_in_mro(config_class: type, key: str) -> Any:
    return next((vars(base)[key] for base in config_class.__mro__ if key in vars(base)), None)


def _refuse_kernels(key: str, value: Any, name: str) -> None:
    kernel = next((text for text in _iter_strings(value) if "/" in text), None)
    if kernel is not None:
        raise ModelError(
            f"{name}: its config.json asks for {_short_json(kernel)} as {key}, a kernel from the "
            f"Hub, and no code that comes with a model is ever run; remove {key} from config.json"
        )


def _iter_strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth <= MAX_NESTING:
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _iter_strings(inner, depth + 1)


def _refuse_unknown_quantization(data: dict[str, Any], name: str) -> None:
    """Raise ModelError for packed weights of an unknown kind.

    transformers would load them as plain weights.
    """
    from transformers import __version__ as installed
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    text = data.get("text_config")
    for settings in (
        data.get("quantization_config"),
        text.get("quantization_config") if isinstance(text, dict) else None,
    ):
        if settings is None:
            continue
        method: Any = settings.get("quant_method") if isinstance(settings, dict) else settings
        if isinstance(settings, dict) and (
            settings.get("load_in_4bit") or settings.get("load_in_8bit")
        ):
            method = "bitsandbytes_4bit"
        if (
            not isinstance(settings, dict)
            or not isinstance(method, str)
            or method not in {*KNOWN, "bitsandbytes"}
        ):
            raise ModelError(
                f"{name}: its config.json says that the weights are quantised by "
                f"{_short_json(method)}, which transformers {installed} does not know; if it is "
                "new, update transformers, or use the model in another format"
            )
