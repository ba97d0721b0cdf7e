"""The sampling that a model's author recommends, under the names of a request's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the names of generation_config.json and of requests: the keys of GGUF files, as llama.cpp
# writes them.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def read_from_generation_config(config: Any) -> dict[str, Any]:
    """Return what a model's `generation_config` names; {} for None.

    `"do_sample": false` is greedy: temperature 0, whatever else is named.
    """
    named: dict[str, Any] = {} if config is None else config.to_diff_dict()
    chosen = {name: named[name] for name in GGUF_KEYS if named.get(name) is not None}
    if named.get("do_sample") is False:
        greedy = {"temperature": 0.0}
        return greedy | {n: v for n, v in chosen.items() if n == "repetition_penalty"}
    return chosen


def read_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the metadata of a GGUF file name, without the noise of float32."""
    chosen = {name: metadata[key] for name, key in GGUF_KEYS.items() if key in metadata}
    return {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in chosen.items()}
