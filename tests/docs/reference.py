"""Reference pages made from the code: every key of a profile, and the public Python names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import skipsearch
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


def python_names() -> str:
    """Each public name of the package, with its signature and its docstring."""
    sections = []
    for name in sorted(skipsearch.__all__, key=str.lower):
        value = getattr(skipsearch, name)
        if not callable(value):  # __version__
            continue
        sections.append(f"## ss.{name}\n\n```text\n{_signature(name, value)}\n```\n")
        if not inspect.isclass(value):
            continue
        for method, member in vars(value).items():
            if isinstance(member, property) and not method.startswith("_"):
                sections.append(f"```text\n{_property(f'{name}.{method}', member)}\n```\n")
            if method.startswith("_") or not callable(getattr(value, method)):
                continue
            shown = getattr(value, method) if isinstance(member, classmethod) else member
            if inspect.getdoc(shown) and inspect.isroutine(shown):
                sections.append(f"```text\n{_signature(f'{name}.{method}', shown)}\n```\n")
    return "\n".join(sections)


def _signature(name: str, value: Any) -> str:
    """`name(arguments)`, and the docstring below it."""
    doc = inspect.getdoc(value) or ""
    if inspect.isclass(value) and (
        issubclass(value, Exception | BaseModel) or getattr(value, "_is_protocol", False)
    ):
        return f"{name}\n\n{doc}"
    signature = inspect.signature(value)
    arguments = list[str]()
    for argument in signature.parameters.values():
        has_star = any(one.startswith("*") for one in arguments)
        if argument.kind is argument.KEYWORD_ONLY and not has_star:
            arguments.append("*")
        arguments.append(_argument(argument))
    line = f"{name}({', '.join(arguments)})"
    if len(line) > MAX_LINE:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    result = signature.return_annotation
    returns = f" -> {result}" if isinstance(result, str) and not inspect.isclass(value) else ""
    return f"{line}{returns}\n\n{doc}".strip()


def _property(name: str, value: property) -> str:
    """`name -> annotation`, and the docstring below it."""
    annotation = inspect.signature(value.fget).return_annotation if value.fget else "Any"
    return f"{name} -> {annotation}\n\n{inspect.getdoc(value) or ''}".strip()


def _argument(argument: inspect.Parameter) -> str:
    """`name: annotation = default`; a function as a default is written by its name."""
    stars = {argument.VAR_POSITIONAL: "*", argument.VAR_KEYWORD: "**"}.get(argument.kind, "")
    annotation = argument.annotation
    typed = "" if annotation is argument.empty else f": {annotation}"
    default = argument.default
    if default is argument.empty:
        return f"{stars}{argument.name}{typed}"
    shown = "…" if "<" in repr(default) else repr(default)
    return f"{argument.name}{typed} = {shown}"
