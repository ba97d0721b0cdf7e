"""Migrate profiles of older schema versions, one version at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skipsearch.core.strict_yaml import KeyPath
from skipsearch.errors import ProfileError
from skipsearch.profile.schema import SCHEMA_VERSION


def migrate_data(data: Any) -> dict[str, Any]:
    """Return a profile's plain data in the current version; the argument is not changed.

    Raises: ProfileError (without the file's name) if the data have no version or a newer one, or
    lack a required key of their version.
    """
    if not isinstance(data, dict):
        raise ProfileError(
            "a profile is a map that starts with schema_version, not a list or a single value"
        )
    version = data.get("schema_version")
    if type(version) is not int or version < 0:
        raise ProfileError(
            f"schema_version must be a whole number from 0 to {SCHEMA_VERSION}; without it this is "
            "no profile"
        )
    if version > SCHEMA_VERSION:
        raise ProfileError(
            f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest this skipsearch "
            "reads; "
            "update skipsearch (pip install --upgrade skipsearch)"
        )
    for step in range(version, SCHEMA_VERSION):
        try:
            data = MIGRATIONS[step](data)
        except (KeyError, TypeError, AttributeError) as error:
            problem = (
                f"lacks {error.args[0]}"
                if isinstance(error, KeyError)
                else "has a value of the wrong kind"
            )
            raise ProfileError(
                f"it says schema_version {step} but {problem}; fix it, or tune again"
            ) from None
    return data


def _from_0(old: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate version 0, which had a model, two lists and a threshold, to version 1.

    The new profile is unmeasured.
    """
    threshold = old["exit_threshold"]
    return {
        "schema_version": 1,
        "model": {
            "id": old["model"],
            "revision": None,
            "family": old["architecture"],
            "n_layers": old["layers"],
            "config_sha256": None,
            "weights_sha256": None,
            "dtype": None,
            "quantization": None,
        },
        "task": {
            "name": old["task"],
            "version": None,
            "calibration_sha256": None,
            "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        },
        "hardware": None,
        "engine": None,
        "verdict": "unmeasured",
        "drafter": {"kind": "skip", "attn": old["skip"]["attention"], "mlp": old["skip"]["mlp"]},
        "draft_length": old["draft_length"],
        "exit": {"kind": "fixed"}
        if threshold is None
        else {"kind": "confidence", "threshold": threshold},
        "measured": None,
        "software": None,
        "provenance": {
            "searcher": old["searcher"],
            "objective": None,
            "seed": None,
            "trials": None,
            "search_seconds": None,
            "created": None,
            "commit": None,
        },
    }


def _from_1(old: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate version 1, which had one drafter, to version 2.

    Draft length and exit policy were keys of the profile. If the verdict was plain, the drafter was
    the candidate that lost.
    """
    drafter, length, exit_policy = old["drafter"], old["draft_length"], old["exit"]
    plain = old["verdict"] == "plain"
    if not isinstance(drafter, dict) or not isinstance(exit_policy, dict):
        raise TypeError
    later = [key for key in ("drafters", "lost") if key in old] + [
        f"drafter.{key}" for key in ("draft_length", "exit") if key in drafter
    ]
    if later:
        raise ProfileError(
            f"it says schema_version 1 but has {later[0]}, which version 1 did not know; remove it"
        )
    skips_nothing = plain and length == 0 and not drafter.get("attn") and not drafter.get("mlp")
    drafters = [] if skips_nothing else [{**drafter, "draft_length": length, "exit": exit_policy}]
    new: dict[str, Any] = {}
    for key, value in old.items():
        if key == "drafter":
            new |= {"drafters": [] if plain else drafters, "lost": drafters if plain else []}
        elif key not in ("draft_length", "exit"):
            new[key] = value
    return new | {"schema_version": 2}


def _from_2(old: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate version 2, whose drafts read all bits and all tokens, to version 3."""
    for key in ("drafters", "lost"):
        for i, drafter in enumerate(old[key]):
            later = [name for name in ("weights", "vocabulary", "experts") if name in drafter]
            if later:
                raise ProfileError(
                    f"it says schema_version 2 but has {key}[{i}].{later[0]}, which version 2 did "
                    "not know; remove it"
                )
    return {**old, "schema_version": 3}


# Key path in version 1 -> key path in version 0.
_PATHS_IN_VERSION_0: dict[KeyPath, KeyPath] = {
    ("model", "id"): ("model",),
    ("model", "family"): ("architecture",),
    ("model", "n_layers"): ("layers",),
    ("task", "name"): ("task",),
    ("drafter", "attn"): ("skip", "attention"),
    ("drafter", "mlp"): ("skip", "mlp"),
    ("drafter",): ("skip",),
    ("exit", "threshold"): ("exit_threshold",),
    ("provenance", "searcher"): ("searcher",),
}


def path_in_version(path: KeyPath, version: int) -> KeyPath:
    """Return the key path in a file of that version for `path` of the current version."""
    if version < 2 and len(path) > 1 and path[0] in ("drafters", "lost"):
        path = path[2:] if path[2:3] in (("draft_length",), ("exit",)) else ("drafter", *path[2:])
    if version < 1:
        for prefix, old_prefix in _PATHS_IN_VERSION_0.items():
            if path[: len(prefix)] == prefix:
                return old_prefix + path[len(prefix) :]
    return path


MIGRATIONS: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    0: _from_0,
    1: _from_1,
    2: _from_2,
}
