"""Each engine in the server and in a chat, and when a batch of the server stops drafting.

The engine graph runs without a GPU here, as in tests/engine. The command line does not allow that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.command import run_in_process
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.marks import engine_params
from helpers.threads import one_thread
from helpers.tiny import FullModel, tiny_model_and_reference, use_engine, with_tokenizer

from skipsearch.core.schema_types import Interval
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.decoding.conversation import Conversation
from skipsearch.models import ModelAdapter
from skipsearch.profile import Profile, load_profile
from skipsearch.profile.measurement import BatchSpeed
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import Limits
from skipsearch.serve.scheduler import Job, RoundOutput, Scheduler
from skipsearch.serve.service import Service

from .tiny_server import RECIPE

__all__ = ["one_thread"]
PROMPT = "a b c a b c a"


@pytest.fixture(params=engine_params("hf", "native", thorough=("lean", "graph")))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_engine(request.param):
        yield request.param


def world() -> tuple[ModelAdapter, FullModel]:
    """Return the shared tiny model with a tokenizer on the current engine, and its reference."""
    model, full = tiny_model_and_reference()
    return with_tokenizer(model, letter_tokenizer(CHAT_TEMPLATE)), full


def expected(full: FullModel, text: str, tokens: int) -> str:
    tokenizer = letter_tokenizer(CHAT_TEMPLATE)
    return str(
        tokenizer.decode(full.greedy(tokenizer(text).input_ids, tokens), skip_special_tokens=True)
    )


def test_an_answer_reports_its_drafts_in_the_fields_of_vllm_and_llama_cpp() -> None:
    with use_engine("hf"):
        model, _ = world()
    service = Service(Decoder(model, RECIPE), APIKeys([]), Limits(), "tiny")
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    with TestClient(build_app(service)) as client:
        answer = client.post("/v1/completions", json=asked).json()
        streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
        lines = client.post("/v1/completions", json=streamed).text.splitlines()
        plain = client.post("/v1/completions", json=asked | {"speculative": False}).json()
        limited = client.post("/v1/completions", json=asked | {"speculative": {"n_max": 1}}).json()
        none = client.post("/v1/completions", json=asked | {"speculative": {"n_max": 0}}).json()
        wrong = [
            client.post("/v1/completions", json=asked | {"speculative": value})
            for value in ("no", {"n_max": 65}, {"n_min": 1})
        ]
    drafting, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
    counts = answer["skipsearch"]
    histogram = drafting["acceptance_histogram"]
    assert timings["draft_n"] == drafting["num_draft_tokens"] == counts["drafted"]
    assert timings["draft_n_accepted"] == drafting["num_accepted_draft_tokens"]
    assert 0 < counts["accepted"] < counts["drafted"]
    assert sum(histogram) == drafting["num_spec_steps"]
    assert sum(n * rounds for n, rounds in enumerate(histogram)) == counts["accepted"]
    assert drafting["mean_acceptance_length"] == 1 + counts["accepted"] / sum(histogram)
    assert timings["predicted_n"] == answer["usage"]["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["usage"]["prompt_tokens"]
    events = [line.removeprefix("data: ") for line in lines if line]
    last = json.loads(events[-2])
    assert last["metrics"] == answer["metrics"]
    assert last["timings"]["draft_n"] == timings["draft_n"]
    assert plain["metrics"]["speculative_decoding"]["mean_acceptance_length"] is None
    assert plain["timings"]["draft_n"] == 0
    for text in (plain, limited, none):
        assert text["choices"] == answer["choices"]
    histogram_of_one = limited["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert 0 < sum(histogram_of_one[1:]) == histogram_of_one[1]
    assert none["timings"]["draft_n"] == 0
    for refused, named in zip(wrong, ("speculative", "64", "n_min"), strict=True):
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]


@pytest.mark.parametrize("together", [False, True])
def test_a_server_answers_with_plain_decodings_tokens(engine: str, together: bool) -> None:
    model, full = world()
    with TestClient(
        build_app(
            Service(Decoder(model, RECIPE), APIKeys([]), Limits(batch_passes=together), "tiny")
        )
    ) as client:
        assert client.get("/v1/models").json()["data"][0]["skipsearch"]["engine"] == engine
        asked: dict[str, Any] = {"prompt": [PROMPT, "zzz"], "max_tokens": 40, "temperature": 0}
        drafted = client.post("/v1/completions", json=asked).json()
        plain = client.post(
            "/v1/completions", json=asked | {"skipsearch": {"profile": "none"}}
        ).json()
        switched_off = client.post("/v1/completions", json=asked | {"speculative": False}).json()
        for answer in (drafted, plain, switched_off):
            assert [choice["text"] for choice in answer["choices"]] == [
                expected(full, text, 40) for text in asked["prompt"]
            ]
        assert 0 < drafted["skipsearch"]["accepted"] < drafted["skipsearch"]["drafted"]
        assert plain["skipsearch"]["drafted"] == switched_off["skipsearch"]["drafted"] == 0
        chat = {
            "messages": [{"role": "user", "content": "say it"}],
            "max_tokens": 30,
            "temperature": 0,
            "stream": True,
        }
        lines = client.post("/v1/chat/completions", json=chat).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(
            event["choices"][0]["delta"].get("content", "") for event in events
        ) == expected(full, "user:say it\nai:", 30)


def test_a_chat_answers_with_plain_decodings_tokens_turn_after_turn(engine: str) -> None:
    model, full = world()
    assert model.spec.engine == engine
    talk = Conversation(
        model, max_new_tokens=30, make_decoder=lambda model, _: Decoder(model, RECIPE)
    )
    text, total = "", DecodeStats()
    for said in ("say it", PROMPT):
        text += f"user:{said}\nai:"
        answer = "".join(talk.send(said))
        assert answer == expected(full, text, 30)
        text = f"{text.removesuffix('ai:')}assistant:{answer}\n"
        assert talk.last_stats is not None
        total += talk.last_stats
    assert total.cached_tokens > 0, "the second turn reuses the first"
    assert 0 < total.accepted < total.drafted


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_an_engine_that_cannot_run_here_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    asked = (
        command,
        "--model",
        "demo",
        "--profile",
        "none",
        "--device",
        "cpu",
        "--threads",
        1,
        "--engine",
    )
    code, _, said = run_in_process(capsys, monkeypatch, *asked, "graph")
    assert (
        code,
        "the engine graph records CUDA graphs and demo is on cpu: use --device cuda, or --engine "
        "lean" in said,
    ) == (1, True), said
    code, _, said = run_in_process(capsys, monkeypatch, *asked, "fast")
    assert code == 1
    assert "fast" in said
    assert "native" in said


# --- when a batch stops drafting


def profile_of(model: ModelAdapter, speedups: dict[int, float]) -> Profile:
    """Return a profile whose drafting was measured at these numbers of concurrent requests."""
    golden = load_profile(Path(__file__).parents[1] / "profile" / "golden" / "v3_speculate.yaml")
    assert golden.measured is not None
    rows = tuple(
        BatchSpeed(requests=size, speedup=Interval.from_rounded(mean, mean - 0.01, mean + 0.01))
        for size, mean in speedups.items()
    )
    made_for = golden.model.model_copy(
        update={
            "id": model.spec.id,
            "family": "llama",
            "n_layers": model.spec.n_layers,
            "dtype": "float64",
            "config_sha256": model.spec.config_sha256,
            "weights_sha256": None,
        }
    )
    return golden.model_copy(
        update={
            "model": made_for,
            "drafters": RECIPE.drafters,
            "measured": golden.measured.model_copy(update={"by_batch": rows}),
        }
    )


def served(profile: Profile, tokens: list[int]) -> list[DecodeStats]:
    """Return the statistics of requests of so many tokens that run at once with --batch-passes.

    Each request must have the full model's own tokens.
    """
    model, full = world()
    desk = Scheduler(Decoder(model, profile), Limits(max_num_seqs=8, batch_passes=True))
    ids = [5, 6, 7, 5, 6, 7, 5]
    told: list[list[Any]] = [[] for _ in tokens]
    desk.submit(
        [
            Job(Request(ids, most), ids, "k", heard.append)
            for most, heard in zip(tokens, told, strict=True)
        ]
    )
    desk.start()
    desk.close()
    stats = []
    for most, heard in zip(tokens, told, strict=True):
        chunks = [
            piece.chunk
            for piece in heard
            if isinstance(piece, RoundOutput) and piece.chunk is not None
        ]
        assert [token for chunk in chunks for token in chunk.tokens] == full.greedy(ids, most)
        assert chunks[-1].stats is not None
        stats.append(chunks[-1].stats)
    return stats


def test_from_the_size_on_at_which_plain_decoding_is_faster_the_server_decodes_plainly() -> None:
    profile = profile_of(world()[0], {1: 1.5, 2: 1.2, 3: 0.9})
    assert profile.plain_from_batch == 3
    for number in (1, 2):
        assert all(0 < stats.accepted < stats.drafted for stats in served(profile, number * [30]))
    assert [stats.drafted for stats in served(profile, 4 * [30])] == [0] * 4
    assert [stats.drafted > 0 for stats in served(profile, [8, 30, 30])] == [False, True, True], (
        "once the first has ended the others draft"
    )


def test_where_drafting_always_pays_the_server_drafts_at_any_size() -> None:
    profile = profile_of(world()[0], {1: 1.5, 4: 1.2})
    assert all(stats.drafted for stats in served(profile, 5 * [30]))
