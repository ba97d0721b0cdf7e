"""config.json and generation_config.json as this program takes them: what they may say, and what of it transformers gets to see.

A config is data from a stranger. transformers reads more out of it than a model's shape: kernels to fetch, modules to import, other files
to load instead. So it is handed a copy without any of that, at every level of nesting.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.files import read_config, read_json
from skipsearch.models.telling import in_short, quietly

DEEPEST = 30         # levels of nesting; a real config has five
MOST = 1_000_000     # of anything that is counted: layers, heads, experts, labels

# Which function attends, or runs the experts: the loader chooses. transformers takes `org/name` for a kernel to fetch from the Hub and run.
KERNELS = {"attn_implementation", "attn_implementation_internal", "experts_implementation", "experts_implementation_internal"}
# Code, or files other than those that were looked at. `transformers_weights` and `configuration_files` name such files, `fusion_config`
# patches classes, and `attribute_map` lets one key stand for another one.
LEFT_OUT = {"auto_map", "attribute_map", "configuration_files", "custom_generate", "custom_pipelines", "distributed_config",
            "fusion_config", "kernel_config", "name_or_path", "transformers_weights", "trust_remote_code", "use_kernels"}


def known_config(folder: Path, name: str) -> Any:
    """The folder's config as transformers' own class, of a family that can be driven. Nothing is fetched and no code is run.

    Raises: ModelError.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as installed

    data = read_config(folder, name)
    family = data["model_type"]
    if family not in CONFIG_MAPPING:
        if "auto_map" in data:
            raise ModelError(f"{name}: {family} models bring their own code, which is never run; use a model of a family that "
                             "transformers has")
        raise ModelError(f"{name}: transformers {installed} knows no model_type {family!r}; if it is new, update transformers")
    cleaned = _cleaned(data, name, CONFIG_MAPPING[family])
    _refuse_unknown_quantization(cleaned, name)
    try:
        with TemporaryDirectory() as place, quietly():
            Path(place, "config.json").write_text(json.dumps(cleaned), "utf-8")
            config = AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=True)
        config.name_or_path = str(folder)
        config.get_text_config(decoder=True)
    except Exception as error:  # each family checks its config in its own way
        raise ModelError(f"{name}: its config.json cannot be used ({in_short(error)}); take the original model's") from None
    return config


def read_generation(folder: Path, name: str) -> dict[str, Any]:
    """generation_config.json, which says where an answer ends; {} if there is none. Raises: ModelError if it cannot be read."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    way_out = "download it again, or remove it, and the eos_token_id of config.json ends an answer"
    data = read_json(path, name, way_out)
    if not isinstance(data, dict):
        raise ModelError(f"{name}: {path} holds no settings; {way_out}")
    return data


def check_tokens(name: str, config: Any, generation: dict[str, Any]) -> None:
    """Raises: ModelError if a token that ends an answer, or fills a batch up, is none of the vocabulary."""
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    if pad is not None and (not _whole(pad) or not -text.vocab_size <= pad < text.vocab_size):  # torch counts −1 from the end
        raise ModelError(f"{name}: the pad_token_id of config.json is {_shown(pad)}, {_rule(text.vocab_size)}: write null there")
    eos, source = generation.get("eos_token_id"), "generation_config.json"
    if eos is None:
        eos, source = getattr(text, "eos_token_id", None), "config.json"
    end_tokens(eos, text.vocab_size, f"{name}: the eos_token_id of {source}")


def end_tokens(value: Any, vocab: int, what: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: a token, a list of them, or None. Raises: ModelError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        if not _whole(token) or not 0 <= token < vocab:
            raise ModelError(f"{what} is {_shown(value)}, {_rule(vocab)}: write the id of the token that ends an answer, a list of such "
                             "ids, or null")
    return ids


def _rule(vocab: int) -> str:
    return f"and tokens are whole numbers from 0 to {vocab - 1}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _cleaned(value: Any, name: str, kind: type, depth: int = 0) -> Any:
    """A copy without what a config must not decide. kind: the class that it will become, whose own attributes stay its own.

    Raises: ModelError for a kernel of the Hub, and for numbers and nesting that no model has.
    """
    if depth > DEEPEST:
        raise ModelError(f"{name}: its config.json is nested more than {DEEPEST} levels deep; take the original model's")
    if isinstance(value, list):
        return [_cleaned(item, name, kind, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kept, own = {}, _own_names(kind)
    for key, inner in value.items():
        if key.strip("_") in KERNELS:
            _refuse_kernels(key, inner, name)
        elif key.strip("_") not in LEFT_OUT and key not in own:
            if key.startswith(("num_", "n_")) and isinstance(inner, int | float) and not abs(inner) <= MOST:
                raise ModelError(f"{name}: its config.json asks for {key} {_shown(inner)}, and no model has more than {MOST}; take the "
                                 "original model's")
            kept[key] = _cleaned(inner, name, kind, depth + 1)
    return kept


def _own_names(kind: type) -> set[str]:
    """What a key would cover up: methods, and what the class itself fixes. `model_type` is written into every config."""
    fields = {field.name for field in dataclasses.fields(kind)} | {"model_type"}
    return {key for key in dir(kind) if key not in fields and getattr(_static(kind, key), "fset", None) is None}


def _static(kind: type, key: str) -> Any:
    return next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), None)


def _refuse_kernels(key: str, value: Any, name: str) -> None:
    kernel = next((text for text in _texts(value) if "/" in text), None)
    if kernel is not None:
        raise ModelError(f"{name}: its config.json asks for {_shown(kernel)} as {key}, a kernel from the Hub, and no code that comes with "
                         f"a model is ever run; remove {key} from config.json")


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth <= DEEPEST:
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inner, depth + 1)


def _refuse_unknown_quantization(data: dict[str, Any], name: str) -> None:
    """transformers would load packed weights of a kind that it does not know as plain ones."""
    from transformers import __version__ as installed
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    text = data.get("text_config")
    for settings in (data.get("quantization_config"), text.get("quantization_config") if isinstance(text, dict) else None):
        if settings is None:
            continue
        method: Any = settings.get("quant_method") if isinstance(settings, dict) else settings
        if isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
            method = "bitsandbytes_4bit"
        if not isinstance(settings, dict) or not isinstance(method, str) or method not in {*KNOWN, "bitsandbytes"}:
            raise ModelError(f"{name}: its config.json says that the weights are quantised by {_shown(method)}, which transformers "
                             f"{installed} does not know; if it is new, update transformers, or use the model in another format")


