"""`skipsearch serve`: what it hands to the server, and what it says before it loads a model. tests/serve runs the server itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.command import in_process
from helpers.letters import letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import tiny_llama

from skipsearch.decoding import Decoder, Request
from skipsearch.models import adapt
from skipsearch.serve import run
from skipsearch.serve.desk import Desk, Job, Piece
from skipsearch.serve.faults import Fault
from skipsearch.serve.keys import ENVIRONMENT
from skipsearch.serve.limits import Limits
from skipsearch.serve.prefixes import Prefixes

__all__ = ["one_thread"]


def test_it_hands_model_profile_and_limits_to_the_server(capsys, monkeypatch) -> None:
    handed: list[Any] = []

    def serve(decoder: Decoder, host: str, port: int, limits: Limits, name: str | None, ready: Any) -> None:
        handed.extend([decoder, host, port, limits, name])
        ready("http://127.0.0.1:1234")

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    code, _, said = in_process(capsys, monkeypatch, "serve", "--model", "demo", "--task", "pycode", "--port", 0, "--running", 2, "--name",
                               "mine", "--engine", "lean", "--threads", 1)
    assert code == 0, said
    assert handed[0].recipe.drafters
    assert handed[1:] == ["127.0.0.1", 0, Limits(running=2), "mine"]
    assert "serving mine at http://127.0.0.1:1234; Ctrl-C ends it" in said


@pytest.mark.parametrize(("missing", "key", "arguments", "status", "sentence"), [
    ("uvicorn", None, ["--model", "demo"], 1, "serving needs uvicorn, which is not installed: pip install 'skipsearch[serve]'"),
    (None, " , ", ["--model", "demo"], 1, "SKIPSEARCH_API_KEY is set and holds no key"),
    (None, None, [], 2, "--profile auto needs --model"),
    (None, None, ["--model", "demo", "--port", "99999"], 2, "less than or equal to 65535"),
])
def test_what_is_amiss_is_said_before_a_model_is_loaded(capsys, monkeypatch, missing: str | None, key: str | None, arguments: list[str],
                                                        status: int, sentence: str) -> None:
    real = run.find_spec
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == missing else real(name))
    monkeypatch.setattr("skipsearch.cli.opening.load", lambda *_: pytest.fail("the model was loaded"))
    if key is None:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
    else:
        monkeypatch.setenv(ENVIRONMENT, key)
    code, _, said = in_process(capsys, monkeypatch, "serve", *arguments)
    assert (code, sentence in said) == (status, True), said


def test_an_address_that_all_can_reach_without_a_key_is_warned_of(capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "serve", lambda *_: None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    asked = ("serve", "--model", "demo", "--profile", "none", "--engine", "lean", "--threads", 1)
    assert "everybody who reaches 0.0.0.0 may use this server" in in_process(capsys, monkeypatch, *asked, "--host", "0.0.0.0")[2]
    assert "everybody" not in in_process(capsys, monkeypatch, *asked)[2]
    monkeypatch.setenv(ENVIRONMENT, "k")
    assert "everybody" not in in_process(capsys, monkeypatch, *asked, "--host", "0.0.0.0")[2]


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    import socket

    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(run.SkipSearchError, match=f"cannot listen at 127.0.0.1 port {taken.getsockname()[1]}: choose another --port"):
            # in a thread of its own: tests of pages may have left this one with a running event loop
            ThreadPoolExecutor(1).submit(run.serve, Decoder(adapt(tiny_llama(), letter_tokenizer())), "127.0.0.1", taken.getsockname()[1],
                                         Limits()).result()


def test_the_worker_outlives_a_request_that_breaks_it(monkeypatch, caplog) -> None:
    """Whatever goes wrong in one request, it alone is told, without its text, and the next one is answered."""
    desk = Desk(Decoder(adapt(tiny_llama(), letter_tokenizer())), Limits(running=1))
    told: list[list[Any]] = [[], [], []]
    real = desk.decoder.stream

    def stream(request: Request, *rest: Any, **named: Any) -> Any:
        if request.seed == 1:
            raise ValueError("a secret text")
        chunks = real(request, *rest, **named)
        return (1 / 0 for _ in chunks) if request.seed == 2 else chunks

    desk.plain = desk.decoder
    monkeypatch.setattr(desk.decoder, "stream", stream)
    desk.start()
    desk.submit([Job(Request([5, 6], 3, seed=seed), [5, 6], "k", told[i].append) for i, seed in enumerate((1, 2, 3))])
    desk.close()
    assert isinstance(told[0][0], Fault)
    assert told[0][0].status == 500
    assert isinstance(told[1][0], Fault)
    assert told[1][-1] is None
    assert sum(len(piece.chunk.tokens) for piece in told[2] if isinstance(piece, Piece) and piece.chunk) == 3
    assert "secret" not in caplog.text
    with pytest.raises(Fault) as refusal:
        desk.submit([])
    assert refusal.value.status == 503


def test_prefixes_are_kept_by_key_and_the_oldest_makes_room() -> None:
    decoder, kept = Decoder(adapt(tiny_llama())), Prefixes(2)
    first = kept.take("a", range(40))
    list(decoder.stream(list(range(40)), 4, prefix=first))
    kept.give_back("a", first)
    assert kept.take("b", range(40)) is not first
    assert kept.take("a", [9, *range(40)]) is not first, "what shares little overwrites nothing"
    assert kept.take("a", range(40)) is first
    kept.give_back("a", first)
    for _ in range(2):
        kept.give_back("b", kept.take("c", []))
    assert kept.take("a", range(40)) is not first
