"""From a file, or its bytes, to a `Profile`; whatever is wrong comes out as one sentence with file, line, key and rule."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skipsearch.errors import ProfileError
from skipsearch.names import near_file
from skipsearch.profile.dump import as_dict
from skipsearch.profile.migrate import as_written, migrate
from skipsearch.profile.schema import Profile
from skipsearch.strict_yaml import MAX_BYTES, Document, KeyPath, read_yaml, where


def load_profile(path: str | Path) -> Profile:
    """Read a profile file. Old schema versions are migrated in memory; the file stays as it is.

    Raises: ProfileError if it is missing, is not a regular file (links are not followed), or is not a valid profile.
    """
    return parse_profile(read_file(path), str(path)).at(Path(path).absolute().parent)


def parse_profile(content: bytes, name: str) -> Profile:
    """As `load_profile`, for bytes that are already here; `name` stands for the file in errors."""
    document = read_yaml(content, name)
    try:
        data = migrate(document.data)
    except ProfileError as error:
        line = document.lines.get(("schema_version",), 1)
        raise ProfileError(f"{where(name, line)}: {error}") from None
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(_explain(error, data, document, name)) from None
    path = _not_written(as_dict(profile), data)
    if path:   # a default of today, which may be another one tomorrow
        path, line = _place(document, path)
        raise ProfileError(f"{where(name, line, path)}: {_PLAINER['missing']}")
    return profile


def _not_written(whole: Any, written: Any) -> KeyPath:
    """The path of a key that a profile has and its file does not; () if there is none."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            if key not in written:
                return (key,)
            if below := _not_written(value, written[key]):
                return (key, *below)
    elif isinstance(whole, list):
        for i, value in enumerate(whole):
            if below := _not_written(value, written[i]):
                return (i, *below)
    return ()


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file, at most one more than a profile may have; neither links nor pipes are followed.

    Raises: ProfileError saying what the path is instead.
    """
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ProfileError(f"{path}: there is no such file or folder; {near_file(path)}`skipsearch profile list` shows the profiles "
                           "there are") from None
    except (OSError, ValueError) as error:
        if os.path.islink(path):
            raise ProfileError(f"{path}: this is a symbolic link, and links are not followed; name the file itself") from None
        raise ProfileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = "folder" if stat.S_ISDIR(mode) else "device or pipe"
            raise ProfileError(f"{path}: this is a {kind}; a profile is a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from None
    finally:
        os.close(handle)


_A_MAP = "it should be a map of keys"
_PLAINER = {  # where pydantic's own words are about Python
    "model_type": _A_MAP,
    "model_attributes_type": _A_MAP,
    "tuple_type": "it should be a list",
    "int_type": "it should be a whole number",
    "float_type": "it should be a number",
    "string_type": "it should be text; put it in quotes",
    "missing": "this key is missing; write every key, with null where there is no value",
    "union_tag_not_found": "it has no kind",
}


def _explain(error: ValidationError, data: dict[str, Any], document: Document, name: str) -> str:
    """One sentence about the first thing that is wrong, in the order of the file; a wrong key before what it leaves missing."""
    details = error.errors(include_url=False)
    missing = [detail["loc"] for detail in details if detail["type"] == "missing"]
    paths, lines = zip(*(_place(document, _path(data, detail)) for detail in details), strict=True)
    first = min(range(len(details)), key=lambda i: (lines[i], details[i]["type"] != "extra_forbidden"))
    meant = {_meant(detail, missing) for detail in details}
    others = sum(detail is not details[first] and (detail["type"] != "missing" or detail["loc"] not in meant) for detail in details)
    more = f" (and {others} more)" if others else ""
    return f"{where(name, lines[first], paths[first])}: {broken(details[first], missing)}{more}"


def _meant(detail: ErrorDetails, missing: Sequence[tuple[int | str, ...]]) -> tuple[int | str, ...] | None:
    """The missing key that an unknown one was meant to be; None if none is near."""
    if detail["type"] != "extra_forbidden":
        return None
    *parent, wrong = detail["loc"]
    near = get_close_matches(str(wrong), [str(loc[-1]) for loc in missing if list(loc[:-1]) == parent], n=1)
    return (*parent, near[0]) if near else None


def _path(data: Any, detail: ErrorDetails) -> KeyPath:
    """The key path as the file has it: pydantic also names the chosen kind of a union, which is no key."""
    path: list[str | int] = []
    beyond = str(detail.get("ctx", {}).get("key", ""))
    below = [int(key) if key.isdecimal() else key for key in beyond.split(".")] if beyond else []
    chosen = False   # whether the kind of the map that was reached has been named
    for key in [*detail["loc"], *below]:
        if isinstance(data, dict) and not chosen and key == data.get("kind"):
            chosen = True
            continue
        if isinstance(data, dict) and key in data:
            data, chosen = data[str(key)], False
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data, chosen = data[key], False
        elif detail["type"] != "missing" or key != detail["loc"][-1]:
            continue
        path.append(key)
    return tuple(path)


def _place(document: Document, path: KeyPath) -> tuple[KeyPath, int]:
    """A key path as the file's own version has it, and its line or, for a key that is missing, the line of the nearest thing around it."""
    path = near = as_written(path, document.data["schema_version"])
    while near not in document.lines and near:
        near = near[:-1]
    return path, document.lines.get(near, 1)


def broken(detail: ErrorDetails, missing: Sequence[tuple[int | str, ...]] = ()) -> str:
    """What stands there and the rule it breaks, in a profile's words; `missing` are the keys that a wrong one may have meant."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        meant = _meant(detail, missing)
        return f"unknown key; did you mean {meant[-1]}?" if meant else "unknown key; remove it, or update skipsearch"
    if kind == "union_tag_invalid":
        known = str(detail["ctx"]["expected_tags"])
        near = get_close_matches(str(detail["ctx"]["tag"]), re.findall(r"'(\w+)'", known), n=1)
        return f"its kind must be one of {known}{f'; did you mean {near[0]}?' if near else ''}"
    if kind == "too_long":
        return f"there are too many; {detail['ctx']['max_length']} are the most"
    rule = _PLAINER.get(kind) or detail["msg"].removeprefix("Value error, ")
    if kind in ("missing", "rule", "union_tag_not_found"):
        return rule
    shown = json.dumps(detail["input"], default=str)
    rule = rule.replace("Input should", "it should").replace("String should", "it should")
    return f"{shown if len(shown) <= 60 else shown[:60] + '…'} stands here; {rule}"
