"""The forms in which models write calls of tools: how to write them, and how to force them.

A form is data; `formats/` has one file for each. `call_reader.py` reads calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex as re

from skipsearch.core.closed_schema import close_objects
from skipsearch.core.constraint import JSON_STYLE, Constraint

Tool = Mapping[str, Any]  # as in OpenAI's field `tools`
MAX_CALLS = 16  # of one answer that must call tools; a small model may not find an end
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# A name in a call, which is not JSON text: no space, quote or bracket.
NAME = r"""[^\s"'\\<>\[\](){}|,]{1,64}"""
# Other parts of a call: as a model writes them, and as a grammar of llguidance does.
IDS = {"$number": (r"\d+", "/[0-9]+/"), "$id": (r"[\w.:-]+", "/[a-zA-Z0-9]{9}/")}


@dataclass(frozen=True)
class Fields:
    """Arguments that are written as a list of fields, and not as JSON.

    field: `$key`, and `$value` after it. Without `quote`, a string ends where the fixed text after
    `$value` begins, and of white space only a newline may be next to `$value`: all other is a part
    of the string. separator: between fields; without `quote` it is white space.
    quote: fixed text on both sides of a string, which no string contains. Fields are then a JSON
    object without its brackets, in which keys have no quotes: `$key:$value`, commas between them.
    Raises: ValueError for a field that breaks these rules.
    """

    field: str
    separator: str = ""
    quote: str = ""

    def __post_init__(self) -> None:
        has_order = re.fullmatch(r"[^$]*\$key[^$]+\$value[^$]*", self.field) is not None
        is_object = (self.field, self.separator.strip()) == ("$key:$value", ",")
        if not has_order or not (is_object if self.quote else self._has_readable_ends()):
            raise ValueError(
                f"a field is {self.field!r}, between them {self.separator!r}: it has $key and then "
                "$value; with a quote, it is '$key:$value' between commas; without one, fixed text "
                "is at its end, white space between fields, and at most a newline next to $value"
            )

    def _has_readable_ends(self) -> bool:
        _, between, after = self.parts
        before_value, after_value = between[len(between.rstrip()) :], after[: -len(after.lstrip())]
        is_lone = {before_value, after_value} <= {"", "\n"}
        return bool(after.strip()) and is_lone and not self.separator.strip()

    @property
    def parts(self) -> tuple[str, str, str]:
        """The text before a key, between the key and the value, and after the value."""
        before, rest = self.field.split("$key")
        return (before, *rest.split("$value"))  # type: ignore[return-value]

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as the model writes them."""
        return self.separator.join(
            self.field.replace("$key", key).replace("$value", self._write_value(value))
            for key, value in arguments.items()
        )

    def _write_value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class ToolFormat:
    """One form of calls.

    call: a call with `$name`, perhaps `$number` or `$id`, and `$arguments`, after which is only
    fixed text. White space in it is optional when it is read. If arguments are fields, a mark ends
    the call.
    template_marks: a chat template that contains every one of these texts is of this form. also:
    other forms of a call that are read. begin, separator, end: before, between and after the calls
    of an answer. fields: None if arguments are JSON. fences: texts before and after JSON that is a
    call if it fits a tool. dropped: an expression of text that is no content. trigger: the text
    with which `begin`, or else `call`, starts, as long as other text never has it; "": there is
    none.
    Raises: ValueError for a call or a trigger that breaks these rules.
    """

    name: str
    call: str
    template_marks: tuple[str, ...]
    also: tuple[str, ...] = ()
    begin: str = ""
    separator: str = ""
    end: str = ""
    fields: Fields | None = None
    fences: tuple[tuple[str, str], ...] = ()
    dropped: str = ""
    trigger: str = ""

    def __post_init__(self) -> None:
        start = self.begin or self.call
        if not start.startswith(self.trigger) or "$" in self.trigger:
            raise ValueError(
                f"the trigger of the form {self.name} is {self.trigger!r}: it is fixed text with "
                f"which {start!r} starts"
            )
        for call in (self.call, *self.also):
            parts = set(re.findall(r"\$\w+", call))
            has_order = re.search(r"\$name.*\$arguments", call, re.DOTALL)
            before, _, after = call.partition("$arguments")
            if not has_order or parts - {"$name", "$arguments", *IDS} or "$" in after:
                raise ValueError(
                    f"a call of the form {self.name} is {call!r}: it has $name, then $arguments "
                    f"and then fixed text, and before it of others only {', '.join(IDS)}"
                )
            follows_name = before.partition("$name")[2]
            if self.fields is not None and not after.strip():
                raise ValueError(
                    f"a call of the form {self.name} is {call!r}: after fields it ends with a mark"
                )
            if self.fields is not None and not (follows_name + self.fields.parts[0]).strip():
                raise ValueError(
                    f"a call of the form {self.name} is {call!r}: fixed text follows $name, in it "
                    "or at the start of a field, or the end of a name would not be known"
                )

    def write_call(self, name: str, arguments: Any) -> str:
        """Return a call as the model writes it."""
        text = json.dumps(arguments, ensure_ascii=False)
        if self.fields is not None:
            text = self.fields.write(arguments)
        call = self.call.replace("$number", "0").replace("$id", "a1b2c3d4e")
        return call.replace("$name", name).replace("$arguments", text)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls (name, arguments) as the model writes them."""
        return self.begin + self.separator.join(self.write_call(*one) for one in calls) + self.end

    def find_marks(self, tokenizer: Any) -> dict[str, int]:
        """Return the marks of the form that are tokens of their own, such as `<tool_call>`."""
        texts = [self.call, *self.also, self.begin, self.separator, self.end]
        if self.fields is not None:
            texts += self.fields.field, self.fields.separator, self.fields.quote
        dropped = self.dropped.replace("\\", "")
        return {
            token.content: i
            for i, token in tokenizer.added_tokens_decoder.items()
            if any(token.content in text for text in (*texts, dropped))
        }


def call_constraint(
    tools: Sequence[Tool],
    form: ToolFormat,
    marks: Mapping[str, int],
    *,
    several: bool = True,
    text_before: bool = False,
    answer_schema: Mapping[str, Any] | None = None,
) -> Constraint:
    """Return the constraint of an answer that calls tools.

    The arguments of a tool have the schema of its `parameters`. marks: texts of the form that are
    tokens of their own, and their ids. several: there may be more than one call. text_before: there
    may also be other text, and no call. answer_schema: instead of calls, the answer may be JSON of
    this schema.
    """
    trigger = form.trigger if text_before else ""
    call_text = form.call if form.begin else form.call.removeprefix(trigger)
    grammar = _Grammar(form, marks)
    for i, tool in enumerate(tools):
        grammar.add_call(f"f{i}", call_text, tool["function"])
    call = f"({' | '.join(f'f{i}' for i in range(len(tools)))})"
    more = f"({grammar.quote(form.separator)} {call}){{0,{MAX_CALLS - 1}}}"
    calls = f"{call} {more if several and call_text == form.call else ''} {grammar.quote(form.end)}"
    start = f"{grammar.quote(form.begin.removeprefix(trigger))} {calls}"
    if text_before:
        start = f"({grammar.text_until(trigger)} {start})* TEXT"
    if answer_schema is not None:
        start = f"{start} | answer"
        grammar.rules.append(f"answer: {_json_rule(answer_schema)}")
    return Constraint(grammar="\n".join(["%llguidance {}", f"start: {start}", *grammar.rules]))


class _Grammar:
    """The rules of a grammar of calls."""

    def __init__(self, form: ToolFormat, marks: Mapping[str, int]):
        self._form, self._marks = form, dict(marks)
        self._any_mark = f"({'|'.join(re.escape(m) for m in sorted(marks, key=len, reverse=True))})"
        self.rules = ["TEXT: /(.|\\n)*/"]

    def quote(self, text: str) -> str:
        """Return a text as a grammar names it: marks by their ids, the rest in quotes."""
        parts = re.split(self._any_mark, text) if self._marks else [text]
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part)
            for part in filter(None, parts)
        )

    def text_until(self, end: str) -> str:
        """Return the name of a rule for any text up to `end`, which is included."""
        if at := [end.index(mark) for mark in self._marks if mark in end]:
            before, mark = end[: min(at)], self.quote(end[min(at) :])
            if not before:
                return f"TEXT {mark}"
            # One terminal, because TEXT would also take what has to come after it.
            pattern = re.escape(before).replace("\\\n", "\\n").replace("/", "\\/")
            terminal = f"UNTIL{len(self.rules)}"
            self.rules.append(f"{terminal}: /(.|\\n)*{pattern}/")
            return f"{terminal} {mark}"
        rule = f"until{len(self.rules)}"
        self.rules.append(f"{rule}[lazy]: TEXT {json.dumps(end)}")
        return rule

    def add_call(self, rule: str, call: str, function: Mapping[str, Any]) -> None:
        """Add the rules of a call of one tool."""
        parts, named = list[str](), call.replace("$name", function["name"])
        for part in re.split(r"(\$arguments|\$number|\$id)", named):
            if part == "$arguments":
                parts.append(f"{rule}_args")
            else:
                parts.append(IDS[part][1] if part in IDS else self.quote(part))
        self.rules.append(f"{rule}: {' '.join(parts)}")
        schema = function.get("parameters") or ANY_OBJECT
        if self._form.fields is None:
            self.rules.append(f"{rule}_args: {_json_rule(schema)}")
        else:
            self._add_fields(f"{rule}_args", self._form.fields, schema)

    def _add_fields(self, rule: str, fields: Fields, schema: Mapping[str, Any]) -> None:
        """Add the rules of arguments that are fields, in the order of the schema."""
        before, between = map(self.quote, fields.parts[:2])
        properties, separator = schema.get("properties"), self.quote(fields.separator)
        if properties is None:
            key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
            names, required = [f"{rule}_any"], list[str]()
            self.rules.append(f"{names[0]}: {before} {key} {between} {self._value({})}")
        else:
            names = [f"{rule}{i}" for i in range(len(properties))]
            required = [
                name
                for name, key in zip(names, properties, strict=True)
                if key in (schema.get("required") or ())
            ]
            definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
            for name, (key, value) in zip(names, properties.items(), strict=True):
                value = self._value({**definitions, **value} if isinstance(value, dict) else {})
                self.rules.append(f"{name}: {before} {json.dumps(key)} {between} {value}")
        if properties is not None and not separator:
            body = " ".join(name if name in required else f"{name}?" for name in names)
        elif required:
            body = f" {separator} ".join(required)
            body += "".join(f" ({separator} {name})?" for name in names if name not in required)
        elif names:
            one = f"({' | '.join(names)})"
            body = f"({one} ({separator} {one}){{0,{max(15, len(names))}}})?"
        else:
            body = '""'
        self.rules.append(f"{rule}: {body}")

    def _value(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of a value, and of what follows it in its field."""
        fields = self._form.fields
        assert fields is not None
        quote, after = self.quote(fields.quote), fields.parts[2]
        texts = schema.get("enum", [])
        if texts and all(isinstance(text, str) for text in texts):
            one = " | ".join(json.dumps(text) for text in texts)
            return f"{quote} ({one}) {quote} {self.quote(after)}"
        if is_text(schema):
            if not fields.quote:
                return self.text_until(after)
            return f"{quote} {self.text_until(fields.quote)} {self.quote(after)}"
        rule = f"json{len(self.rules)}"
        self.rules.append(f"{rule}: {_json_rule(schema)}")
        return f"{rule} {self.quote(after)}"


def is_text(schema: Any) -> bool:
    """Return whether a value of a schema is text, and needs no quotes to tell so."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if kinds is None:
        choices = schema.get("anyOf") or schema.get("oneOf") or []
        return any(is_text(choice) for choice in choices) if choices else not schema.keys() & _TYPED
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


# Words of a schema without a type that say what its values are.
_TYPED = {"enum", "const", "$ref", "allOf", "properties", "items", "minimum", "maximum"}


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**close_objects(schema), 'x-guidance': JSON_STYLE})}"
