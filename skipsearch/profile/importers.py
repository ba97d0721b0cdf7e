"""Skip sets that others published, as unmeasured profiles.

Both published files are JSON, {key: {"attention": [...], "mlp": [...]}}. They hold masks alone, so an imported profile drafts the
way Draft & Verify does by default. Sources:

    Draft & Verify   github.com/dilab-zju/self-speculative-decoding, skip_layers.json; a key is a model
    SWIFT            github.com/hemingkx/SWIFT, skip_layers.json; a key is a model and the task it was found on
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skipsearch.errors import ProfileError
from skipsearch.names import unknown
from skipsearch.profile.load import broken, read_file
from skipsearch.profile.places import ANY
from skipsearch.profile.schema import ModelInfo, Profile, Provenance, Sampling, TaskInfo
from skipsearch.strict_yaml import read_yaml, where

_DRAFT_AND_VERIFY = "github.com/dilab-zju/self-speculative-decoding skip_layers.json"
_SWIFT = "github.com/hemingkx/SWIFT skip_layers.json"
_MODELS = {  # name in the files, spelled with hyphens -> Hub id, layers; all of them Llama-shaped
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", 40),
    "llama-2-13b-chat": ("meta-llama/Llama-2-13b-chat-hf", 40),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", 80),
    "codellama-13b": ("codellama/CodeLlama-13b-hf", 40),
    "codellama-34b": ("codellama/CodeLlama-34b-hf", 48),
}
_TASKS = ("cnndm", "humaneval")


def import_skip_sets(path: str | Path) -> list[Profile]:
    """One unmeasured profile for each mask in a published skip_layers.json.

    Raises: ProfileError if the file is none, names a model that is not in the table, or a layer that its model does not have.
    """
    document = read_yaml(read_file(path), str(path))  # JSON is YAML, and this reader is the strict one
    if not isinstance(document.data, dict) or not document.data:
        raise ProfileError(f"{path}: a file of skip sets is a map of model names, each with lists `attention` and `mlp`")
    return [_imported(key, entry, where(str(path), document.lines[(key,)], (key,))) for key, entry in document.data.items()]


def _imported(key: str, entry: Any, place: str) -> Profile:
    name, _, suffix = key.rpartition("_")
    task = suffix if suffix in _TASKS else None
    name = (name if task else key).replace("_", "-")
    if name not in _MODELS:
        raise ProfileError(f"{place}: {unknown('model in the published skip sets', name, _MODELS)}")
    model_id, n_layers = _MODELS[name]
    if not isinstance(entry, dict) or set(entry) != {"attention", "mlp"}:
        raise ProfileError(f"{place}: a skip set has two keys, `attention` and `mlp`, each a list of layers")
    try:
        return Profile(
            schema_version=2,
            model=ModelInfo(id=model_id, revision=None, family="llama", n_layers=n_layers, config_sha256=None,
                            weights_sha256=None, dtype=None, quantization=None),
            task=TaskInfo(name=task or ANY, version=None, calibration_sha256=None,
                          sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0)),
            hardware=None, engine=None, verdict="unmeasured",
            drafters=({"kind": "skip", "attn": entry["attention"], "mlp": entry["mlp"], "draft_length": 12,   # type: ignore[arg-type]
                       "exit": {"kind": "adaptive"}},), lost=(),
            measured=None, software=None,
            provenance=Provenance(searcher="import", objective=None, seed=None, trials=None, search_seconds=None, created=None,
                                  commit=None, source=f"{_SWIFT if task else _DRAFT_AND_VERIFY}, {key}"))
    except ValidationError as error:
        raise ProfileError(f"{place}: {broken(error.errors(include_url=False)[0])}") from None
