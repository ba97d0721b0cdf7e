"""`skipsearch serve`: its settings, and its messages before it loads a model.

tests/serve runs the server itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.command import cmd, run_in_process
from helpers.letter_tokenizer import letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import LAYERS, tiny_llama

import skipsearch
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder, Request, stopping
from skipsearch.drafters.exits import make_exit
from skipsearch.models import adapt
from skipsearch.profile import load_profile, save_profile
from skipsearch.profile.measurement import BatchSpeed
from skipsearch.serve import server
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.auth import KEY_VARIABLE
from skipsearch.serve.limits import Limits
from skipsearch.serve.prefix_pool import PrefixPool
from skipsearch.serve.responses import FINISH_REASONS
from skipsearch.serve.scheduler import Job, RoundOutput, Scheduler

__all__ = ["one_thread"]
ORIGINS = ["http://localhost:3000", "https://a.example", "app://obsidian.md"]


def test_it_hands_model_profile_and_limits_to_the_server(capsys, monkeypatch) -> None:
    handed: list[Any] = []

    def serve(
        decoder: Decoder,
        host: str,
        port: int,
        limits: Limits,
        name: str | None,
        alias: str | None,
        ready: Any,
        cors_origins: list[str],
        sampling: Any,
        log_prompts: Path | None,
        warn: Any,
    ) -> None:
        handed.extend([decoder, host, port, limits, name, alias, cors_origins, log_prompts])
        ready("http://127.0.0.1:1234")

    monkeypatch.setattr(server, "run_server", serve)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "serve --model demo --task pycode --port 0 --max-num-seqs 2 --served-model-name mine "
            "--engine lean --threads 1 --log-prompts asked.jsonl --cors {} "
            "--cors app://obsidian.md",
            "http://localhost:3000, https://a.example",
        ),
    )
    assert code == 0, said
    assert handed[0].recipe.drafters
    limits, asked = Limits(max_num_seqs=2), Path("asked.jsonl")
    assert handed[1:] == ["127.0.0.1", 0, limits, "mine", None, ORIGINS, asked]
    assert "serving mine at http://127.0.0.1:1234; Ctrl-C ends it" in said
    assert "for 2 running requests of up to 1,024 tokens, 2.0 GB for finished texts" in said


@pytest.mark.parametrize(
    ("missing", "key", "arguments", "status", "sentence"),
    [
        (
            "uvicorn",
            None,
            ["--model", "demo"],
            1,
            "serving needs uvicorn, which is not installed: pip install 'skipsearch[serve]'",
        ),
        (None, " , ", ["--model", "demo"], 1, "SKIPSEARCH_API_KEY is set and holds no key"),
        (
            None,
            None,
            cmd("--model demo --cors http://a.example/"),
            1,
            "--cors is 'http://a.example/'; give an origin",
        ),
        (None, None, [], 2, "--profile auto needs --model"),
        (None, None, cmd("--model demo --port 99999"), 2, "less than or equal to 65535"),
    ],
)
def test_what_is_amiss_is_said_before_a_model_is_loaded(
    capsys,
    monkeypatch,
    missing: str | None,
    key: str | None,
    arguments: list[str],
    status: int,
    sentence: str,
) -> None:
    real = server.find_spec
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == missing else real(name))
    monkeypatch.setattr(
        "skipsearch.cli.open_model.load_cli_model", lambda *_: pytest.fail("the model was loaded")
    )
    if key is None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(KEY_VARIABLE, key)
    code, _, said = run_in_process(capsys, monkeypatch, "serve", *arguments)
    assert (code, sentence in said) == (status, True), said


@pytest.mark.parametrize("is_measured", [False, True])
def test_drafts_in_batches_that_nobody_measured_are_warned_of(
    capsys, monkeypatch, tmp_path: Path, is_measured: bool
) -> None:
    bundled = Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo" / "pycode"
    profile = load_profile(next(iter(sorted(bundled.glob("*.yaml")))))
    assert profile.measured is not None
    row = BatchSpeed(requests=8, speedup=profile.measured.speedup)
    by_batch = (row,) if is_measured else ()
    measured = profile.measured.model_copy(update={"by_batch": by_batch})
    save_profile(profile.model_copy(update={"measured": measured}), tmp_path / "p.yaml")
    monkeypatch.setattr(server, "run_server", lambda *_: None)
    asked = ("serve", "--profile", tmp_path / "p.yaml", "--engine", "lean", "--threads", 1)
    code, _, said = run_in_process(capsys, monkeypatch, *asked, "--batch-passes")
    assert code == 0, said
    assert ("bench batch --profile FILE --save" in said) != is_measured
    assert "for their batch" in said
    assert "bench batch" not in run_in_process(capsys, monkeypatch, *asked)[2]


def test_an_address_that_all_can_reach_without_a_key_is_warned_of(capsys, monkeypatch) -> None:
    monkeypatch.setattr(server, "run_server", lambda *_: None)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    asked = ("serve", "--model", "demo", "--profile", "none", "--engine", "lean", "--threads", 1)
    assert (
        "everybody who reaches 0.0.0.0 may use this server"
        in run_in_process(capsys, monkeypatch, *asked, "--host", "0.0.0.0")[2]
    )
    assert "everybody" not in run_in_process(capsys, monkeypatch, *asked)[2]
    assert "--cors is *" in run_in_process(capsys, monkeypatch, *asked, "--cors", "*")[2]
    monkeypatch.setenv(KEY_VARIABLE, "k")
    assert "everybody" not in run_in_process(capsys, monkeypatch, *asked, "--host", "0.0.0.0")[2]
    assert "--cors" not in run_in_process(capsys, monkeypatch, *asked, "--cors", "*")[2]


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    import socket

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            server.SkipSearchError,
            match=f"cannot listen at 127.0.0.1 port {taken.getsockname()[1]}: choose another "
            "--port",
        ):
            # in a new thread: tests of pages may have left this one with a running event
            # loop
            ThreadPoolExecutor(1).submit(
                server.run_server,
                Decoder(adapt(tiny_llama(), letter_tokenizer())),
                "127.0.0.1",
                taken.getsockname()[1],
                Limits(),
            ).result()


@pytest.mark.parametrize("host", ["a\udcff", 70 * "a" + ".example"])
def test_a_host_that_no_name_can_be_is_one_sentence(host: str, monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(server.SkipSearchError, match="is no name of a host"):
        ThreadPoolExecutor(1).submit(
            server.run_server, Decoder(adapt(tiny_llama(), letter_tokenizer())), host, 0, Limits()
        ).result()


def test_the_worker_outlives_a_request_that_breaks_it(monkeypatch, caplog) -> None:
    """An error of one request is reported to that request alone, without its text.

    The next request is answered.
    """
    desk = Scheduler(Decoder(adapt(tiny_llama(), letter_tokenizer())), Limits(max_num_seqs=1))
    told: list[list[Any]] = [[], [], []]
    real = desk.decoder.stream

    def stream(request: Request, *rest: Any, **named: Any) -> Any:
        if request.seed == 1:
            raise ValueError("a secret text")
        chunks = real(request, *rest, **named)
        return (1 / 0 for _ in chunks) if request.seed == 2 else chunks

    desk.plain_decoder = desk.decoder
    monkeypatch.setattr(desk.decoder, "stream", stream)
    desk.start()
    desk.submit(
        [
            Job(Request([5, 6], 3, seed=seed), [5, 6], "k", told[i].append)
            for i, seed in enumerate((1, 2, 3))
        ]
    )
    desk.close()
    assert isinstance(told[0][0], APIError)
    assert told[0][0].status == 500
    assert isinstance(told[1][0], APIError)
    assert told[1][-1] is None
    assert (
        sum(
            len(piece.chunk.tokens)
            for piece in told[2]
            if isinstance(piece, RoundOutput) and piece.chunk
        )
        == 3
    )
    assert "secret" not in caplog.text
    with pytest.raises(APIError) as refusal:
        desk.submit([])
    assert refusal.value.status == 503


def test_the_time_limit_holds_within_a_round_too(monkeypatch) -> None:
    """The clock advances by a second at each reading while draft tokens are accepted."""
    clock = count()
    monkeypatch.setattr(stopping, "monotonic", lambda: float(next(clock)))
    model, fixed = adapt(tiny_llama(), letter_tokenizer()), make_exit("fixed")
    decoder = Decoder(
        model, SkipMask(LAYERS), draft_length=12, exit_policy=fixed
    )  # all of its drafts are accepted
    desk, told = Scheduler(decoder, Limits(request_timeout_s=5)), list[Any]()
    desk.submit([Job(Request([5, 6], 40, ignore_eos=True), [5, 6], "k", told.append)])
    desk.start()
    desk.close()
    chunks = [piece.chunk for piece in told if isinstance(piece, RoundOutput) and piece.chunk]
    assert [len(chunk.tokens) for chunk in chunks] == [1, 4], (
        "the first token, and a part of a round of thirteen"
    )
    assert chunks[-1].finish_reason == "time"
    assert FINISH_REASONS["time"] == "length", (
        "as the answer of a request that came to its limit of tokens"
    )


def test_prefixes_are_kept_by_key_and_the_oldest_makes_room() -> None:
    decoder, kept = Decoder(adapt(tiny_llama())), PrefixPool(2, 10**9)
    first = kept.acquire("a", range(40))
    list(decoder.stream(list(range(40)), 4, prefix_cache=first))
    kept.release("a", first)
    assert kept.acquire("b", range(40)) is not first
    assert kept.acquire("a", [9, *range(40)]) is not first, "what shares little overwrites nothing"
    assert kept.acquire("a", range(40)) is first
    kept.release("a", first)
    for _ in range(2):
        kept.release("b", kept.acquire("c", []))
    assert kept.acquire("a", range(40)) is not first
