"""`decode` with a shape: the answer has it, and a file that names none is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.command import run_in_process

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["module", "class"]}, "lines": {"type": "integer"}},
    "required": ["kind", "lines"],
    "additionalProperties": False,
}
DECODE = ("decode", "--model", "demo", "--engine", "lean", "--prompt", "import os")


def test_decode_answers_in_json_of_a_schema_and_says_what_was_forced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    status, printed, told = run_in_process(
        capsys, monkeypatch, *DECODE, "--json-schema", str(file), "--check"
    )
    assert status == 0, told
    jsonschema.validate(json.loads(printed), SCHEMA)
    assert "tokens identical to plain decoding" in told


def test_decode_answers_with_a_text_of_an_expression_or_a_grammar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "answer.lark"
    file.write_text('start: "yes" | "no"')
    for option, value in (("--regex", "yes|no"), ("--grammar", str(file))):
        status, printed, told = run_in_process(capsys, monkeypatch, *DECODE, option, value)
        assert status == 0, told
        assert printed.strip() in ("yes", "no")


def test_the_schema_true_is_that_of_any_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, schema in (("true", "true"), ("empty", "{}")):
        (tmp_path / name).write_text(schema)
    answers = {
        run_in_process(
            capsys, monkeypatch, *DECODE, "--json-schema", tmp_path / name, "--max-new-tokens", 12
        )[1]
        for name in ("true", "empty")
    }
    assert len(answers) == 1
    assert answers.pop().startswith('"')


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--regex", "a", "--grammar", "{file}"), "an answer has one shape: keep one"),
        (("--json-schema", "{folder}/nothing.json"), "cannot be read: No such file"),
        (("--json-schema", "{file}"), "is not readable JSON"),
        (("--json-schema", "{list}"), "holds no JSON object, so it is no schema"),
        (("--json-schema", "{false}"), "holds the schema false, which no answer has"),
        (("--json-schema", "{itself}"), "the constraint (JSON of a schema) cannot be followed"),
        (("--regex", "("), "the constraint (a regular expression) cannot be used"),
        (("--grammar", "{binary}"), "error: {binary} cannot be read: it is not UTF-8"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_shape_that_makes_no_sense_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    contents = {
        "file": b"{no json",
        "list": b"[1]",
        "binary": b"\xff\xfe\x00",
        "false": b"false",
        "itself": b'{"$ref": "#"}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    names = {name: str(tmp_path / name) for name in contents}
    given = [option.format(folder=tmp_path, **names) for option in options]
    status, _, told = run_in_process(capsys, monkeypatch, *DECODE, *given)
    assert status != 0
    assert sentence.format(**names) in " ".join(told.split())
    assert "Traceback" not in told
