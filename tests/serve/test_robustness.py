"""Many clients, and clients that send nonsense or leave, get the right status.

The server continues to serve the others.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from serve.conftest import KEYS, Running, expected, running_server
from serve.tiny_server import LIMITS

pytestmark = pytest.mark.xdist_group("server")
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}


def post(
    server: Running,
    body: bytes | dict[str, Any],
    path: str = "/v1/completions",
    key: str | None = KEYS[0],
    **headers: str,
) -> tuple[int, dict[str, str], Any]:
    """Return (status, headers, answer)."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    sent = (
        {"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {key}"} if key else {})
        | headers
    )
    connection.request("POST", path, json.dumps(body) if isinstance(body, dict) else body, sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), json.loads(content)


def get(server: Running, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def figure(server: Running, name: str, **labels: str) -> float:
    """Return the sum of all series of a metric."""
    lines = [line for line in get(server, "/metrics").splitlines() if line.startswith(name + "{")]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if all(f'{key}="{value}"' for key, value in labels.items())
    )


def serves_on(server: Running) -> None:
    status, _, answer = post(server, ASKED)
    assert (status, answer["choices"][0]["text"]) == (200, expected("Hello", 12))


def quiet(server: Running) -> None:
    """Wait until no request runs and none is queued."""
    deadline = time.monotonic() + 20
    while figure(server, "vllm:num_requests_running") + figure(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, get(server, "/health")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "status", "param", "sentence"),
    [
        (b"{", 400, None, "not readable JSON"),
        (b"\xff\xfe", 400, None, "not readable JSON"),
        (b"[" * 50_000, 400, None, "not readable JSON"),
        (b"[]", 400, None, "the body is a list; a request is a JSON object"),
        ({}, 400, "prompt", "the request lacks prompt"),
        (ASKED | {"prompt": 3}, 400, "prompt", "prompt is not as it should be"),
        (ASKED | {"prompt": [1, "a"]}, 400, "prompt", "prompt is not as it should be"),
        (ASKED | {"prompt": []}, 400, "prompt", "prompt is an empty list"),
        (ASKED | {"prompt": ""}, 200, None, ""),  # the tokenizer begins every text with <s>
        (ASKED | {"prompt": [999]}, 400, "prompt", "token id 999 is outside"),
        (ASKED | {"max_tokens": "9"}, 400, "max_tokens", "max_tokens is not as it should be"),
        (ASKED | {"max_tokens": True}, 400, "max_tokens", "max_tokens is not"),
        (ASKED | {"max_tokens": -1}, 400, "max_tokens", "max_tokens is not"),
        (ASKED | {"max_tokens": 0}, 400, "max_tokens", "without echo nothing would be answered"),
        (ASKED | {"temperature": True}, 400, "temperature", "temperature is not"),
        (ASKED | {"temperature": 1e-9}, 400, "temperature", "logits overflow"),
        (ASKED | {"stop": [""]}, 400, "stop", "a stop string is empty"),
        (ASKED | {"stop": "x" * 1025}, 400, "stop", "a stop string has 1,025 characters"),
        (ASKED | {"stop": ["x"] * 17}, 400, "stop", "stop is not"),
        (ASKED | {"n": 33}, 400, "n", "n is not"),
        (
            ASKED | {"n": 20, "prompt": ["a", "b"]},
            400,
            "prompt",
            "40 answers are asked for at once",
        ),
        (ASKED | {"best_of": 3}, 400, "best_of", "does not choose among answers"),
        (
            ASKED | {"logit_bias": {"500": 1}},
            400,
            "logit_bias",
            "logit_bias names '500'; its keys are token ids",
        ),
        (ASKED | {"logit_bias": {"5": 101}}, 400, "logit_bias", "logit_bias is not"),
        (ASKED | {"logit_bias": {"7" * 5000: 1}}, 400, "logit_bias", "its keys are token ids"),
        (ASKED | {"prompt": "a\ud800"}, 400, "prompt", "the text has U+D800"),
        (ASKED | {"prompt": ["a", "\udcff"]}, 400, "prompt", "the text has the byte 0xff"),
        (ASKED | {"\ud800": 1}, 400, "?", "is no field of this request"),
        (ASKED | {"model": "\ud800"}, 404, "model", "there is no model"),
        (ASKED | {"stop": "\ud800"}, 200, None, ""),
        (ASKED | {"user": "\ud800"}, 200, None, ""),
        (ASKED | {"frequency_penalty": 3}, 400, "frequency_penalty", "frequency_penalty is not"),
        (ASKED | {"min_p": 1.1}, 400, "min_p", "min_p is not"),
        (ASKED | {"repetition_penalty": 0}, 400, "repetition_penalty", "repetition_penalty is not"),
        (ASKED | {"max_token": 3}, 400, "max_token", "max_token is no field of this request"),
        (ASKED | {"model": "other"}, 404, "model", "there is no model 'other' here"),
        (ASKED | {"user": "me", "presence_penalty": 0, "logit_bias": {}}, 200, None, ""),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_what_cannot_be_carried_out_gets_its_status_and_a_sentence(
    server: Running, body: Any, status: int, param: str | None, sentence: str
) -> None:
    answered, _, answer = post(server, body)
    assert answered == status, answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert sentence in answer["error"]["message"]
        assert sentence == "" or answer["error"]["param"] == param
    serves_on(server)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "no content"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            'a part of the type "image_url"; this server reads text alone',
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
            "a tool is not",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "tool_calls is not a list",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "top_logprobs needs logprobs",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the text has U+D800"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages is not as it should be"),
        (
            {"messages": [{"role": "user", "content": "x", "\ud800": 1}]},
            "messages is not as it should be",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "\ud800"}}],
            },
            "a tool has",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
            "response_format is",
        ),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_chat_that_cannot_be_carried_out_is_refused(
    server: Running, body: Any, sentence: str
) -> None:
    status, _, answer = post(server, body, "/v1/chat/completions")
    assert status == 400
    assert sentence in answer["error"]["message"]


def test_addresses_methods_and_content_types_that_are_none(server: Running) -> None:
    assert post(server, ASKED, "/v1/nothing")[0] == 404
    assert post(server, ASKED, "/v1/models")[0] == 405
    for media in ("text/plain", "application/x-www-form-urlencoded"):
        status, _, answer = post(server, ASKED, **{"Content-Type": media})
        assert (status, answer["error"]["code"]) == (415, "wrong_content_type")
    status, _, answer = post(server, ASKED, Host="evil.example")
    assert (status, answer["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("key", [None, "", "first", "first-key2", "FIRST-KEY", "é"])
def test_a_key_is_asked_for(server: Running, key: str | None) -> None:
    status, headers, answer = post(
        server, ASKED, key=None if key is None else key.encode("utf-8").decode("latin-1")
    )
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"


def test_a_prefix_is_reused_by_requests_of_the_same_key_alone(server: Running) -> None:
    check_whose_prefixes(server)


def check_whose_prefixes(server: Running) -> None:
    asked = ASKED | {"prompt": "a secret that only the first one knows, word for word"}

    def cached(key: str) -> int:
        return int(
            post(server, asked, key=key)[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) == len(asked["prompt"])
    assert cached(KEYS[1]) == 0


def test_no_text_of_a_request_is_in_metrics_or_the_log(server: Running) -> None:
    post(server, ASKED | {"prompt": "QQXXQQ"})
    post(server, ASKED | {"prompt": "QQXXQQ", "max_tokens": "QQXXQQ"})
    assert "QQXXQQ" not in get(server, "/metrics")
    assert "QQXXQQ" not in server.log()
    assert "Traceback" not in server.log()


def test_metrics_have_the_names_that_dashboards_know_and_count(server: Running) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:request_success_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    )
    before = {name: figure(server, name) for name in names}
    figures = post(server, ASKED | {"prompt": "a b c a b c a", "max_tokens": 60})[2]["skipsearch"]
    grown = {name: figure(server, name) - before[name] for name in names}
    assert grown["vllm:prompt_tokens_total"] == 14
    assert grown["vllm:generation_tokens_total"] == 60
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == figures["drafted"] > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == figures["accepted"] > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == figures["accepted"]
    assert grown["vllm:request_success_total"] == 1


# --- sizes and times


def raw(server: Running, data: bytes) -> bytes:
    """Return the server's answer to these bytes, until it closes the connection or a minute has
    passed.
    """
    host, _, port = urlsplit(server.address).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        return answer


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(server: Running) -> None:
    large = b'{"prompt": "' + b"a" * (LIMITS.max_body_bytes + 10) + b'"}'
    assert post(server, large)[0] == 413
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{KEYS[0]}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    chunk = f"{50_000:x}\r\n".encode() + b"a" * 50_000 + b"\r\n"
    assert raw(server, head + 3 * chunk).startswith(b"HTTP/1.1 413")
    serves_on(server)


def test_a_body_that_does_not_arrive_is_not_waited_for(tmp_path: Path) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{KEYS[0]}\r\nContent-Type: application/json\r\n"
        "Content-Length: 500\r\n\r\n{"
    ).encode()
    with running_server(tmp_path, ",".join(KEYS), "body_timeout_s=1") as server:
        assert raw(server, head).startswith(b"HTTP/1.1 408")
        assert "ok" in get(server, "/health")


@pytest.mark.parametrize("method", ["POST /v1/completions", "GET /health"])
def test_a_body_with_two_ends_is_refused(server: Running, method: str) -> None:
    request = (
        f"{method} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
        "Content-Type: application/json\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
        "\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ).encode()
    answer = raw(server, request)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"ambiguous_body" in answer
    assert answer.count(b"HTTP/1.1") == 1
    serves_on(server)


def test_ten_thousand_header_lines_are_refused(server: Running) -> None:
    lines = b"".join(b"X-%d: something\r\n" % i for i in range(10_000))
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431"), answer[:100]
    assert raw(server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    serves_on(server)


@pytest.mark.thorough
def test_a_queue_that_is_full_says_when_to_come_again(server: Running) -> None:
    found: list[tuple[int, dict[str, str]]] = []

    def ask() -> None:
        status, headers, _ = post(server, ASKED | {"max_tokens": 80})
        found.append((status, headers))

    threads = [threading.Thread(target=ask) for _ in range(44)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [headers for status, headers in found if status == 429]
    assert {status for status, _ in found} == {200, 429}
    assert len(found) - len(refused) >= LIMITS.max_num_seqs
    assert all(int(headers["retry-after"]) >= 1 for headers in refused)
    serves_on(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(server: Running, stream: bool) -> None:
    quiet(server)
    before, gone = (
        figure(server, "vllm:generation_tokens_total"),
        figure(server, "vllm:request_success_total"),
    )
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(ASKED | {"max_tokens": 500, "stream": stream}),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"},
    )
    while figure(server, "vllm:num_requests_running") < 1:
        time.sleep(0.002)
    connection.close()
    if connection.sock is not None:
        connection.sock.close()
    quiet(server)
    assert figure(server, "vllm:generation_tokens_total") - before < 500
    assert figure(server, "vllm:request_success_total") == gone + 1
    serves_on(server)


def test_a_client_that_reads_slowly_gets_everything(server: Running) -> None:
    body = json.dumps(ASKED | {"max_tokens": 60, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{KEYS[0]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    host, _, port = urlsplit(server.address).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(head + body)
        read = b""
        while part := connection.recv(400):
            read += part
            time.sleep(0.005)
    assert read.rstrip().endswith(b"0") or b"data: [DONE]" in read
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in read.decode().splitlines()
        if line.startswith("data: {")
    )
    assert text == expected("Hello", 60)


@pytest.mark.thorough
def test_three_hundred_requests_of_sixteen_clients_some_of_which_go_away(server: Running) -> None:
    """No request is lost, no answer is wrong, and memory does not grow."""
    check_load(server, 19)


@pytest.mark.thorough
def test_requests_that_run_together_get_the_same_answers(tmp_path: Path) -> None:
    """Running requests share passes here.

    There are samples with seeds, plain requests, and clients that leave.
    """
    with running_server(tmp_path, ",".join(KEYS), "together") as server:
        check_load(server, 5)
        samples = [
            post(server, ASKED | {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 20})[2][
                "choices"
            ]
            for _ in range(2)
        ]
        assert samples[0] == samples[1]
        assert len({choice["text"] for choice in samples[0]}) == 3
        plain = post(server, ASKED | {"skipsearch": {"profile": "none"}, "max_tokens": 30})[2]
        assert plain["choices"][0]["text"] == expected("Hello", 30)
        check_whose_prefixes(server)


def check_load(server: Running, rounds: int) -> None:
    prompts = [
        "def f(x):",
        "a b c a b c",
        "Hello",
        "zzz",
        "one two one two one",
        "x",
        "import os",
        "Q",
    ]
    process = psutil.Process(server.process.pid)
    wrong: list[Any] = []
    counts = {"answered": 0, "left": 0}
    lock = threading.Lock()

    def work(number: int, rounds: int) -> None:
        choose = random.Random(number)
        for _ in range(rounds):
            prompt, tokens, stream = (
                choose.choice(prompts),
                choose.randint(1, 24),
                choose.random() < 0.5,
            )
            leaves = choose.random() < 0.25
            connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=120)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(ASKED | {"prompt": prompt, "max_tokens": tokens, "stream": stream}),
                    {
                        "Content-Type": "application/json",
                        "Authorization": f"Bearer {choose.choice(KEYS)}",
                    },
                )
                if leaves:
                    time.sleep(choose.random() * 0.05)
                    with lock:
                        counts["left"] += 1
                    continue
                answer = connection.getresponse()
                content = answer.read().decode()
                lines = (
                    [line[6:] for line in content.splitlines() if line.startswith("data: {")]
                    if stream
                    else [content]
                )
                text = (
                    "".join(json.loads(line)["choices"][0]["text"] for line in lines)
                    if answer.status == 200
                    else ""
                )
                with lock:
                    counts["answered"] += 1
                    if answer.status != 200 or text != expected(prompt, tokens):
                        wrong.append((answer.status, prompt, tokens, text))
            finally:
                connection.close()

    def load(rounds: int) -> None:
        threads = [threading.Thread(target=work, args=(number, rounds)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for prompt in prompts:
        expected(prompt, 40)
    load(3)  # what is allocated once is there
    quiet(server)
    before = process.memory_info().rss
    load(rounds)
    quiet(server)
    after = process.memory_info().rss
    assert not wrong
    assert counts["answered"] + counts["left"] == 16 * (3 + rounds)
    assert counts["left"] > 1.5 * rounds
    assert after < 1.05 * before, f"{before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after"
    serves_on(server)


@pytest.mark.thorough
def test_sigterm_finishes_what_runs_and_takes_nothing_more(tmp_path: Path) -> None:
    with running_server(tmp_path, keys=None) as server:
        connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(ASKED | {"max_tokens": 150, "stream": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        first = answer.read(10)
        server.process.send_signal(signal.SIGTERM)
        content = (first + answer.read()).decode()
        assert content.rstrip().endswith("data: [DONE]")
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in content.splitlines()
            if line.startswith("data: {")
        )
        assert text == expected("Hello", 150)
        server.process.wait(30)
        with pytest.raises(OSError, match="refused"):
            post(server, ASKED)
        assert "Traceback" not in server.log()
