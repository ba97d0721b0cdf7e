"""Closed standard streams, small encodings and bytes that are not text.

A command ends with a message and an exit status, never with a traceback.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.threads import one_thread

from skipsearch.cli.consoles import print_json
from skipsearch.cli.streams import decode_argument, prepare_streams

__all__ = ["one_thread"]
ROOT = Path(__file__).parents[2]
PROGRAM = f"exec {sys.executable} -m skipsearch.cli.main"
DEMO = "--model demo --engine lean --threads 1 --max-new-tokens 2"
ASCII = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}]


def in_shell(command: str, given: bytes = b"", **environment: str) -> tuple[int, bytes, bytes]:
    """Return (exit status, stdout, stderr) of a shell command, which can close streams."""
    done = subprocess.run(
        ["bash", "-c", f"{PROGRAM} {command}"],
        input=given,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
    )
    assert b"Traceback" not in done.stdout + done.stderr, done.stderr.decode()
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        ("list exits <&-", 0, b""),
        pytest.param("list exits 2>&-", 0, b"", marks=pytest.mark.thorough),
        ("list nothing 2>&-", 2, b""),
        ("list exits >&-", 1, b"standard output is closed"),
        pytest.param(
            "list exits --json >&-", 1, b"standard output is closed", marks=pytest.mark.thorough
        ),
        pytest.param("--version >&-", 1, b"standard output is closed", marks=pytest.mark.thorough),
        ("--help <&- >&- 2>&-", 1, b""),
        (f"decode - {DEMO} <&-", 1, b"standard input is closed"),
    ],
)
def test_closed_streams(command: str, status: int, sentence: bytes) -> None:
    code, _, said = in_shell(command)
    assert code == status
    assert sentence in said


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """Otherwise the output of a library would be written into the file."""
    program = (
        "import os; from skipsearch.cli.streams import prepare_streams; prepare_streams(); "
        "os._exit(os.open('/dev/null', os.O_RDONLY))"
    )
    done = subprocess.run(
        ["bash", "-c", f'exec {sys.executable} -c "{program}" <&- >&- 2>&-'],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode > 2


CHAT = f"chat --profile none {DEMO}".split()


def test_a_chat_ends_where_input_is_closed(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    assert run_in_process(capsys, monkeypatch, *CHAT)[0] == 0


def test_chat_refuses_a_line_that_is_not_utf_8_and_goes_on(capsys, monkeypatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"hi\xff\ndef f\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    code, answers, said = run_in_process(capsys, monkeypatch, *CHAT)
    assert code == 0
    assert said.count("error: ") == 1
    assert "the byte 0xff" in said
    assert answers.count("\n") == 1, "the other line was answered"


@pytest.mark.thorough
@pytest.mark.parametrize("locale", ASCII)
def test_chat_reads_utf_8_in_a_locale_of_few_characters(locale: dict[str, str]) -> None:
    code, answers, said = in_shell(f"chat --profile none {DEMO}", "é\n".encode(), **locale)
    assert (code, b"error" in said) == (0, False)
    assert answers.isascii()


@pytest.mark.thorough
@pytest.mark.parametrize("locale", ASCII)
def test_a_prompt_is_the_same_text_in_a_locale_of_few_characters(locale: dict[str, str]) -> None:
    """The embedded model has a token for é; the text shows it as an escape."""
    command = f"decode --json --prompt é {DEMO}"
    tokens = [
        json.loads(in_shell(command, **environment)[1])["tokens"]
        for environment in ({"PYTHONUTF8": "1"}, locale)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_an_argument_that_is_no_text_is_one_sentence(capsys, monkeypatch, option: str) -> None:
    more = [] if option == "--prompt" else ["--prompt", "x"]
    code, _, said = run_in_process(
        capsys, monkeypatch, "decode", "--model", "demo", *more, option, "a\udcff"
    )
    assert code == 2
    assert "the byte 0xff, which is not UTF-8" in said
    assert option in said


def test_arguments_that_are_text_stay_as_they_are() -> None:
    for text in ("", "a", "é", "\U0001f600"):
        assert decode_argument(text) == text


@pytest.mark.parametrize("text", ["é", "\U0001f600", "\ud800"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_stays_equal_data_in_every_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str
) -> None:
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding=encoding))
    prepare_streams()
    print_json({"text": text})
    assert json.loads(bytes_out.getvalue().decode(encoding)) == {"text": text}


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("ascii", b"\\xe9\\u2192"), ("latin-1", b"\xe9\\u2192"), ("utf-8", "é→".encode())],
)
def test_text_is_escaped_only_where_the_encoding_lacks_it(
    monkeypatch: pytest.MonkeyPatch, encoding: str, expected: bytes
) -> None:
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding=encoding))
    prepare_streams()
    print("é→", end="", flush=True)
    assert bytes_out.getvalue() == expected
