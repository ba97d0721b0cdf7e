"""What searchers are given: measured on the full model's own text, and the same as the Hugging Face
model shows to hooks.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import LAYERS, own_modules, tiny_model_and_reference
from models.tiny import adapted
from tuning.small_search import COSTS

from skipsearch.core.mask import SkipMask
from skipsearch.replay.evidence import CONFIRMED_SUBLAYERS, TRACED_POSITIONS, collect_evidence
from skipsearch.replay.replay import Replay
from skipsearch.searchers import Evidence

__all__ = ["own_modules"]

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7))
MASK = SkipMask(LAYERS, (1, 3), (2,))


@cache
def world() -> tuple[Replay, Evidence]:
    replay = Replay(tiny_model_and_reference()[0], PROMPTS, 24, end_on_repeat=6)
    return replay, collect_evidence(replay, COSTS)


@cache
def streams() -> list[torch.Tensor]:
    """[N, H] before each sub-layer and after the last, over the same positions, from hooks on the
    norms of the unmodified model.
    """
    replay, _ = world()
    hf: Any = replay.model.model  # type: ignore[attr-defined]
    norms = [
        norm
        for layer in hf.model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in range(2 * LAYERS + 1)]
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs, s=s: seen[s].append(inputs[0][0]))
        for s, norm in enumerate((*norms, hf.model.norm))
    ]
    prompts = [prompt for batch in replay.batches for prompt in batch.prompt_indices]
    for prompt in prompts:
        read = replay.continuations[prompt][:-1][:TRACED_POSITIONS]
        hf(torch.tensor([[*PROMPTS[prompt], *read]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    starts = [len(PROMPTS[p]) for p in prompts]
    return [
        torch.cat([h[start:] for h, start in zip(of_one, starts, strict=True)]) for of_one in seen
    ]


def test_cosines_are_those_that_hooks_on_the_hugging_face_model_see() -> None:
    expected = [
        float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
        for a, b in pairwise(streams())
    ]
    assert world()[1].cosines == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 2 * LAYERS


def test_states_are_the_residual_stream_before_each_layer_and_after_the_last() -> None:
    states = world()[1].states
    assert states is not None
    torch.testing.assert_close(states, torch.stack(streams()[::2]))


def test_probing_a_layer_on_the_models_own_states_gives_the_next_ones() -> None:
    evidence = world()[1]
    assert evidence.probe is not None
    assert evidence.states is not None
    for i in range(LAYERS):
        out = evidence.probe(i, evidence.states[i][None], True, True)
        torch.testing.assert_close(out[0], evidence.states[i + 1])
        half = evidence.probe(i, evidence.states[i][None], True, False)
        torch.testing.assert_close(half[0], streams()[2 * i + 1])
        torch.testing.assert_close(evidence.probe(i, half, False, True)[0], evidence.states[i + 1])


def test_states_probed_together_do_not_see_each_other() -> None:
    evidence = world()[1]
    assert evidence.probe is not None
    assert evidence.states is not None
    together = evidence.probe(2, evidence.states[1:4], True, True)
    for m, state in enumerate(evidence.states[1:4]):
        torch.testing.assert_close(
            together[m], evidence.probe(2, state[None], True, True)[0], rtol=0, atol=0
        )


def test_acceptance_without_a_sub_layer_is_that_of_the_mask_that_skips_it_alone() -> None:
    replay, evidence = world()
    assert evidence.single_skip_acceptance is not None
    assert evidence.cosines is not None
    estimated, measured = (
        np.array(alphas)
        for alphas in (
            evidence.single_skip_acceptance(),
            [
                replay.measure_acceptance(SkipMask.from_sublayers(LAYERS, [s]))
                for s in range(2 * LAYERS)
            ],
        )
    )
    assert (estimated == measured).sum() >= CONFIRMED_SUBLAYERS
    assert ((estimated >= 0) & (estimated <= 1)).all()
    fitted = np.flatnonzero(estimated != measured)
    by_turn = fitted[np.argsort(np.array(evidence.cosines)[fitted])]
    assert (np.diff(estimated[by_turn]) >= 0).all(), "what turns the stream less is accepted more"


def test_what_no_searcher_asks_for_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[SkipMask] = []
    measure = Replay.measure_acceptance

    def count(replay: Replay, mask: SkipMask, *limits: Any) -> float:
        replayed.append(mask)
        return measure(replay, mask, *limits)

    monkeypatch.setattr(Replay, "measure_acceptance", count)
    evidence = collect_evidence(world()[0], COSTS)
    assert evidence.costs is COSTS
    assert not replayed
    assert evidence.single_skip_acceptance is not None
    assert evidence.single_skip_acceptance() == evidence.single_skip_acceptance()
    assert len(replayed) == min(CONFIRMED_SUBLAYERS, 2 * LAYERS)


def test_gathering_and_probing_leave_replays_as_they_were() -> None:
    replay, evidence = world()
    before = replay(MASK)
    again = collect_evidence(replay, COSTS)
    assert again.probe is not None
    assert again.states is not None
    again.probe(1, again.states[:2] * 3, True, True)
    assert again.cosines == evidence.cosines
    for a, b in zip(before, replay(MASK), strict=True):
        assert np.array_equal(a.confidence, b.confidence)


@pytest.mark.parametrize("family", ["opt", "phi", "qwen2", "falcon-rw"])
def test_evidence_is_gathered_for_models_of_every_kind_and_the_layers_follow_from_each_other(
    family: str,
) -> None:
    evidence = collect_evidence(
        Replay(adapted(family), ((5, 17, 40, 3, 8), (9, 2)), 16, end_on_repeat=None), COSTS
    )
    assert evidence.states is not None
    assert evidence.probe is not None
    for i in range(3):
        torch.testing.assert_close(
            evidence.probe(i, evidence.states[i][None], True, True)[0], evidence.states[i + 1]
        )
