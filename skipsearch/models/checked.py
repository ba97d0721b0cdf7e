"""Checks of models that were made before, so that loading the same files again does not repeat them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from skipsearch.machine import cache_folder, make_folder, software, write_whole
from skipsearch.models.check import Finding
from skipsearch.models.spec import ModelSpec


def kept_finding(spec: ModelSpec) -> Finding | None:
    """What was found for the same weights and config, driven by the same code in the same way; None if nothing was."""
    try:
        data = json.loads(_path(spec).read_text("utf-8"))
        return Finding(**data)
    except (OSError, ValueError, TypeError):   # none yet, or damaged: the model is checked again
        return None


def keep(spec: ModelSpec, finding: Finding) -> None:
    """Where there is no room, the next load checks again."""
    try:
        make_folder(_path(spec).parent)
        write_whole(_path(spec), json.dumps(asdict(finding)).encode())
    except OSError:
        return


def _path(spec: ModelSpec) -> Path:
    """Weights by the hash of their files, so that no path or time of change has to be believed."""
    facts = [spec.family, spec.weights_sha256, spec.config_sha256, spec.dtype_name, str(spec.device), spec.quantization, spec.n_devices,
             spec.engine, software(), _own_code()]
    return cache_folder() / "checked" / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"


@cache
def _own_code() -> str:
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
