"""Replay of draft heads, compared with rounds that start at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding.mtp_checks import by_definition
from helpers.modules import module_folder, small_mtp
from helpers.tiny import tiny_model_and_reference

from skipsearch.core.reading import Vocabulary
from skipsearch.drafters.mtp.weights import load_draft_head
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.replay import segments
from skipsearch.replay.draft_head_replay import replay_draft_head
from skipsearch.replay.replay import Replay

STEPS = 4


@torch.no_grad()
def test_every_round_accepts_what_the_definition_drafts() -> None:
    model, full = tiny_model_and_reference()
    spec = small_mtp(0.1)
    prompts = [(5, 17, 40, 3), (9, 2)]
    replay = Replay(model, prompts, 12, None)
    head = load_draft_head(model, spec.module, [module_folder()])
    [rounds] = replay_draft_head(replay, head)
    expected = []
    for prompt, text in zip(prompts, replay.continuations, strict=True):
        for start in range(len(text) - 1):
            drafted = list[int]()
            following = text[start + 1 : start + 1 + STEPS]
            for token in following:
                known = [*prompt, *text[: start + 1]]
                drafted.append(int(by_definition(full, spec, known, drafted).argmax()))
                if drafted[-1] != token:
                    break
            expected.append(sum(map(int.__eq__, drafted, following)))
    assert rounds.accepted_len.clip(max=STEPS).tolist() == expected
    assert sum(expected) > 0
    assert 0 in expected


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)], ids=str)
def test_rows_of_the_head_that_no_draft_needs_change_nothing(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MIN_CUT_POSITIONS", 50)
    monkeypatch.setattr(segments, "SEGMENT_POSITIONS", 20)
    model, _ = tiny_model_and_reference()
    prompts = [(5, 17, 40, 3), (9, 2)]
    replay = Replay(model, prompts, 60, None, sampling=sampling, max_positions=90)
    assert len(replay.segments) > len(prompts), "segments of one text share its pass"
    head = load_draft_head(model, small_mtp(0.1).module, [module_folder()])
    some = [Vocabulary(lowest=12, tokens="30-33"), Vocabulary(lowest=20, tokens="")]
    _, *expected = replay_draft_head(replay, head, [None, *some])
    for found, wanted in zip(replay_draft_head(replay, head, some), expected, strict=True):
        assert found.accepted_len.tolist() == wanted.accepted_len.tolist()
        np.testing.assert_allclose(found.confidence, wanted.confidence, rtol=1e-5)
        assert 0 < found.accepted_len.sum() < found.accepted_len.size * STEPS
