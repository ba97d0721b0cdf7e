"""Replay of models with recurrent layers: every position of a text is drafted from the states that
the full model had there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding.recurrent_checks import recurrent_world
from helpers.tiny import LAYERS

from replay.exact_replay import ExactReplay
from skipsearch.core.mask import SkipMask
from skipsearch.engine import forward
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.evidence import collect_evidence
from skipsearch.replay.replay import Replay
from skipsearch.timing.latency import measure_costs

PROMPTS = ([5, 17, 40, 3], [60, 2, 2, 31, 8, 44], [33, 34, 9])
MASKS = (
    SkipMask(LAYERS, (1, 3), (2,)),
    SkipMask(LAYERS, (0,)),
    SkipMask(LAYERS, (), (1, 4)),
    SkipMask(LAYERS, (2, 4)),
)


@pytest.mark.parametrize(
    "family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.thorough)]
)
@torch.no_grad()
def test_it_says_what_a_draft_at_each_position_names(family: str) -> None:
    """Against a draft pass of one token behind a prefill of all before it, a cache of its own for
    each position.
    """
    model, full = recurrent_world(family)
    replay = Replay(model, PROMPTS, 9, None)
    assert replay.continuations == [full.greedy(prompt, 9) for prompt in PROMPTS]
    found = [replay(mask) for mask in MASKS]
    for p, (prompt, text) in enumerate(zip(PROMPTS, replay.continuations, strict=True)):
        for at in range(len(text) - 1):
            known = [*prompt, *text[:at]]
            cache, planner = (
                model.new_cache(1, len(known) + 1),
                Planner(len(known) + 1, model.spec.device),
            )
            forward(model, torch.tensor([known]), cache, planner.plan_chain(0, len(known)))
            for mask, replayed in zip(MASKS, found, strict=True):
                logits = forward(
                    model,
                    torch.tensor([[text[at]]]),
                    cache,
                    planner.plan_chain(len(known), 1),
                    mask,
                )[0, -1]
                assert replayed[p].acceptance[at] == (int(logits.argmax()) == text[at + 1])
                assert np.isclose(
                    replayed[p].confidence[at], float(logits.softmax(dim=-1).max()), atol=1e-5
                )


def test_a_mask_that_skips_nothing_is_always_right_and_what_is_not_kept_is_made_again() -> None:
    model, _ = recurrent_world("lfm2")
    kept, made = Replay(model, PROMPTS, 12, None), Replay(model, PROMPTS, 12, None, max_kv_bytes=0)
    assert (kept.batches.n_resident, made.batches.n_resident) == (3, 0)
    assert all(one.acceptance.all() for one in kept(SkipMask(LAYERS)))
    for one, other in zip(kept(MASKS[0]), made(MASKS[0]), strict=True):
        assert np.array_equal(one.confidence, other.confidence)


def test_a_sampled_task_is_replayed_by_chances() -> None:
    model, _ = recurrent_world("lfm2")
    replay = Replay(model, PROMPTS, 12, None, sampling=SamplingParams(0.8))
    assert replay.measure_acceptance(SkipMask(LAYERS)) > 0.99
    assert 0 < replay.measure_acceptance(MASKS[0]) < 0.99


def test_searchers_get_their_evidence() -> None:
    model, _ = recurrent_world("lfm2")
    replay = Replay(model, PROMPTS, 8, None)
    evidence = collect_evidence(replay, measure_costs(model, 4, 16, 1))
    assert evidence.single_skip_acceptance is not None
    assert len(evidence.cosines or ()) == len(evidence.single_skip_acceptance()) == 2 * LAYERS
    assert evidence.states is not None
    assert evidence.probe is not None
    for i in range(LAYERS):
        torch.testing.assert_close(
            evidence.probe(i, evidence.states[i : i + 1], True, True)[0], evidence.states[i + 1]
        )


def test_exact_replay_is_refused_in_a_sentence() -> None:
    model, _ = recurrent_world("lfm2")
    with pytest.raises(SearchError, match="replay it without `exact`"):
        ExactReplay(Replay(model, PROMPTS, 6, None), 4)
