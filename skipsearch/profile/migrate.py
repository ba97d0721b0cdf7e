"""From an older schema version to the current one: a chain of pure functions, each one version up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skipsearch.errors import ProfileError
from skipsearch.profile.schema import SCHEMA_VERSION
from skipsearch.strict_yaml import KeyPath


def migrate(data: Any) -> dict[str, Any]:
    """A profile's plain data, of whatever version, as data of the current version. The argument stays as it was.

    Raises: ProfileError (without the file's name) if it has no version, a newer one, or lacks what its version must have.
    """
    if not isinstance(data, dict):
        raise ProfileError("a profile is a map that starts with schema_version, not a list or a single value")
    version = data.get("schema_version")
    if type(version) is not int or version < 0:
        raise ProfileError(f"schema_version must be a whole number from 0 to {SCHEMA_VERSION}; without it this is no profile")
    if version > SCHEMA_VERSION:
        raise ProfileError(f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest this skipsearch reads; "
                           "update skipsearch (pip install --upgrade skipsearch)")
    for step in range(version, SCHEMA_VERSION):
        try:
            data = MIGRATIONS[step](data)
        except (KeyError, TypeError, AttributeError) as error:
            what = f"lacks {error.args[0]}" if isinstance(error, KeyError) else "has a value of the wrong kind"
            raise ProfileError(f"it says schema_version {step} but {what}; fix it, or tune again") from None
    return data


def _from_0(old: Mapping[str, Any]) -> dict[str, Any]:
    """Version 0 named a model, two lists and a threshold. Nothing it could say counts as measured today."""
    threshold = old["exit_threshold"]
    return {
        "schema_version": 1,
        "model": {"id": old["model"], "revision": None, "family": old["architecture"], "n_layers": old["layers"],
                  "config_sha256": None, "weights_sha256": None, "dtype": None, "quantization": None},
        "task": {"name": old["task"], "version": None, "calibration_sha256": None,
                 "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}},
        "hardware": None,
        "engine": None,
        "verdict": "unmeasured",
        "drafter": {"kind": "skip", "attn": old["skip"]["attention"], "mlp": old["skip"]["mlp"]},
        "draft_length": old["draft_length"],
        "exit": {"kind": "fixed"} if threshold is None else {"kind": "confidence", "threshold": threshold},
        "measured": None,
        "software": None,
        "provenance": {"searcher": old["searcher"], "objective": None, "seed": None, "trials": None, "search_seconds": None,
                       "created": None, "commit": None},
    }


def _from_1(old: Mapping[str, Any]) -> dict[str, Any]:
    """Version 1 had one drafter, its mask, with draft length and exit beside it. Of a plain verdict it was the candidate that lost."""
    drafter, length, exit_policy, plain = old["drafter"], old["draft_length"], old["exit"], old["verdict"] == "plain"
    if not isinstance(drafter, dict) or not isinstance(exit_policy, dict):
        raise TypeError
    later = [key for key in ("drafters", "lost") if key in old] + [f"drafter.{key}" for key in ("draft_length", "exit") if key in drafter]
    if later:
        raise ProfileError(f"it says schema_version 1 but has {later[0]}, which version 1 did not know; remove it")
    nothing = plain and length == 0 and not drafter.get("attn") and not drafter.get("mlp")
    drafters = [] if nothing else [{**drafter, "draft_length": length, "exit": exit_policy}]
    new: dict[str, Any] = {}
    for key, value in old.items():
        if key == "drafter":
            new |= {"drafters": [] if plain else drafters, "lost": drafters if plain else []}
        elif key not in ("draft_length", "exit"):
            new[key] = value
    return new | {"schema_version": 2}


# What version 1 called it -> what version 0 did.
_IN_VERSION_0: dict[KeyPath, KeyPath] = {
    ("model", "id"): ("model",), ("model", "family"): ("architecture",), ("model", "n_layers"): ("layers",), ("task", "name"): ("task",),
    ("drafter", "attn"): ("skip", "attention"), ("drafter", "mlp"): ("skip", "mlp"), ("drafter",): ("skip",),
    ("exit", "threshold"): ("exit_threshold",), ("provenance", "searcher"): ("searcher",)}


def as_written(path: KeyPath, version: int) -> KeyPath:
    """The key path by which a file of that version has what stands at `path` in the current one."""
    if version < 2 and len(path) > 1 and path[0] in ("drafters", "lost"):
        path = path[2:] if path[2:3] in (("draft_length",), ("exit",)) else ("drafter", *path[2:])
    if version < 1:
        known = next((known for known in _IN_VERSION_0 if path[:len(known)] == known), None)
        path = _IN_VERSION_0[known] + path[len(known):] if known else path
    return path


MIGRATIONS: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {0: _from_0, 1: _from_1}
