"""`clasp`: the dynamic programme, against one written out term by term and against all sets there
are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.clasp.dynamic_program import DPStep, solve_mean_and_votes
from skipsearch.errors import SearchError
from skipsearch.searchers import Evidence, SearchProblem, make_searcher
from skipsearch.searchers.clasp import layer_steps, sublayer_steps

from .toy import ResidualNetwork, ToyModel, drive


def problem_of(
    network: ResidualNetwork, never_skip: frozenset[int] = frozenset(), whole_layers: bool = False
) -> SearchProblem:
    evidence = Evidence(states=network.states(), probe=network.probe)
    return SearchProblem(len(network.weights) // 2, never_skip, evidence, whole_layers=whole_layers)


def masks_of(problem: SearchProblem) -> list[SkipMask]:
    return [
        trial.mask
        for trial in drive(make_searcher("clasp", problem), ToyModel.random(problem.n_layers), 999)
    ]


def written_out(
    network: ResidualNetwork, steps: list[DPStep], positions: list[int], count: int
) -> set[int]:
    """Eq. 2 as it stands, one g(i, j) at a time, over these positions on the mean; the skipped
    steps of g(last, count).
    """
    full = network.inputs[positions]
    g: dict[int, tuple[Tensor, tuple[int, ...]]] = {0: (full, ())}
    for i, step in enumerate(steps):
        full = network.probe(step.layer, full, step.attn, step.mlp)
        following = {}
        for j in range(i + 2):
            options = []
            if step.skippable and j - 1 in g:
                state, skipped = g[j - 1]
                options.append((state, (*skipped, i)))
            if j in g:
                state, skipped = g[j]
                options.append((network.probe(step.layer, state, step.attn, step.mlp), skipped))
            if options:
                following[j] = max(
                    options,
                    key=lambda option: cosine_similarity(option[0], full, dim=-1).mean().item(),
                )
        g = following
    return {s for i in g[count][1] for s in steps[i].sublayers}


@pytest.mark.parametrize("steps_of", [layer_steps, sublayer_steps])
@pytest.mark.parametrize("never_skip", [frozenset(), frozenset({0, 5, 9})])
def test_the_shared_programme_is_the_papers_recursion_on_the_mean_cosine(
    steps_of: object, never_skip: frozenset[int]
) -> None:
    network = ResidualNetwork.random(6, seed=3)
    steps = steps_of(problem_of(network, never_skip))  # type: ignore[operator]
    programme = solve_mean_and_votes(network.states(), steps, network.probe)
    assert programme is not None
    for count in range(1, programme.n_skippable + 1):
        assert programme.solve_by_mean(count) == written_out(network, steps, list(range(12)), count)


def test_the_counted_programme_takes_what_most_positions_skip_by_the_papers_recursion() -> None:
    network = ResidualNetwork.random(5, seed=1)
    steps = sublayer_steps(problem_of(network))
    programme = solve_mean_and_votes(network.states(), steps, network.probe)
    assert programme is not None
    for count in range(1, 11):
        alone = [written_out(network, steps, [position], count) for position in range(12)]
        votes = [sum(s in skipped for skipped in alone) for s in range(10)]
        assert programme.solve_by_votes(count) == set(
            sorted(range(10), key=lambda s: (-votes[s], s))[:count]
        )


def test_the_sets_found_come_near_the_best_there_are() -> None:
    network = ResidualNetwork.random(5, seed=2)
    final = network.states()[-1]

    def closeness(mask: SkipMask) -> float:
        return cosine_similarity(network.run(mask), final, dim=-1).mean().item()

    masks = masks_of(problem_of(network))
    for count in (2, 4, 6):
        everything = sorted(
            closeness(SkipMask.from_sublayers(5, s))
            for s in itertools.combinations(range(10), count)
        )
        found = max(closeness(mask) for mask in masks if mask.n_skipped == count)
        assert found >= everything[int(0.95 * len(everything))]


def test_idle_layers_are_the_first_to_go() -> None:
    network = ResidualNetwork.random(6)
    idle = torch.ones(12, 1, 1)
    idle[[4, 5, 8, 9]] = 0
    masks = masks_of(
        problem_of(replace(network, weights=network.weights * idle), whole_layers=True)
    )
    assert SkipMask.from_layers(6, (2, 4)) in masks
    assert {SkipMask.from_layers(6, (2,)), SkipMask.from_layers(6, (4,))} & set(masks)


def test_every_number_of_layers_and_of_sublayers_is_proposed() -> None:
    masks = masks_of(problem_of(ResidualNetwork.random(4)))
    assert {mask.n_skipped for mask in masks} == set(range(1, 9))
    assert {len(mask.attn) for mask in masks if mask.attn == mask.mlp} == set(range(1, 5))


def test_a_parallel_residual_is_searched_by_whole_layers_alone() -> None:
    masks = masks_of(problem_of(ResidualNetwork.random(4, parallel=True)))
    assert masks
    assert all(mask.attn == mask.mlp for mask in masks)


@dataclass
class Counted:
    """A probe that counts its calls."""

    network: ResidualNetwork
    calls: int = 0

    def __call__(self, i: int, states: Tensor, attn: bool, mlp: bool) -> Tensor:
        self.calls += 1
        return self.network.probe(i, states, attn, mlp)


def test_all_candidates_of_a_step_are_probed_at_once() -> None:
    network = ResidualNetwork.random(5)
    probe = Counted(network)
    masks_of(SearchProblem(5, evidence=Evidence(states=network.states(), probe=probe)))
    assert probe.calls == 5 + 10


def test_nothing_is_computed_before_the_first_mask_is_asked_for() -> None:
    network = ResidualNetwork.random(5)
    probe = Counted(network)
    make_searcher(
        "clasp", SearchProblem(5, evidence=Evidence(states=network.states(), probe=probe))
    )
    assert probe.calls == 0


def test_states_and_a_probe_of_different_models_are_refused() -> None:
    evidence = Evidence(
        states=ResidualNetwork.random(4, seed=0).states(),
        probe=ResidualNetwork.random(4, seed=1).probe,
    )
    searcher = make_searcher("clasp", SearchProblem(4, evidence=evidence))
    with pytest.raises(
        SearchError, match=r"does not lead from one of evidence\.states to the next"
    ):
        searcher.ask()


def test_sixteen_bit_states_are_no_obstacle() -> None:
    network = ResidualNetwork.random(4)
    half = replace(network, weights=network.weights.bfloat16(), inputs=network.inputs.bfloat16())
    assert any(mask.attn != mask.mlp for mask in masks_of(problem_of(half)))
