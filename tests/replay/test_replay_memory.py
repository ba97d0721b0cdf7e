"""How much of the continuations' K/V is kept decides how long a replay takes and nothing else."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from helpers.tiny import LAYERS, own_modules, tiny_model_and_reference

from replay.exact_replay import ExactReplay
from skipsearch.core.mask import SkipMask
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models.loading import placement
from skipsearch.replay import replay_batches, text_kv
from skipsearch.replay.replay import Replay

__all__ = ["own_modules"]

PROMPTS = tuple(tuple(range(i, i + 1 + i % 5)) for i in range(20))
MASKS = (SkipMask(LAYERS, (1, 3), (2,)), SkipMask(LAYERS, (0,), (0, 4)))
SAMPLED = SamplingParams(0.7, top_p=0.95)


@cache
def kept_whole(sampling: SamplingParams = replay_batches.GREEDY) -> Replay:
    return replay(sampling, None)


def replay(sampling: SamplingParams, kv_bytes: int | None) -> Replay:
    return Replay(
        tiny_model_and_reference()[0],
        PROMPTS,
        12,
        end_on_repeat=1,
        sampling=sampling,
        max_kv_bytes=kv_bytes,
    )


def bytes_kept(whole: Replay) -> int:
    return sum(b.nbytes for b in whole.batches)


def test_everything_is_kept_where_there_is_room() -> None:
    assert kept_whole().batches.n_resident == len(kept_whole().batches) > 1
    assert all(a is b for a, b in zip(kept_whole().batches, kept_whole().batches, strict=True))


@pytest.mark.parametrize("sampling", [replay_batches.GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("share", [0, 0.9])
def test_a_small_budget_gives_the_same_bits(share: float, sampling: SamplingParams) -> None:
    whole = kept_whole(sampling)
    small = replay(sampling, int(share * bytes_kept(whole)))
    assert len(small.batches) == len(whole.batches)
    assert (small.batches.n_resident > 0) == (share > 0)
    assert small.batches.n_resident < len(small.batches)
    for mask in MASKS:
        for a, b in zip(whole(mask), small(mask), strict=True):
            assert np.array_equal(a.acceptance, b.acceptance)
            assert np.array_equal(a.confidence, b.confidence)


def test_so_it_does_for_exact_replay() -> None:
    exact, of_small = (
        ExactReplay(r, 4)(MASKS[0]) for r in (kept_whole(), replay(replay_batches.GREEDY, 0))
    )
    assert all(
        np.array_equal(a.accepted, b.accepted) and np.array_equal(a.confidence, b.confidence)
        for a, b in zip(exact, of_small, strict=True)
    )


def test_the_budget_is_kept_to_the_byte() -> None:
    needed = bytes_kept(kept_whole())
    assert replay(replay_batches.GREEDY, needed).batches.n_resident == len(kept_whole().batches)
    assert (
        replay(replay_batches.GREEDY, needed - 1).batches.n_resident
        == len(kept_whole().batches) - 1
    )


def test_by_default_it_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_kept(kept_whole())
    monkeypatch.setattr(
        placement, "available_host_memory", lambda: needed / text_kv.KV_MEMORY_FRACTION
    )
    assert replay(replay_batches.GREEDY, None).batches.n_resident == len(kept_whole().batches)
    monkeypatch.setattr(placement, "available_host_memory", lambda: 0)
    assert replay(replay_batches.GREEDY, None).batches.n_resident == 0


def test_batches_hold_every_text_once_with_little_padding() -> None:
    batches = list(kept_whole().batches)
    assert sorted(p for b in batches for p in b.prompt_indices) == [
        i for i, t in enumerate(kept_whole().continuations) if len(t) > 1
    ]
    for b in batches:
        assert b.input_ids.shape[0] <= replay_batches.MAX_BATCH_PROMPTS
        assert b.input_ids.numel() <= replay_batches.MAX_PASS_ROWS["cpu"]
        assert list(b.n_valid) == sorted(b.n_valid)
        assert len(b.valid_positions) == sum(b.n_valid)


def test_a_few_batches_will_do_for_a_ranking() -> None:
    batches = kept_whole().batches
    assert [len(list(batches.subset(n))) for n in (None, 10_000, 1)] == [
        len(batches),
        len(batches),
        1,
    ]
