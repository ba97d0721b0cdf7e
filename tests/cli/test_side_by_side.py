"""`skipsearch decode --side-by-side`: a prompt plainly and with a profile, played at once."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.command import cmd, run_in_process
from helpers.profiles import write_demo_profile

from skipsearch.cli.side_by_side import draw_text, show_side_by_side
from skipsearch.cli.terminal import Terminal
from skipsearch.decoding.recording import Recording, Round

PLAIN = Recording([1, 2, 3], [Round(0.0, None, "", "a"), Round(0.2, None, "", " b")])
DRAFTED = Recording([1, 2, 3], [Round(0.0, None, "", "a"), Round(0.1, 1, " b\x1b", " c")])


def test_a_text_is_shown_as_far_as_it_had_come() -> None:
    assert draw_text(DRAFTED, 0.05).plain == "a"
    text = draw_text(DRAFTED, 0.1)
    assert text.plain == "a b\\x1b c", "control characters are shown, and not obeyed"
    [accepted] = [span for span in text.spans if span.style]
    assert text.plain[accepted.start : accepted.end] == " b\\x1b"


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_gets_two_panels_and_the_times(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipsearch.cli.side_by_side.MIN_PLAY_S", 0.2)
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=True, width=width)
    show_side_by_side(console, PLAIN, DRAFTED, ["lookup", "skip"])
    shown = file.getvalue()
    assert "plain" in shown
    assert "2.00 times as fast on this prompt, the same tokens" in shown


def test_a_pipe_gets_the_text_and_the_times() -> None:
    file = io.StringIO()
    other = Recording([1, 2, 4], DRAFTED.rounds)
    show_side_by_side(Terminal(file=file, width=200), PLAIN, other, ["skip"])
    assert file.getvalue().startswith("a b\\x1b c\n")
    assert "DIFFERENT tokens" in file.getvalue()


def test_one_token_has_no_time_to_compare() -> None:
    file, one = io.StringIO(), Recording([1], [Round(0.0, None, "", "a")])
    show_side_by_side(Terminal(file=file, width=200), one, one, ["skip"])
    assert "nothing to compare: the same tokens" in file.getvalue()


def test_the_command_writes_plain_decodings_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = write_demo_profile(tmp_path / "profile.yaml")
    status, out, err = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --profile {} --prompt {} --side-by-side --max-new-tokens 12 --engine lean "
            "--threads 1",
            profile,
            "def main(argv=None):",
        ),
    )  # fmt: skip
    assert status == 0, err
    assert "the same tokens" in out


@pytest.mark.parametrize("more", [("--prompts", "x.jsonl"), ("--prompt", "a", "--temperature", 1)])
def test_it_plays_one_greedy_text(
    more: tuple[object, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run_in_process(
        capsys, monkeypatch, *cmd("decode --model demo --side-by-side"), *more
    )
    assert status == 2
    assert "--side-by-side plays one greedy text" in err
