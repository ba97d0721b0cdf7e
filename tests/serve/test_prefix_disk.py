"""K/V of prompts that survive a restart: the same tokens with them and without, whatever happens to
the files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
import torch
from helpers.full_disk import limit_file_size
from helpers.threads import one_thread

from skipsearch.decoding import Decoder, Request
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.serve import prefix_disk
from skipsearch.serve.prefix_disk import MIN_TOKENS, PrefixDisk
from skipsearch.serve.prefix_pool import PrefixPool
from skipsearch.serve.scheduler import Job, Scheduler

from . import tiny_server
from .tiny_server import LIMITS, RECIPE

__all__ = ["one_thread"]
LONG = [5, 6, 7, 8, 9] * (MIN_TOKENS // 5 + 4)
OTHER = [9, 8, 7, 6, 4] * (MIN_TOKENS // 5 + 4)


_tiny_model = cache(tiny_server.model)


def model(weights_sha256: str | None = "1" * 64) -> Any:
    """A model that counts as one from files with this sum."""
    loaded: Any = copy(_tiny_model())
    loaded.spec = replace(loaded.spec, weights_sha256=weights_sha256)
    return loaded


def serve(
    folder: Path | None,
    *prompts: list[int],
    tenant: str = "key",
    weights_sha256: str | None = "1" * 64,
    **limits: Any,
) -> Any:
    """Decode prompts one after the other in a new server; return (tokens, cached tokens)."""
    limits = {"prefix_folder": folder, **limits}
    scheduler = Scheduler(Decoder(model(weights_sha256), RECIPE), replace(LIMITS, **limits))
    scheduler.start()
    answers = []
    for prompt in prompts:
        outputs: SimpleQueue[Any] = SimpleQueue()
        request = Request(prompt, 12, ignore_eos=True)
        scheduler.submit([Job(request, prompt, tenant, outputs.put)])
        rounds = [output.chunk for output in iter(outputs.get, None)]
        tokens = [token for chunk in rounds for token in chunk.tokens]
        answers.append((tokens, rounds[-1].stats.cached_tokens))
    scheduler.close()
    return answers


def expected(prompt: list[int]) -> list[int]:
    return _decode(tuple(prompt)).copy()


@cache
def _decode(prompt: tuple[int, ...]) -> list[int]:
    return Decoder(model(), RECIPE).generate(Request([*prompt], 12, ignore_eos=True)).tokens


@pytest.mark.parametrize("batch_passes", [False, True])
def test_a_prompt_survives_a_restart(batch_passes: bool, tmp_path: Path) -> None:
    run = partial(serve, tmp_path / "kv", batch_passes=batch_passes)
    assert run(LONG) == [(expected(LONG), 0)]
    (file,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for prompt, n_cached in (
        ([*LONG, 4, 4], len(LONG)),
        (LONG[:-1], len(LONG) - 2),
        (OTHER, 0),
        ([*OTHER, 3], len(OTHER)),
    ):
        assert run(prompt) == [(expected(prompt), n_cached)]
    assert serve(None, LONG) == [(expected(LONG), 0)]


def test_a_stored_text_is_read_to_the_last_bit(tmp_path: Path) -> None:
    prefix = PrefixCache()
    decoder = Decoder(model(), RECIPE)
    list(decoder.stream(Request(LONG, 12, ignore_eos=True), prefix_cache=prefix))
    PrefixDisk(tmp_path, 10**9, decoder.model).store("key", prefix)
    stored = PrefixDisk(tmp_path, 10**9, decoder.model).load("key", LONG)
    assert stored is not None
    assert stored.tokens == prefix.tokens
    assert stored.cache is not None
    assert prefix.cache is not None
    for side in ("keys", "values"):
        for one, other in zip(
            getattr(stored.cache, side), getattr(prefix.cache, side), strict=True
        ):
            assert torch.equal(one[:, :, : len(stored.tokens)], other[:, :, : len(stored.tokens)])


def test_what_leaves_the_memory_goes_to_the_disk(tmp_path: Path) -> None:
    answers = serve(tmp_path, LONG, OTHER, [*LONG, 4], prefix_cache_size=1)
    assert [n_cached for _, n_cached in answers] == [0, 0, len(LONG)]


def test_others_do_not_wait_while_a_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, write = Event(), prefix_disk.save_file

    def write_later(*arguments: Any) -> None:
        assert may_end.wait(30)
        write(*arguments)

    monkeypatch.setattr(prefix_disk, "save_file", write_later)
    texts = [LONG, OTHER, [*OTHER, 4]]
    pool = PrefixPool(1, 10**9, PrefixDisk(tmp_path, 10**9, model()))
    session = Decoder(model(), RECIPE)
    for text in texts[:2]:
        prefix = pool.acquire("key", text)
        session.generate(Request(text, 3), prefix_cache=prefix)
        pool.release("key", prefix)
    assert not list(tmp_path.glob("*.prefix"))
    assert pool.acquire("key", texts[2]).count_shared(texts[2]) == len(OTHER)
    may_end.set()
    assert pool.acquire("key", [*LONG, 4]).count_shared([*LONG, 4]) == len(LONG)
    pool.close()
    assert len(list(tmp_path.glob("*.prefix"))) == 1


def test_texts_that_one_continues_are_stored_once(tmp_path: Path) -> None:
    prompt = LONG
    for _ in range(3):
        ((answer, _),) = serve(tmp_path, prompt)
        prompt = [*prompt, *answer, 4]
    assert len(list(tmp_path.iterdir())) == 1


def test_short_texts_are_not_stored(tmp_path: Path) -> None:
    serve(tmp_path, LONG[:40])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["tenant", "code", "weights", "no weights"])
def test_a_text_is_for_its_tenant_its_model_and_its_code(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(tmp_path, LONG)
    if other == "code":
        monkeypatch.setattr(prefix_disk, "hash_own_code", lambda: "newer code")
    tenant = "another" if other == "tenant" else "key"
    sums = {"weights": "0" * 64, "no weights": None}
    for _ in range(2 if other == "no weights" else 1):
        answers = serve(tmp_path, LONG, tenant=tenant, weights_sha256=sums.get(other, "1" * 64))
        assert answers == [(expected(LONG), 0)]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:],
    "cut short": lambda data: data[:-1000],
    "header": lambda data: data[:40] + b"\0" + data[41:],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_computed_again(damage: str, tmp_path: Path) -> None:
    serve(tmp_path, LONG)
    (file,) = tmp_path.iterdir()
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert serve(tmp_path, LONG) == [(expected(LONG), 0)]
    assert serve(tmp_path, [*LONG, 4]) == [(expected([*LONG, 4]), len(LONG))]


def test_files_used_longest_ago_go_first(tmp_path: Path) -> None:
    serve(tmp_path, LONG)
    (first,) = tmp_path.iterdir()
    n_bytes = first.stat().st_size
    os.utime(first, (1, 1))
    for i in range(4):
        serve(tmp_path, [i + 3, *OTHER], prefix_disk_bytes=int(2.5 * n_bytes))
    assert len(list(tmp_path.iterdir())) == 2
    assert not first.exists()
    assert serve(tmp_path, [6, *OTHER, 3])[0][1] == len(OTHER) + 1


def test_a_full_disk_stores_nothing_and_stops_nobody(tmp_path: Path) -> None:
    with limit_file_size(5_000):
        assert serve(tmp_path, LONG) == [(expected(LONG), 0)]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_no_text_and_makes_place(tmp_path: Path) -> None:
    serve(tmp_path, LONG)
    (file,) = tmp_path.iterdir()
    left = tmp_path / ".0123.prefix.tmp"
    left.write_bytes(file.read_bytes()[:-7])
    os.utime(left, (1, 1))
    n_bytes = file.stat().st_size
    prompt = [*LONG, 4]
    assert serve(tmp_path, prompt, prefix_disk_bytes=int(2.5 * n_bytes)) == [
        (expected(prompt), len(LONG))
    ]
    assert not left.exists()
