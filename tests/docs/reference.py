"""Reference pages made from the code: every key of a profile, and the public Python names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from skipsearch.profile import Profile
from skipsearch.serve.messages import IGNORED_MESSAGE_FIELDS, Message
from skipsearch.serve.protocol import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
)

MAX_LINE = 80  # a longer signature has one argument a line
TOP = "The profile"
# Headings of the parts of a profile whose class names are no words of the file.
HEADINGS = {
    "ASD": "asd",
    "Adapted": "adapted",
    "CLaSp": "clasp",
    "Kangaroo": "kangaroo",
    "Lookup": "lookup",
    "S3D": "s3d",
    "SWIFT": "swift",
    "Skip": "skip",
}


def profile_keys() -> str:
    """A section for each object of a profile, with a table of its keys."""
    schema = Profile.model_json_schema()
    return "\n".join(_sections(schema)) + "\n"


def request_fields() -> str:
    """Which fields of a request are carried out, ignored or refused."""
    chat, text = ChatCompletionRequest.model_fields, CompletionRequest.model_fields
    rows = {
        "carried out": [name for name in chat if name in text],
        "carried out by `/v1/chat/completions`": [name for name in chat if name not in text],
        "carried out by `/v1/completions`": [name for name in text if name not in chat],
        "carried out in a message": list(Message.model_fields),
        "ignored": sorted(IGNORED_FIELDS),
        "ignored in a message": sorted(IGNORED_MESSAGE_FIELDS),
        "ignored in a part of a message, and in a tool": ["cache_control"],
    }
    lines = ["| what happens | fields |", "|---|---|"]
    lines += [f"| {key} | {', '.join(f'`{n}`' for n in names)} |" for key, names in rows.items()]
    refused = ", ".join(
        f"`{name}` ({' or '.join(f'`{json.dumps(value)}`' for value in values)})"
        if values
        else f"`{name}`"
        for name, values in NEUTRAL_VALUES.items()
    )
    lines.append(f"| refused with any value but null and the one given here | {refused} |")
    lines.append("| refused with any value but null | every other field |")
    return "\n".join(lines) + "\n"


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    objects = {TOP: schema} | schema["$defs"]
    for name in [TOP, *sorted(schema["$defs"], key=str.lower)]:
        properties = objects[name].get("properties")
        if not properties:
            continue
        heading = f"`kind: {HEADINGS[name]}`" if name in HEADINGS else name
        yield f"## {heading}\n"
        yield "| key | value | meaning |\n|---|---|---|"
        required = objects[name].get("required", ())
        for key, entry in properties.items():
            optional = "" if key in required or key == "kind" else " (may be left out)"
            meaning = entry.get("description", "").replace("|", r"\|")
            yield f"| `{key}` | {_value(entry)}{optional} | {meaning} |"
        yield ""


def _value(entry: dict[str, Any]) -> str:
    """The values that a key may have, in a few words."""
    if "const" in entry:
        return f"`{entry['const']}`"
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        heading = HEADINGS.get(name)
        anchor = f"kind-{heading}" if heading else name.lower()
        return f"[{heading or name}](#{anchor})"
    parts = entry.get("anyOf") or entry.get("oneOf")
    if parts:
        return " or ".join(dict.fromkeys(_value(part) for part in parts))
    if entry.get("type") == "array":
        items = entry.get("items", {})
        return f"list of {_value(items)}" if items else "list"
    return str(entry.get("type", "any")).replace("null", "`null`")
