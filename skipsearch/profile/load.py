"""Load a profile from a file or bytes. An error is one sentence with file, line, key and rule."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skipsearch.core.files import IrregularFileError, open_regular
from skipsearch.core.registry import did_you_mean_file
from skipsearch.core.strict_yaml import MAX_BYTES, Document, KeyPath, format_location, read_yaml
from skipsearch.errors import ProfileError
from skipsearch.profile.canonical import to_plain_data
from skipsearch.profile.schema import SCHEMA_VERSION, Profile


def load_profile(path: str | Path) -> Profile:
    """Read a profile file.

    Raises: ProfileError if the file is missing, is not a regular file (links are not followed), or
    is not a valid profile.
    """
    return parse_profile(read_file(path), str(path)).located_in(Path(path).absolute().parent)


def parse_profile(content: bytes, name: str) -> Profile:
    """Read a profile from bytes. name: of their file, for errors. Raises: ProfileError."""
    document = read_yaml(content, name)
    if problem := _find_version_problem(document.data):
        line = document.lines.get(("schema_version",), 1)
        raise ProfileError(f"{format_location(name, line)}: {problem}")
    data = document.data
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(_explain(error, data, document, name)) from None
    path = _missing_key(to_plain_data(profile), data)
    if path:  # a default may change, so the file must contain the value
        line = _find_line(document, path)
        raise ProfileError(f"{format_location(name, line, path)}: {_MESSAGES['missing']}")
    return profile


def _find_version_problem(data: Any) -> str:
    """Return why data are not a profile of the current version; empty if they are."""
    if not isinstance(data, dict):
        return "a profile is a map that starts with schema_version, not a list or a single value"
    version = data.get("schema_version")
    if type(version) is not int:
        return f"schema_version must be {SCHEMA_VERSION}; without it this is no profile"
    if version > SCHEMA_VERSION:
        return (
            f"schema_version {version} is newer than {SCHEMA_VERSION}, which this skipsearch "
            "reads; update skipsearch (pip install --upgrade skipsearch)"
        )
    if version < SCHEMA_VERSION:
        return (
            f"schema_version {version} was never released, and this skipsearch reads "
            f"{SCHEMA_VERSION}; tune again"
        )
    return ""


def _missing_key(complete: Any, stored: Any) -> KeyPath:
    """Return the path of the first key that a profile has and its file lacks; () if none."""
    if isinstance(complete, dict):
        for key, value in complete.items():
            if key not in stored:
                return (key,)
            if path := _missing_key(value, stored[key]):
                return (key, *path)
    elif isinstance(complete, list):
        for i, value in enumerate(complete):
            if path := _missing_key(value, stored[i]):
                return (i, *path)
    return ()


def read_file(path: str | Path) -> bytes:
    """Read a regular file; links are not followed.

    At most one byte more than the size limit of a profile is read. Raises: ProfileError, which
    names what the path is instead.
    """
    try:
        with open_regular(path, follow_links=False) as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ProfileError(
            f"{path}: there is no such file or folder; {did_you_mean_file(path)}`skipsearch "
            "profile list` shows the profiles there are"
        ) from None
    except IrregularFileError as error:
        raise ProfileError(f"{path}: {error}; a profile is a regular file") from None
    except (OSError, ValueError) as error:
        if os.path.islink(path):
            raise ProfileError(
                f"{path}: this is a symbolic link, and links are not followed; name the file itself"
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise ProfileError(f"{path}: cannot be read: {reason}") from None


_MAP_EXPECTED = "it should be a map of keys"
_MESSAGES = {  # replace pydantic's messages that are about Python
    "model_type": _MAP_EXPECTED,
    "model_attributes_type": _MAP_EXPECTED,
    "tuple_type": "it should be a list",
    "int_type": "it should be a whole number",
    "float_type": "it should be a number",
    "string_type": "it should be text; put it in quotes",
    "missing": "this key is missing; write every key, with null where there is no value",
    "union_tag_not_found": "it has no kind",
}


def _explain(error: ValidationError, data: dict[str, Any], document: Document, name: str) -> str:
    """Return one sentence about the first error in the order of the file.

    A misspelled key is reported instead of the key that is missing because of it.
    """
    details = error.errors(include_url=False)
    missing = [detail["loc"] for detail in details if detail["type"] == "missing"]
    paths = [_key_path(data, detail) for detail in details]
    lines = [_find_line(document, path) for path in paths]
    first = min(
        range(len(details)), key=lambda i: (lines[i], details[i]["type"] != "extra_forbidden")
    )
    misspelled = {_intended_key(detail, missing) for detail in details}
    others = sum(
        detail is not details[first]
        and (detail["type"] != "missing" or detail["loc"] not in misspelled)
        for detail in details
    )
    location = format_location(name, lines[first], paths[first])
    more = f" (and {others} more)" if others else ""
    return f"{location}: {explain_detail(details[first], missing)}{more}"


def _intended_key(
    detail: ErrorDetails, missing: Sequence[tuple[int | str, ...]]
) -> tuple[int | str, ...] | None:
    """Return the missing key of which an unknown key is probably a misspelling; None if none is."""
    if detail["type"] != "extra_forbidden":
        return None
    *parent, wrong = detail["loc"]
    matches = get_close_matches(
        str(wrong), [str(loc[-1]) for loc in missing if list(loc[:-1]) == parent], n=1
    )
    return (*parent, matches[0]) if matches else None


def _key_path(data: Any, detail: ErrorDetails) -> KeyPath:
    """Return the path, in the file, of the key that a pydantic error is about.

    Pydantic's `loc` also contains the tag of a tagged union, which is not a key of the file; it is
    left out. Errors of our own validators (`broken_rule`) name a key relative to the validated map;
    it is appended.
    """
    path: list[str | int] = []
    rule_key = str(detail.get("ctx", {}).get("key", ""))
    rule_path = [int(key) if key.isdecimal() else key for key in filter(None, rule_key.split("."))]
    kind_passed = False  # whether `loc` has already named the tag of the current map
    for key in [*detail["loc"], *rule_path]:
        if isinstance(data, dict) and not kind_passed and key == data.get("kind"):
            kind_passed = True
            continue
        if isinstance(data, dict) and key in data:
            data, kind_passed = data[str(key)], False
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data, kind_passed = data[key], False
        elif detail["type"] != "missing" or key != detail["loc"][-1]:
            continue
        path.append(key)
    return tuple(path)


def _find_line(document: Document, path: KeyPath) -> int:
    """Return the line of a key; that of the innermost map around it, if the key is missing."""
    while path not in document.lines and path:
        path = path[:-1]
    return document.lines.get(path, 1)


def explain_detail(detail: ErrorDetails, missing: Sequence[tuple[int | str, ...]] = ()) -> str:
    """Return the value and the rule that it breaks.

    missing: key paths that the file lacks; an unknown key may be a misspelling of one.
    """
    kind = detail["type"]
    if kind == "extra_forbidden":
        intended = _intended_key(detail, missing)
        return (
            f"unknown key; did you mean {intended[-1]}?"
            if intended
            else "unknown key; remove it, or update skipsearch"
        )
    if kind == "union_tag_invalid":
        kinds = str(detail["ctx"]["expected_tags"])
        matches = get_close_matches(str(detail["ctx"]["tag"]), re.findall(r"'(\w+)'", kinds), n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        return f"its kind must be one of {kinds}{hint}"
    if kind == "too_long":
        return f"there are too many; {detail['ctx']['max_length']} are the most"
    rule = _MESSAGES.get(kind) or detail["msg"].removeprefix("Value error, ")
    if kind in ("missing", "rule", "union_tag_not_found"):
        return rule
    shown = json.dumps(detail["input"], default=str)
    rule = rule.replace("Input should", "it should").replace("String should", "it should")
    return f"{shown if len(shown) <= 60 else shown[:60] + '…'} stands here; {rule}"
