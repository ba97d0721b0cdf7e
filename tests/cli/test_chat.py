"""`skipsearch chat` on a terminal, and the conversation that it keeps."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from helpers.command import cmd, run_in_process
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.threads import one_thread
from models.tiny import new_hf_model

import skipsearch
from skipsearch.core.recipe import Recipe
from skipsearch.decoding.conversation import Conversation
from skipsearch.errors import DecodeError, ModelError
from skipsearch.models import ModelAdapter, adapt

__all__ = ["one_thread"]
ROOT = Path(skipsearch.__file__).parents[1]
pytestmark = pytest.mark.xdist_group("chat")
# The command, whose rounds take half a second while its folder has a file of that name.
SLOW_IF_ASKED = """
import os, time
from skipsearch.decoding import loop
real = loop.DecodeLoop._run_round
def slowly(*arguments):
    time.sleep(0.5 * os.path.exists("slow"))
    return real(*arguments)
loop.DecodeLoop._run_round = slowly
from skipsearch.cli.main import main
main()
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[pexpect.spawn]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
        "INPUTRC": "/dev/null",
    }
    arguments = cmd(
        "-c {} chat --model demo --task pycode --threads 1 --engine lean --max-new-tokens 40",
        SLOW_IF_ASKED,
    )
    # A shell's background jobs ignore Ctrl-C, and so do the processes that they start.
    child = pexpect.spawn(
        sys.executable,
        arguments,
        cwd=str(tmp_path),
        env=environment,
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 200),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    child.expect(
        "demo: it has no chat template, so it continues your text; /help lists the commands, "
        "/quit leaves"
    )
    child.expect("you> ")
    yield child
    child.close(force=True)


def test_a_chat_in_a_terminal(terminal: pexpect.spawn, tmp_path: Path) -> None:
    def ask(line: str) -> str:
        terminal.sendline(line)
        terminal.expect("\r\nyou> ")
        return str(terminal.before).partition("\r\n")[2].replace("\r\n", "\n")

    first = ask("import os, sys; def main(argv=None):")
    assert first.strip()
    assert "claims" in ask("/stats")
    said = ask("/stats")
    assert "last answer: 40 tokens after a prompt of" in said
    assert "tokens/s, τ" in said
    assert re.search(r"lookup: \d+ rounds, \d+ tokens drafted, \d+ accepted", said)
    ask(" x = (")
    assert "of which 0 were cached" not in ask("/stats"), "the second turn reuses the first"
    assert "forgotten" in ask("/reset")
    assert "decoding with no profile: plainly" in ask("/profile none")
    assert ask("import os, sys; def main(argv=None):") == first, "plain decoding writes the same"
    assert "with a profile for pycode, which claims" in ask("/profile auto")
    assert "no-such.yaml" in ask("/profile no-such.yaml")
    assert "is no command" in ask("/nothing")
    assert "/reset" in ask("/help")
    assert "written to talk.json" in ask("/save talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())["prompt"].startswith(
        "import os, sys; def main(argv=None):"
    )
    assert "error: talk.json: File exists" in ask("/save talk.json")
    (tmp_path / "slow").touch()
    ask("/reset")
    ask("/profile none")
    terminal.sendline("import os")
    terminal.expect("[a-z(]{2}.*\r\n.*[a-z(]{2}")  # after the echo of the line, some of the answer
    terminal.sendintr()
    terminal.expect(r"\[stopped\]")
    terminal.expect("you> ")
    assert "no answer was read to its end yet" in ask("/stats")
    terminal.sendintr()
    terminal.expect("/quit leaves")
    terminal.sendline("/quit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_input_from_a_pipe_is_answered_without_prompts(capsys, monkeypatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n/quit\nnever\n"))
    code, printed, said = run_in_process(
        capsys, monkeypatch, *cmd("chat --model demo --profile none --max-new-tokens 5 --threads 1")
    )
    assert code == 0, said
    assert "you>" not in printed
    assert printed.strip()
    assert "never" not in printed


# --- the conversation itself


def chatty() -> ModelAdapter:
    return adapt(new_hf_model("llama"), letter_tokenizer(CHAT_TEMPLATE))


def test_each_turn_goes_through_the_template_and_pays_for_what_is_new() -> None:
    talk = Conversation(chatty(), system="be", max_new_tokens=4)
    first = "".join(talk.send("hi"))
    assert [turn["role"] for turn in talk.turns] == ["system", "user", "assistant"]
    assert talk.turns[-1]["content"] == first
    assert talk.last_stats is not None
    assert talk.last_stats.prompt_tokens == 1 + len("system:be\nuser:hi\nai:")
    "".join(talk.send("ho"))
    assert talk.last_stats.cached_tokens >= 1 + len("system:be\nuser:hi\n")
    talk.reset()
    assert talk.turns == [{"role": "system", "content": "be"}]


def test_what_is_said_to_a_base_model_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    talk = Conversation(adapt(new_hf_model("llama"), letter_tokenizer()), max_new_tokens=4)
    first = "".join(talk.send("hi"))
    assert first
    "".join(talk.send("ho\n"))
    talk.turns[-1]["content"] = "a line\n"
    "".join(talk.send("hu"))
    talk.save(tmp_path / "talk.json")
    said = json.loads((tmp_path / "talk.json").read_text())["prompt"]
    assert said == f"hi{first}\nho\na line\nhu{talk.turns[-1]['content']}"
    assert talk.last_stats is not None
    assert talk.last_stats.prompt_tokens == len(said) - len(talk.turns[-1]["content"]) + 1


def test_a_conversation_that_has_no_room_left_stands_as_it_did() -> None:
    talk = Conversation(chatty(), max_new_tokens=4)
    "".join(talk.send("hi"))
    before = list(talk.turns)
    with pytest.raises(DecodeError, match=r"shorten it \(/reset forgets what was said\)"):
        talk.send("a" * 200)
    assert talk.turns == before


def test_who_stops_reading_keeps_what_was_read_as_the_answer() -> None:
    talk = Conversation(chatty(), max_new_tokens=30)
    pieces = talk.send("hi")
    read = next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talk.turns[-1] == {"role": "assistant", "content": read}
    assert "".join(talk.send("ho")) is not None


def test_what_cannot_be_talked_to_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        Conversation(adapt(new_hf_model("llama")))
    with pytest.raises(ModelError, match="has no chat template, so it takes no system prompt"):
        Conversation(adapt(new_hf_model("llama"), letter_tokenizer()), system="be")
    assert Conversation(chatty()).decoder.recipe == Recipe()
