"""Store the results of load checks, so that they are not repeated for the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TypeVar

from skipsearch.core.files import cache_dir, hash_facts, make_private_dir, write_atomically
from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.models.adapter import ModelSpec
from skipsearch.models.check import CheckableAdapter, CheckResult, check_against
from skipsearch.models.reference import ReferenceOutput, record_reference_from

PACKAGE = Path(__file__).parents[1]
SOURCES = ("*.py", "*.cpp", "*.h")

AnyAdapter = TypeVar("AnyAdapter", bound=CheckableAdapter)


def load_check_result(spec: ModelSpec, compiled: str = "") -> CheckResult | None:
    """Return the stored result for the same weights, config, engine and code, or None.

    compiled: hash of the engine's machine code; empty if it has none."""
    if spec.weights_sha256 is None:  # the weights cannot be identified
        return None
    try:
        data = json.loads(_result_path(spec, compiled).read_text("utf-8"))
        return CheckResult(**data)
    except (
        OSError,
        ValueError,
        TypeError,
    ):  # no file, or a damaged one: the model is checked again
        return None


def save_check_result(spec: ModelSpec, result: CheckResult, compiled: str = "") -> None:
    """Store a result. If the disk is full, nothing is stored and the next load checks again."""
    if spec.weights_sha256 is None:
        return
    path = _result_path(spec, compiled)
    try:
        make_private_dir(path.parent)
        write_atomically(path, json.dumps(asdict(result)).encode())
    except OSError:
        return


def build_checked(
    spec: ModelSpec,
    record: Callable[[], ReferenceOutput],
    build: Callable[[], AnyAdapter],
    compiled: str = "",
) -> AnyAdapter:
    """Build a model, and check it unless a result is stored.

    spec: of the model that `build` returns. record: returns the logits to compare with; it is
    called before `build`, which may take over the weights. compiled: as in `load_check_result`.
    Raises: ModelError if the logits differ; MemoryError, torch.OutOfMemoryError.
    """
    is_known = load_check_result(spec, compiled) is not None
    reference = None if is_known else record()
    model = build()
    if reference is not None:
        save_check_result(spec, check_against(model, reference), compiled)
    return model


def check_engine(
    spec: ModelSpec,
    checked_model: Callable[[], CheckableAdapter],
    build: Callable[[], AnyAdapter],
    compiled: str = "",
) -> AnyAdapter:
    """Build a model for another engine, as `build_checked` does.

    checked_model: returns the model under the engine that was checked at load.
    """
    return build_checked(spec, lambda: record_reference_from(checked_model()), build, compiled)


def _result_path(spec: ModelSpec, compiled: str) -> Path:
    """Return the path of a stored result.

    Weights are identified by the hash of their files, not by path or modification time.
    """
    facts = [
        spec.family,
        spec.weights_sha256,
        spec.config_sha256,
        spec.dtype_name,
        str(spec.device),
        spec.quantization,
        spec.n_devices,
        spec.engine,
        software_versions(),
        describe_machine(spec.device).name,
        hash_own_code(),
        compiled,
    ]
    key = hash_facts(facts)
    return cache_dir() / "checked" / f"{key}.json"


@cache
def hash_own_code() -> str:
    """Return the hash of all sources of this package."""
    return code_hash(PACKAGE)


def code_hash(package: Path) -> str:
    """Return a hash of all sources of a package.

    A list of relevant files would become outdated.
    """
    total = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in package.rglob(pattern)):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(package)} {digest}\n".encode())
    return total.hexdigest()
