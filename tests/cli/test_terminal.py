"""A terminal shows foreign text and does not obey it.

That is text of names, prompts, templates, models, and of everything that quotes them.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import unicodedata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers.command import cmd
from helpers.letter_tokenizer import letter_tokenizer
from helpers.profiles import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from report.studies import make_study
from rich.table import Table
from rich.text import Text

from skipsearch.cli.decode import _stream_text
from skipsearch.cli.main import main
from skipsearch.cli.terminal import Terminal, escape_controls, escape_json_controls
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding.decoder import Chunk

ROOT = Path(__file__).parents[2]
BIDI = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
# renames the window, clears it, writes from right to left
EVIL = "\x1b]0;evil\x07\x9b2J\u202e\udcff[bold]:smile:\r\n\tx"
SHOWN = r"\x1b]0;evil\x07\x9b2J\u202e\udcff[bold]:smile:\r\n\tx"
UNICODE = EVIL.replace("\udcff", "")  # for libraries that take no other name
LINES = SHOWN.replace(r"\n\t", "\n\t")  # if a text has several lines


def commands_in(printed: str) -> set[str]:
    """Return the characters that a terminal would not print, without line breaks and tabs."""
    return {
        c
        for c in printed
        if c not in "\n\t" and (unicodedata.category(c) in ("Cc", "Cs") or c in BIDI)
    }


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


# --- the rule


@given(st.text(st.characters()) | st.text(st.sampled_from(EVIL)))
def test_nothing_that_a_terminal_obeys_is_left_of_any_text(text: str) -> None:
    assert not commands_in(escape_controls(text))
    assert not set(escape_controls(text)) & set("\n\t\u2028\u2029")
    assert not commands_in(escape_controls(text, multiline=True))
    assert escape_controls(escape_controls(text)) == escape_controls(text)


@given(st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs"))))
def test_text_that_can_be_printed_stays_as_it_is(text: str) -> None:
    assert escape_controls(text) == escape_controls(text, multiline=True) == text


@given(
    st.recursive(
        st.none() | st.text(st.characters()),
        lambda part: st.lists(part) | st.dictionaries(st.text(st.characters()), part),
    )
)
def test_json_stays_equal_data(data: Any) -> None:
    printed = escape_json_controls(json.dumps(data, ensure_ascii=False))
    assert not commands_in(printed)
    assert json.loads(printed) == data


def test_whatever_is_printed_is_shown_and_neither_obeyed_nor_read_as_markup() -> None:
    screen = Screen()
    console = Terminal(file=screen, width=200, color_system=None, _environ={"TERM": "dumb"})
    table = Table(EVIL, box=None)
    table.add_row(EVIL)
    console.print(EVIL)
    console.print(table)
    console.rule(EVIL)
    console.print(Text(EVIL))
    console.print_block(EVIL)
    assert not commands_in(screen.getvalue())
    assert screen.getvalue().count(SHOWN) == 4
    assert screen.getvalue().endswith(LINES.replace("\t", " " * 8) + "\n")


# --- the commands


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder with a malicious name.

    It has profiles, a task, a study, a tokenizer and a foreign file of skip sets.
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("SKIPSEARCH_PROFILE_PATH", raising=False)
    folder = tmp_path / UNICODE
    folder.mkdir()
    for name in ("unmeasured", "speculate"):
        shutil.copy(GOLDEN / f"v3_{name}.yaml", folder / f"{name}{EVIL}.yaml")
        (folder / "demo" / "any").mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDEN / f"v3_{name}.yaml", folder / "demo" / "any" / f"any--{name}{EVIL}.yaml")
    (folder / "demo" / "any" / f"a--b{EVIL}.yaml").write_text(EVIL, "utf-8", "surrogateescape")
    (folder / f"broken{EVIL}.yaml").write_text(json.dumps({EVIL: EVIL}), "utf-8")
    (folder / f"rows{EVIL}.jsonl").write_text(
        "".join(json.dumps({"id": f"{n}{EVIL}", "prompt": f"{n}{EVIL}"}) + "\n" for n in range(4))
    )
    (folder / "bad.jsonl").write_text(json.dumps(EVIL))
    (folder / "bad").mkdir()
    (folder / "bad" / "task.yaml").write_text(json.dumps({"name": EVIL, EVIL: EVIL}))
    (folder / "asks").mkdir()
    (folder / "asks" / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (folder / "asks" / "task.yaml").write_text(
        "name: asks\nversion: 1\ndescription: x\nsource: {kind: jsonl, path: "
        'rows.jsonl}\ntemplate: "{prompt}"\nchat: true\n'
        "max_new_tokens: 9\nmax_prompt_tokens: 99\nsampling: {}\ncalibration: 1\nholdout: 1\nseed: "
        "0\nend_on_repeat: 6\n"
    )
    make_study(folder / f"search{EVIL}.journal", {"gp": 2}, raced=[{"attn": EVIL}])
    (folder / "skip_layers.json").write_text(json.dumps({EVIL: {"attention": [], "mlp": []}}))
    (folder / "published.json").write_text(
        json.dumps({"llama-2-13b": {"attention": [1], "mlp": [2]}})
    )
    letter_tokenizer("{{ raise_exception(" + json.dumps(UNICODE) + ") }}").save_pretrained(
        folder / "model"
    )
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": UNICODE}))
    return folder


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, str]:
    """Return stdout and stderr of a command on a terminal.

    On a terminal without colours, every ESC comes from foreign text.
    """
    out, err = Screen(), Screen()
    for name, value in {"TERM": "dumb", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["skipsearch", *map(str, arguments)])
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit):
            main()
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "list", "--profiles", "{evil}"],
        ["profile", "validate", "{evil}"],
        ["profile", "validate", "{evil}/broken{name}.yaml"],
        ["profile", "show", "{evil}/broken{name}.yaml"],
        ["profile", "show", "{evil}/none{name}.yaml"],
        ["profile", "diff", "{evil}/speculate{name}.yaml", "{evil}/broken{name}.yaml"],
        ["profile", "verify", "{evil}/broken{name}.yaml"],
        ["profile", "import", "{evil}/skip_layers.json", "--out", "{evil}"],
        ["profile", "import", "{evil}/published.json", "--out", "{evil}"],
        ["profile", "pull", "https://{name}"],
        ["report", "{evil}/speculate{name}.yaml", "--out", "{evil}/page{name}.html"],
        ["report", "{evil}/broken{name}.yaml", "--out", "{evil}/page{name}.html"],
        ["report", "--study", "{evil}/search{name}.journal", "--out", "{evil}/page{name}.html"],
        ["report", "--study", "sqlite:///{evil}/none.db", "--out", "{evil}/page{name}.html"],
        ["task", "show", "{evil}/rows{name}.jsonl"],
        ["task", "show", "{evil}/asks", "--data", "{evil}/rows{name}.jsonl"],
        ["task", "show", "{evil}/asks", "--model", "{evil}/model"],
        ["task", "validate", "{evil}/bad"],
        ["task", "validate", "{evil}"],
        ["task", "validate", "{evil}/bad.jsonl"],
        cmd("tune --model demo --task {}", "{name}"),
        cmd("tune --model demo --task {}", "{evil}/bad.jsonl"),
        cmd("tune --model {} --task {} --device cpu", "{evil}/model", "{evil}/rows{name}.jsonl"),
        cmd("tune --model demo --task pycode --searcher {}", "{name}"),
        cmd(
            "decode --model demo --prompt x --max-new-tokens 1 --task {} --profile auto "
            "--profiles {}",
            "{name}",
            "{evil}",
        ),
        cmd("decode --model {} --prompt x", "{evil}/model"),
        cmd("decode --model demo --prompts {}", "{evil}/bad.jsonl"),
        cmd("decode --model demo --prompts {} --max-new-tokens 1", "{evil}/rows{name}.jsonl"),
        cmd(
            "decode --model demo --prompts {} --max-new-tokens 1 --json", "{evil}/rows{name}.jsonl"
        ),
        ["export", "--profile", "{evil}/speculate{name}.yaml", "--out", "{evil}"],
        ["bench", "run", "--profile", "{evil}/broken{name}.yaml"],
        ["bench", "batch", "--{name}"],
        ["train", "{name}"],
        ["list", "{name}"],
        ["list", "models", "{name}"],
        ["{name}"],
        ["list", "--{name}"],
        ["profile", "show", "{name}", "{name}"],
        ["profile", "{name}"],
    ],
    ids=" ".join,
)
def test_no_command_hands_a_terminal_what_is_from_outside(
    evil: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    out, err = on_a_terminal(monkeypatch, *(part.format(evil=evil, name=EVIL) for part in command))
    assert not commands_in(out + err)
    assert "evil" in out + err, "it is shown all the same"


def test_a_fault_of_the_program_and_a_traceback_that_was_asked_for_quote_it_too(
    evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.delenv("SKIPSEARCH_DEBUG", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr("skipsearch.profile.load_profile", fail)
        out, err = on_a_terminal(monkeypatch, "profile", "show", "x.yaml")
    assert "Traceback" in err
    assert r"\x1b" in err
    assert not commands_in(out + err)
    monkeypatch.setenv("SKIPSEARCH_DEBUG", "1")
    out, err = on_a_terminal(monkeypatch, "profile", "show", evil / f"broken{EVIL}.yaml")
    assert "Traceback" in err
    assert not commands_in(out + err)


class Decoded:
    """A decoder with a given text, since a model may write anything."""

    def stream(self, ids: list[int], **options: Any) -> Any:
        yield Chunk([1], EVIL[:3])
        yield Chunk([2], EVIL[3:], "length", DecodeStats())


def test_what_a_model_writes_is_made_visible_on_a_terminal_and_goes_into_a_pipe_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, expected in ((Screen(), LINES + "\n"), (StringIO(), EVIL + "\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        assert _stream_text(Decoded(), [0], {}).text == EVIL  # type: ignore[arg-type]
        assert stream.getvalue() == expected


def test_on_a_real_terminal_too(evil: Path) -> None:
    """One command runs in a process of its own that has a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.Popen(
        [sys.executable, "-m", "skipsearch.cli.main", "profile", "list", "--profiles", str(evil)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 65536):
            printed += part
    except OSError:  # Linux: the last writer closed it
        pass
    os.close(ours)
    assert done.wait(60) == 0
    assert rb"\x1b]0;evil\x07" in printed
    assert not commands_in(printed.decode("utf-8").replace("\r\n", "\n"))
