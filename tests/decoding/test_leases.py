"""A leased cache is returned for every end of a request.

Its row is free, its session is open, and the next answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from helpers.marks import thorough
from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference

from skipsearch.decoding import Batch, Decoder, Request, prefix_cache
from skipsearch.decoding.batch_cache import BatchCache
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.drafters.skip.session import SkipDrafter, SkipSession
from skipsearch.engine import RowCache, SharedCache
from skipsearch.models import adapt, kv_cache
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.kv_cache import KVCache

from .checks import DRAFTINGS, PROMPTS, assert_partly_accepted
from .growing_checks import small_caches

# Where memory may run out, and whether that ends the request or only drops what the next reuses
# one.
OF_A_SESSION: dict[str, tuple[Any, str]] = {
    "no memory for a cache": (FusedAdapter, "new_cache"),
    "for what plans it": (prefix_cache, "lend"),
    "for a pass": (FusedAdapter, "block"),
    "for the logits": (FusedAdapter, "head"),
    "for a layer's buffers": (KVCache, "get_buffers"),
    "for larger ones": (kv_cache, "resize"),
    "for a drafter": (SkipDrafter, "new_session"),
    "for a draft": (SkipSession, "draft"),
}
OF_A_BATCH = OF_A_SESSION | {
    "for the shared cache": (SharedCache, "__init__"),
    "for a longer one": (SharedCache, "reserve"),
    "for a row": (RowCache, "__init__"),
    "for a row that leaves": (RowCache, "_leave"),
    "for a copy of a prefix": (KVCache, "copy_from"),
    "for a copy of a row": (BatchCache, "copy_shared_prefix"),
}
TEXT = (*PROMPTS[2], *PROMPTS[2], *PROMPTS[0])
N = 16  # tokens of an answer, with which each error occurs


@contextmanager
def out_of_memory(where: tuple[Any, str], after: int = 0) -> Iterator[list[int]]:
    """Make a function fail with out-of-memory errors after some calls. Yields how many failed."""
    owner, name = where
    real, calls, failed = getattr(owner, name), 0, list[int]()

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            failed.append(calls)
            raise MemoryError("simulated")
        return real(*args, **named)

    with patch.object(owner, name, failing):
        yield failed


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("where", OF_A_SESSION)
def test_a_session_is_open_after_an_error_at_any_point(where: str, after: int) -> None:
    model, full = tiny_model_and_reference()
    decoder = DRAFTINGS[0].decoder(model)
    with small_caches():
        session = decoder.new_session()
        session.generate(PROMPTS[2], 3)
        known = session.cached_ids
        with out_of_memory(OF_A_SESSION[where], after) as failed:
            outcome = _tokens_or_error(lambda: session.generate(TEXT, N).tokens)
        assert outcome == ("MemoryError" if failed else full.greedy(TEXT, N))
        assert session.cached_ids == [*TEXT, *full.greedy(TEXT, N)][: len(session.cached_ids)], (
            "what it stands for is what it has"
        )
        assert failed or len(session.cached_ids) >= len(known)
        again = session.generate(TEXT, N)
    assert again.tokens == full.greedy(TEXT, N)
    assert_partly_accepted(again.stats)


@pytest.mark.parametrize("where", OF_A_SESSION)
def test_a_decoder_answers_after_an_error_at_any_point(where: str) -> None:
    model, full = tiny_model_and_reference()
    decoder = DRAFTINGS[0].decoder(model)
    with small_caches():
        for after in (0, 1, 7):
            with out_of_memory(OF_A_SESSION[where], after) as failed:
                outcome = _tokens_or_error(lambda: decoder.generate(TEXT, N).tokens)
            assert outcome == ("MemoryError" if failed else full.greedy(TEXT, N))
            assert decoder.generate(TEXT, N).tokens == full.greedy(TEXT, N)


@pytest.mark.parametrize("after", [1, *thorough(0, 7)])
@pytest.mark.parametrize("where", OF_A_BATCH)
def test_rows_and_sessions_of_a_batch_come_back_after_an_error_at_any_point(
    where: str, after: int
) -> None:
    model, full = tiny_model_and_reference()
    with small_caches():
        batch, own = Batch(DRAFTINGS[0].decoder(model).loop, 3, max_slots=3 * 16), PrefixCache()
        _run(batch, own)
        with out_of_memory(OF_A_BATCH[where], after) as failed:
            for tokens in _run(batch, own):
                assert tokens == "MemoryError" or tokens in [
                    full.greedy(prompt, N) for prompt in (TEXT, PROMPTS[0])
                ]
        assert failed or after
        assert batch.n_free == 3
        assert batch._batch_cache is not None
        assert not batch._batch_cache._rows_in_use(), "every row is free"
        assert not batch._batch_cache._prompts
        assert _run(batch, own) == [full.greedy(prompt, N) for prompt in (TEXT, TEXT, PROMPTS[0])]


def _run(batch: Batch, own: PrefixCache) -> list[Any]:
    """Return the tokens of three requests, or the errors that ended them."""
    rows = [
        batch.join(Request(TEXT, N), prefix_cache=own),
        batch.join(Request(TEXT, N), tenant="a"),
        batch.join(Request(PROMPTS[0], N), tenant="a"),
    ]
    read: list[list[int]] = [[], [], []]
    while batch.running:
        batch.run_round()
        for row, tokens in zip(rows, read, strict=True):
            if row.chunk is not None:
                tokens += row.chunk.tokens
                row.chunk = None
    return [
        tokens if row.error is None else type(row.error).__name__
        for row, tokens in zip(rows, read, strict=True)
    ]


def _tokens_or_error(generate: Callable[[], list[int]]) -> Any:
    try:
        return generate()
    except MemoryError as error:
        return type(error).__name__


def test_what_there_is_no_memory_to_keep_is_let_go_and_the_answer_stands() -> None:
    """A session has no memory to shrink its cache.

    It drops the K/V and the large cache, and the request does not fail.
    """
    model, full = tiny_model_and_reference()
    session = DRAFTINGS[0].decoder(model).new_session()
    with small_caches():
        session.generate(TEXT, 60)
        with out_of_memory((KVCache, "shrink")):
            assert session.generate(PROMPTS[2], 3).tokens == full.greedy(PROMPTS[2], 3)
        assert session.nbytes == 0
        assert session.generate(PROMPTS[2], 3).stats.cached_tokens == 0


# --- how much is held


def million() -> tuple[Decoder, FullModel, int]:
    """Return a decoder of a model with a context of a million tokens, and K/V bytes per token."""
    hf = tiny_llama(layers=2, hidden=16, context=2**20)
    decoder = Decoder(adapt(hf))
    with small_caches(1):
        session = decoder.new_session()
        session.generate((3,), 1)
        return decoder, FullModel(hf), session.nbytes


def test_a_request_holds_what_its_text_needs_whatever_it_may_come_to() -> None:
    decoder, full, token_bytes = million()
    session = decoder.new_session()
    stream = session.stream(PROMPTS[2], 2**20)
    tokens = [token for _, chunk in zip(range(5), stream, strict=False) for token in chunk.tokens]
    assert tokens == full.greedy(PROMPTS[2], 5)
    assert session.nbytes <= 256 * token_bytes
    stream.close()  # type: ignore[attr-defined]
    assert 0 < session.nbytes <= 256 * token_bytes


@pytest.mark.parametrize("length", [5, 200, 700])
def test_a_cache_has_at_most_twice_the_slots_of_its_text_when_a_request_ends(length: int) -> None:
    decoder, _, token_bytes = million()
    session = decoder.new_session()
    session.generate([i * 7 % VOCAB for i in range(1500)], 4)
    long = session.nbytes
    session.generate([9, *(i * 7 % VOCAB for i in range(length))], 4)
    assert session.nbytes <= 2 * max(128, length + 4 + 128) * token_bytes
    assert session.nbytes < long


@pytest.mark.parametrize(
    ("n_tokens", "n_copies"),
    [
        pytest.param(600, 2, id="256, 512 and then 1,024 slots"),
        pytest.param(1200, 3, id="and 2,048", marks=pytest.mark.thorough),
    ],
)
def test_growing_copies_fewer_than_two_slots_a_token(n_tokens: int, n_copies: int) -> None:
    decoder, full, _ = million()
    copied: list[int] = []
    real = kv_cache.resize
    with patch.object(
        kv_cache,
        "resize",
        lambda buffer, slots: (copied.append(buffer.shape[2]), real(buffer, slots))[1],
    ):
        assert decoder.new_session().generate(PROMPTS[2], n_tokens).tokens == full.greedy(
            PROMPTS[2], n_tokens
        )
    buffers = 2 * 2  # keys and values of two layers
    assert len(copied) == n_copies * buffers
    assert sum(copied) < 2 * n_tokens * buffers


def test_the_shared_cache_of_a_batch_is_released_when_nobody_is_left() -> None:
    """One long request makes every row long, until the batch is empty."""
    decoder, _, token_bytes = million()
    batch = decoder.new_batch(4)
    assert batch._batch_cache is not None
    long = [i * 7 % VOCAB for i in range(1500)]
    batch.join(Request(long, 3))
    batch.join(Request(PROMPTS[0], 9))
    batch.run_round()
    assert batch._batch_cache.bytes > 4 * 1500 * token_bytes
    while batch.running:
        batch.run_round()
    assert batch._batch_cache.bytes == 0
    batch.join(Request(PROMPTS[0], 9))
    batch.run_round()
    assert batch._batch_cache.bytes <= 4 * 257 * token_bytes


def test_the_shared_cache_of_a_batch_has_a_limit_beyond_which_a_text_goes_on_alone() -> None:
    decoder, full, token_bytes = million()
    batch = decoder.new_batch(4, max_slots=4 * 512)
    assert batch._batch_cache is not None
    long = [i * 7 % VOCAB for i in range(1500)]
    asked = [
        (long, 6),
        ([*long[:380]], 200),
        (PROMPTS[0], 250),
        (PROMPTS[2], 9),
    ]  # too long, becomes too long, short, short
    rows = [batch.join(Request(prompt, n)) for prompt, n in asked]
    read: list[list[int]] = [[] for _ in rows]
    most = 0
    while batch.running:
        batch.run_round()
        most = max(most, batch._batch_cache.bytes)
        for row, tokens in zip(rows, read, strict=True):
            if row.chunk is not None:
                tokens += row.chunk.tokens
                row.chunk = None
    assert read == [full.greedy(prompt, n) for prompt, n in asked]
    assert 4 * 513 * token_bytes == most
