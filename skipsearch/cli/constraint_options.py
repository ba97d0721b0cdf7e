"""The options that give an answer its shape: `--json-schema`, `--regex`, `--grammar`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipsearch.cli.streams import decode_argument
from skipsearch.errors import DecodeError

if TYPE_CHECKING:
    from skipsearch.core.constraint import Constraint


@dataclass(frozen=True)
class ConstraintOptions:
    """The options that give an answer its shape; at most one of them is set."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            help="Answer in JSON of the schema in this file. Needs skipsearch[constraints].",
            metavar="FILE",
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            help="Answer with a text that this regular expression matches.",
            parser=decode_argument,
            metavar="<str>",
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            help="Answer with a text of the grammar in this file, in the form of Lark or GBNF.",
            metavar="FILE",
        ),
    ] = None

    def read(self) -> Constraint | None:
        """Return the constraint; None if no option is set. Raises: DecodeError."""
        from pydantic import ValidationError

        from skipsearch.core.constraint import Constraint

        given = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items()}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise DecodeError(f"{' and '.join(named)} are given; an answer has one shape: keep one")
        try:
            if self.json_schema is not None:
                return Constraint(json_schema=_read_schema(self.json_schema))
            if self.regex is not None:
                return Constraint(regex=self.regex)
            return None if self.grammar is None else Constraint(grammar=_read_text(self.grammar))
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise DecodeError(f"{named[0]} cannot be used: {reason}") from None


def _read_schema(path: Path) -> dict[str, Any]:
    """Return the schema in a file; `true` is the schema of any value. Raises: DecodeError."""
    import json

    text = _read_text(path)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0][:200]
        raise DecodeError(f"{path} is not readable JSON ({reason}); write a schema in it") from None
    if schema is False:
        raise DecodeError(f"{path} holds the schema false, which no answer has; write another one")
    if schema is not True and not isinstance(schema, dict):
        raise DecodeError(f"{path} holds no JSON object, so it is no schema; write one in it")
    return {} if schema is True else schema


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DecodeError(f"{path} cannot be read: {reason}") from None
