"""Replay records the experts of each row, and rounds are priced by the experts that they read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_llama
from helpers.tiny_experts import tiny_experts

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.drafters.exits import DraftPolicy, make_exit
from skipsearch.models import adapt
from skipsearch.models.experts import record_experts
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_from_replay, rounds_without_model
from skipsearch.replay.simulate import simulate
from skipsearch.replay.sweep import sweep

PROMPTS = ((5, 17, 40, 3), (7,), (40, 2, 2, 31, 8, 44, 21, 13, 7))
MASK = SkipMask(3, (1,))
COSTS = Costs((1.0,) * 6, 0.5, (6.5, 7.0, 7.5, 8.0), expert_s=0.1, experts=(9.0, 12.0, 14.0, 15.0))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_counts_are_those_of_the_modules_own_routers(family: str) -> None:
    hf = tiny_experts(family)
    replay = Replay(adapt(hf), PROMPTS, 14, end_on_repeat=None)
    rounds = rounds_from_replay(replay(MASK))
    assert rounds.experts is not None
    for i, prompt in enumerate(PROMPTS):
        text = [*prompt, *replay.continuations[i]]
        with record_experts(hf) as chosen:
            hf(input_ids=torch.tensor([text]), use_cache=False)
        first = int(rounds.prompt_offsets[i])
        for at in range(int(rounds.n_positions[i])):
            for n in range(min(4, len(replay.continuations[i]) - 1 - at)):
                rows = slice(len(prompt) + at, len(prompt) + at + n + 1)
                distinct = sum(len(set(layer[rows].flatten().tolist())) for layer in chosen)
                assert rounds.experts[first + at, n] == distinct
    lookup = rounds_without_model(
        replay.continuations, replay.token_budgets, replay.batches.experts_read
    )
    assert np.array_equal(lookup.experts, rounds.experts)


def test_a_round_costs_more_if_it_reads_more_experts_than_average_text() -> None:
    replay = Replay(adapt(tiny_experts("mixtral")), PROMPTS, 14, end_on_repeat=None)
    rounds = rounds_from_replay(replay(MASK))
    assert rounds.experts is not None
    policy = DraftPolicy(2, make_exit("fixed"))
    extra = rounds.expert_seconds(COSTS)
    assert np.allclose(extra[:, 0], 0)  # a single row reads k experts of each layer
    assert np.allclose(extra[:, 2], 0.1 * (rounds.experts[:, 2] - 14))
    assert np.allclose(extra[:, 5], 0.1 * (rounds.experts[:, 3] - 15))  # beyond the table
    with_price = simulate(rounds, MASK, policy, COSTS)
    without = simulate(rounds, MASK, policy, replace(COSTS, expert_s=0.0))
    assert with_price.stats.rounds == without.stats.rounds
    assert not np.allclose(with_price.seconds, without.seconds)
    for exit_policy in (make_exit("fixed"), make_exit("adaptive")):
        policies = [DraftPolicy(3, exit_policy)]
        assert np.allclose(
            sweep(rounds, MASK, policies, COSTS)[0],
            simulate(rounds, MASK, policies[0], COSTS).seconds,
        )


def test_a_model_without_experts_has_no_counts() -> None:
    replay = Replay(adapt(tiny_llama(layers=3)), PROMPTS, 8, end_on_repeat=None)
    rounds = rounds_from_replay(replay(MASK))
    assert rounds.experts is None
    assert not rounds.expert_seconds(COSTS).any()
