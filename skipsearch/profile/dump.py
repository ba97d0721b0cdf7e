"""The canonical text of a profile, and the one way to put it on disk: whole or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from skipsearch.errors import ProfileError, SkipSearchError
from skipsearch.profile.schema import Profile
from skipsearch.strict_yaml import reads_as_text

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _./+()-]*")
_RECIPES = ("drafters", "lost")   # each drafter on a line of its own
_LAST = ("draft_length", "exit")


def dump_profile(profile: Profile) -> str:
    """YAML with fixed key order, alignment and quoting: equal profiles give equal bytes, and a changed value changes one line."""
    lines: list[str] = []
    for key, value in as_dict(profile).items():
        if key in _RECIPES and value:
            lines += [f"{key}:", *(f"  - {flow(drafter)}" for drafter in value)]
        elif key == "measured" and value is not None:
            lines.append("measured:")
            lines += [f"  {_entry(name, part, 22 if _is_interval(part) else 0)}" for name, part in value.items()]
        else:
            lines.append(_entry(key, value, 11))
    return "\n".join(lines) + "\n"


def as_dict(profile: Profile) -> dict[str, Any]:
    """The profile as plain data (dict, list, str, int, float, None) in the order of its keys, as `--json` prints it."""
    data = profile.model_dump(mode="json")
    return data | {key: [_what_it_is_first(drafter) for drafter in data[key]] for key in _RECIPES}


def _what_it_is_first(drafter: dict[str, Any]) -> dict[str, Any]:
    """A drafter's keys in the order in which they are written: its kind and what is its own, then how long it drafts."""
    return {key: drafter[key] for key in sorted(drafter, key=lambda key: _LAST.index(key) if key in _LAST else -1)}


def save_profile(profile: Profile, path: str | Path, replace: bool = False) -> None:
    """Write `dump_profile(profile)` to `path`, making its folders; a reader sees the old file or the new one, never a part.

    replace: a file that says something else may be there already.
    Raises: ProfileError if one is there and may not be replaced, or the file cannot be written; nothing half-written is left behind.
    """
    text, target = dump_profile(profile), Path(path)
    if not replace and target.is_file() and target.read_bytes() != text.encode():
        raise ProfileError(f"{target} exists already and says something else: pass replace=True, or write another file")
    save_text(text, target)


def check_writable(target: Path, replace: bool, error: type[SkipSearchError] = ProfileError, option: str = "--out",
                   inputs: Mapping[str, Iterable[Path]] = MappingProxyType({}), way_out: str = "") -> None:
    """Find out before the work, not after it, that its result cannot be kept; makes the folder. replace: a file that exists is no matter.

    option: what named the target; inputs: files that must not be lost to it, by the option that named them; way_out: said first where a
    file exists.
    Raises: `error`.
    """
    if target.is_dir():
        raise error(f"{option} {target} is a folder; name the file to write")
    for named_by, files in inputs.items():
        if any(_same(target, file) for file in files):
            raise error(f"{option} {target} is the file of {named_by}, which would be lost: write another with {option}")
    if target.exists() and not target.is_file():
        raise error(f"{option} {target} is a device or pipe; name a file to write")
    if target.exists() and not replace:
        raise error(f"{target} exists already: {way_out}replace it with --force, or write another with {option}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise error(f"the folder {target.parent} cannot be made ({cause.strerror}): choose another with {option}") from None
    if not os.access(target.parent, os.W_OK):
        raise error(f"the folder {target.parent} may not be written to: choose another with {option}")


def _same(target: Path, file: Path) -> bool:
    """Whether both are one file, by whatever links; one that is not there yet, by its place."""
    with suppress(OSError):
        return os.path.samefile(target, file)
    return os.path.realpath(target) == os.path.realpath(file)


def save_text(text: str, path: Path, error: type[SkipSearchError] = ProfileError) -> None:
    """As `save_profile`, for text that is ready. Raises: `error`."""
    save_bytes(text.encode("utf-8"), path, error)


def save_bytes(content: bytes, path: Path, error: type[SkipSearchError] = ProfileError) -> None:
    """As `save_profile`, for any content. Raises: `error`."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a crash right after the rename must not leave an empty file
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()
    except OSError as cause:
        raise error(f"cannot write {path}: {cause.strerror or cause}; make room there, or choose another place") from cause


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and "ci95" in value


def _entry(key: str, value: Any, width: int) -> str:
    return f"{key + ':':<{width}} {flow(value)}"


def flow(value: Any) -> str:
    """Plain data in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and _is_text_to_all(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        digits = repr(value)
        return digits.replace("e", ".0e") if "e" in digits and "." not in digits else digits  # YAML 1.1 wants the point
    return json.dumps(value)


def _is_text_to_all(text: str) -> bool:
    """Whether this plain scalar is text to our reader and to those that still follow YAML 1.1 (`yes`, `2026-01-31`, `012`)."""
    candidates = yaml.SafeLoader.yaml_implicit_resolvers.get(text[0], [])
    return reads_as_text(text) and not any(pattern.match(text) for _, pattern in candidates)
