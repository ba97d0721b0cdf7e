"""Import skip sets from publications as unmeasured profiles.

Both published files are JSON, {key: {"attention": [...], "mlp": [...]}}. They contain masks only,
so an imported profile drafts as Draft & Verify does by default. Sources:

    Draft & Verify   github.com/dilab-zju/self-speculative-decoding, skip_layers.json;
                     a key is a model
    SWIFT            github.com/hemingkx/SWIFT, skip_layers.json;
                     a key is a model and the task that the mask was found on
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skipsearch.core.registry import unknown_name
from skipsearch.core.strict_yaml import format_location, read_yaml
from skipsearch.errors import ProfileError
from skipsearch.profile.load import explain_detail, read_file
from skipsearch.profile.paths import ANY
from skipsearch.profile.schema import ModelInfo, Profile, ProfileSampling, Provenance, TaskInfo

_DRAFT_AND_VERIFY = "github.com/dilab-zju/self-speculative-decoding skip_layers.json"
_SWIFT = "github.com/hemingkx/SWIFT skip_layers.json"
_MODELS = {  # name in the files with hyphens -> (Hub id, layers); all are of family llama
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", 40),
    "llama-2-13b-chat": ("meta-llama/Llama-2-13b-chat-hf", 40),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", 80),
    "codellama-13b": ("codellama/CodeLlama-13b-hf", 40),
    "codellama-34b": ("codellama/CodeLlama-34b-hf", 48),
}
_TASKS = ("cnndm", "humaneval")


def import_skip_sets(path: str | Path) -> list[Profile]:
    """Return an unmeasured profile for each mask in a published skip_layers.json.

    Raises: ProfileError if the file has another format, or names a model that is not in the table,
    or a layer that its model does not have.
    """
    document = read_yaml(read_file(path), str(path))  # JSON is YAML
    if not isinstance(document.data, dict) or not document.data:
        raise ProfileError(
            f"{path}: a file of skip sets is a map of model names, each with lists `attention` and "
            "`mlp`"
        )
    return [
        _import_mask(key, entry, format_location(str(path), document.lines[(key,)], (key,)))
        for key, entry in document.data.items()
    ]


def _import_mask(key: str, entry: Any, location: str) -> Profile:
    name, _, suffix = key.rpartition("_")
    task = suffix if suffix in _TASKS else None
    name = (name if task else key).replace("_", "-")
    if name not in _MODELS:
        raise ProfileError(
            f"{location}: {unknown_name('model in the published skip sets', name, _MODELS)}"
        )
    model_id, n_layers = _MODELS[name]
    if not isinstance(entry, dict) or set(entry) != {"attention", "mlp"}:
        raise ProfileError(
            f"{location}: a skip set has two keys, `attention` and `mlp`, each a list of layers"
        )
    try:
        return Profile(
            schema_version=3,
            model=ModelInfo(
                id=model_id,
                revision=None,
                family="llama",
                n_layers=n_layers,
                config_sha256=None,
                weights_sha256=None,
                dtype=None,
                quantization=None,
            ),
            task=TaskInfo(
                name=task or ANY,
                version=None,
                calibration_sha256=None,
                sampling=ProfileSampling(temperature=0.0, top_p=1.0, top_k=0),
            ),
            hardware=None,
            engine=None,
            verdict="unmeasured",
            drafters=(
                {
                    "kind": "skip",
                    "attn": entry["attention"],
                    "mlp": entry["mlp"],
                    "draft_length": 12,  # type: ignore[arg-type]
                    "exit": {"kind": "adaptive"},
                },
            ),
            lost=(),
            measured=None,
            software=None,
            provenance=Provenance(
                searcher="import",
                objective=None,
                seed=None,
                trials=None,
                search_seconds=None,
                created=None,
                commit=None,
                source=f"{_SWIFT if task else _DRAFT_AND_VERIFY}, {key}",
            ),
        )
    except ValidationError as error:
        raise ProfileError(
            f"{location}: {explain_detail(error.errors(include_url=False)[0])}"
        ) from None
