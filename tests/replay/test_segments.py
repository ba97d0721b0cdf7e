"""Long texts are replayed in segments: a sample of all texts and of all places in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.engine.native import to_native
from skipsearch.models import ModelAdapter, adapt
from skipsearch.replay import replay as replay_module
from skipsearch.replay import segments
from skipsearch.replay.reference_text import TextStore
from skipsearch.replay.replay import Replay
from skipsearch.replay.segments import (
    FEWEST_POSITIONS,
    MAX_POSITIONS,
    MIN_CUT_POSITIONS,
    MIN_SEGMENT_POSITIONS,
    MIN_SEGMENTS,
    SEGMENT_POSITIONS,
    SHORT_SEGMENT_POSITIONS,
    Segment,
    choose_max_positions,
    cut_segments,
)
from skipsearch.replay.text_kv import TextKV, compute_text_kv

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7))
MASK = SkipMask(LAYERS, (1, 3), (2,))
lengths = st.lists(st.integers(0, 600), min_size=1, max_size=60)


@given(lengths)
def test_no_position_is_in_two_segments_and_none_is_outside_its_text(
    n_positions: list[int],
) -> None:
    seen = set[tuple[int, int]]()
    for segment in cut_segments(n_positions):
        positions = {(segment.text, j) for j in range(segment.first, segment.end)}
        assert 0 <= segment.first <= segment.end <= n_positions[segment.text]
        assert not seen & positions
        seen |= positions
    assert len(seen) == min(sum(n_positions), len(seen))
    if sum(n_positions) <= MAX_POSITIONS:
        assert len(seen) == sum(n_positions), "nothing is left out that need not be"
    else:
        longest = SEGMENT_POSITIONS + MIN_SEGMENT_POSITIONS
        assert MAX_POSITIONS - longest < len(seen) <= MAX_POSITIONS


@given(lengths)
def test_few_positions_are_replayed_as_whole_texts(n_positions: list[int]) -> None:
    if sum(n_positions) < MIN_CUT_POSITIONS:
        assert cut_segments(n_positions) == [Segment(i, 0, n) for i, n in enumerate(n_positions)]


def test_a_slow_model_is_judged_on_fewer_positions() -> None:
    limits = [choose_max_positions(row_s) for row_s in (1e-4, 2e-3, 5e-3, 1.0)]
    assert choose_max_positions(2e-3, judging_s=4.0) == 2000
    assert choose_max_positions(2e-3, judging_s=60.0) == MAX_POSITIONS
    assert limits[0] == limits[1] == MAX_POSITIONS
    assert MAX_POSITIONS > limits[2] > limits[3] == FEWEST_POSITIONS
    for limit in limits:
        cut = cut_segments([512] * 64, limit)
        assert sum(segment.end - segment.first for segment in cut) == pytest.approx(limit, abs=64)


@pytest.mark.parametrize("limit", [768, 1200, 2048])
def test_few_positions_are_cut_into_short_segments_so_that_there_are_enough(limit: int) -> None:
    cut = cut_segments([512] * 64, limit)
    lengths = {segment.end - segment.first for segment in cut}
    assert len(cut) >= MIN_SEGMENTS - 1, "the last one of a text may be longer"
    assert min(lengths) >= SHORT_SEGMENT_POSITIONS
    assert max(lengths) <= SEGMENT_POSITIONS + MIN_SEGMENT_POSITIONS
    assert len({segment.text for segment in cut}) == len(cut), "each from a text of its own"


def test_a_sample_has_every_text_and_every_place() -> None:
    cut = cut_segments([512] * 64)
    assert {segment.text for segment in cut} == set(range(64))
    assert {segment.first for segment in cut} == set(range(0, 512, SEGMENT_POSITIONS))
    first_rung = cut[:8]
    assert len({segment.text for segment in first_rung}) == 8
    assert len({segment.first for segment in first_rung}) == 8


def test_a_short_rest_belongs_to_the_segment_before_it() -> None:
    cut = [s for s in cut_segments([64 + 15, 64 + 16, 2000]) if s.text < 2]
    assert sorted(cut, key=lambda s: (s.text, s.first)) == [
        Segment(0, 0, 79),
        Segment(1, 0, 64),
        Segment(1, 64, 80),
    ]


def native_model() -> ModelAdapter:
    return to_native(adapt(tiny_llama().float(), fuse=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [True, False], ids=["native", "torch"])
def test_a_position_is_judged_alike_in_a_segment_and_in_its_whole_text(
    exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the K/V that its generation left, with those of a stored text, and with K/V that are
    computed again.
    """
    model = native_model() if exact else tiny_model_and_reference()[0]
    whole = Replay(model, PROMPTS, 90, None)
    monkeypatch.setattr(segments, "MIN_CUT_POSITIONS", 0)
    cut, computed = (
        Replay(model, PROMPTS, 90, None),
        Replay(model, PROMPTS, 90, None, max_kv_bytes=0),
    )
    assert len(cut.segments) > len(PROMPTS)
    assert cut.batches.n_resident
    assert not computed.batches.n_resident
    store = TextStore(tmp_path / "texts.jsonl")
    Replay(model, PROMPTS, 90, None, store=store)
    read = list[Sequence[int]]()

    def read_once(model: ModelAdapter, text: Sequence[int]) -> TextKV | None:
        read.append(text)
        return compute_text_kv(model, text)

    monkeypatch.setattr(replay_module, "compute_text_kv", read_once)
    stored = Replay(model, PROMPTS, 90, None, store=TextStore(store.path))
    assert len(read) == len(PROMPTS), "once for all segments of a text"
    assert TextStore(store.path).get(PROMPTS[0], 0)[0] == whole.texts[0]  # type: ignore[index]
    expected = whole(MASK)
    for replay in (cut, stored, computed):
        assert replay.texts == whole.texts
        for one in replay(MASK):
            segment = replay.segments[one.prompt_index]
            of_text = expected[segment.text]
            assert np.array_equal(one.acceptance, of_text.acceptance[segment.first : segment.end])
            np.testing.assert_allclose(
                one.confidence,
                of_text.confidence[segment.first : segment.end],
                rtol=0 if exact else 1e-4,
            )
            assert one.token_budget == of_text.token_budget - segment.first
    assert 0 < np.concatenate([one.acceptance for one in expected]).mean() < 1
