"""Drafts with siblings: the accepted path of a tree, its tokens, and its counts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.properties import with_examples
from helpers.tiny import tiny_model_and_reference, use_engine
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.decoding import Decoder
from skipsearch.decoding.trees import accept_tree_greedy, was_rejected
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.session import add_siblings
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import forward, no_grad
from skipsearch.errors import DecodeError, ModelError
from skipsearch.models.kv_cache import KVCache, Planner

from .acceptance_checks import Row, assert_same_distribution
from .checks import MASKS, PROMPTS, check_greedy
from .tree_checks import (
    BUSHY,
    Tree,
    check_tree_acceptance,
    check_tree_sampling,
    check_trees,
    shapes_of_trees,
    tree_outcomes,
)

cuts = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(sorted)
tenths = cuts.map(lambda c: (c[0] / 10, (c[1] - c[0]) / 10, (10 - c[1]) / 10))


def test_greedy_text_is_the_full_models_own_and_siblings_are_part_of_it() -> None:
    check_trees()


@pytest.mark.parametrize("engine", ["hf", "lean", "graph"])
def test_that_holds_of_every_engine(engine: str) -> None:
    with use_engine(engine):
        check_greedy(BUSHY, world=tiny_model_and_reference())


def test_a_sibling_stands_where_the_drafts_own_choice_was_wrong() -> None:
    model, _ = tiny_model_and_reference()
    chain = Decoder(model, Recipe((Skip.from_mask(MASKS[0], 4, make_exit("fixed")),)))
    bushy = Decoder(
        model,
        Recipe((Skip.from_mask(MASKS[0], 4, make_exit("fixed"), Siblings(below=1.0, most=4)),)),
    )
    fewer, more = (
        sum(d.generate(prompt, 40).stats.rounds for prompt in PROMPTS) for d in (bushy, chain)
    )
    assert fewer < more


@pytest.mark.thorough
def test_samples_are_distributed_as_the_full_models_own() -> None:
    total = check_tree_sampling()
    assert 0 < total.accepted < total.drafted


def test_texts_of_a_round_have_the_full_models_own_probabilities() -> None:
    check_tree_acceptance()


@pytest.mark.parametrize("kids", shapes_of_trees(5), ids=str)
def test_that_holds_of_every_tree_of_up_to_five_nodes(kids: tuple[int, ...]) -> None:
    check_tree_acceptance(shapes=[kids])


@with_examples(10)
@given(st.lists(tenths, min_size=4, max_size=4))
def test_that_holds_whatever_p_and_q_are(rows: list[Row]) -> None:
    check_tree_acceptance(rows)


def test_siblings_that_were_certain_stand_with_the_full_models_probability_of_each() -> None:
    p = (0.5, 0.3, 0.2)
    assert_same_distribution(
        tree_outcomes(
            Tree((1, 2), (0, 0)), lambda text: p if not text else (1.0, 0.0, 0.0), certain=True
        ),
        {(0,): 0.5, (1, 0): 0.3, (2, 0): 0.2},
    )


def test_the_descent_ends_where_no_child_is_the_full_models_choice() -> None:
    def chosen(*tokens: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens), 9).double()

    parents = (
        0,
        1,
        2,
        0,
        1,
    )  # a chain of three, a sibling of its first token and one of its second
    drafted = torch.tensor([3, 4, 5, 6, 7])
    assert accept_tree_greedy(drafted, parents, chosen(3, 4, 5, 8, 0, 0)) == ([1, 2, 3], 8)
    assert accept_tree_greedy(drafted, parents, chosen(6, 0, 0, 0, 2, 0)) == ([4], 2)
    assert accept_tree_greedy(drafted, parents, chosen(3, 7, 0, 0, 0, 1)) == ([1, 5], 1)
    assert accept_tree_greedy(drafted, parents, chosen(8, 0, 0, 0, 0, 0)) == ([], 8)
    assert [was_rejected(path, parents) for path in ([1, 2, 3], [4], [1, 5], [], [1])] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_logits_that_are_not_numbers_choose_nothing() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    with pytest.raises(ModelError, match="not numbers"):
        accept_tree_greedy(torch.tensor([1, 2]), (0, 0), logits)


@no_grad
def test_each_node_of_a_tree_gets_the_logits_that_its_own_path_would_get() -> None:
    parents = (0, 1, 0, 1, 3, 2)
    tokens = torch.tensor([[9, 3, 4, 5, 6, 7, 8]])
    for engine in ("hf", "lean", "graph"):
        with use_engine(engine):
            model, _ = tiny_model_and_reference()
        cache, planner = model.new_cache(1, 64), Planner(64, model.spec.device)
        forward(model, torch.tensor([[1, 2, 3, 4, 5]]), cache, planner.plan_chain(0, 5))
        found = forward(model, tokens, cache, planner.plan_tree(5, parents)).clone()[0]
        for node in range(1 + len(parents)):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0] - 1])
            alone = forward(model, tokens[:, path], cache, planner.plan_chain(5, len(path)))[0, -1]
            torch.testing.assert_close(found[node], alone, rtol=0, atol=1e-9)


def test_a_tree_that_passes_the_end_of_the_cache_is_refused() -> None:
    with pytest.raises(DecodeError, match="needs 9 slots"):
        Planner(8, torch.device("cpu")).plan_tree(5, (0, 0, 1))


def test_what_stands_is_moved_together_in_every_layer() -> None:
    cache = KVCache(2, 1, 6)
    like = torch.zeros(1, 1, 0, 1)
    for layer in range(2):
        for buffer in cache.get_buffers(layer, like, like):
            buffer[0, 0, :, 0] = torch.arange(6.0) + 10 * layer
    cache.compact([3, 5], 2)
    assert cache.keys[0] is not None
    assert cache.values[1] is not None
    assert cache.keys[0].flatten().tolist() == [0, 1, 3, 5, 4, 5]
    assert cache.values[1].flatten().tolist() == [10, 11, 13, 15, 14, 15]


def test_siblings_that_could_not_be_drawn_are_not_verified() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.2, 0.3]])
    draft = add_siblings(torch.tensor([[1, 0, 2], [0, 2, 1]]), probs, [2, 2])
    assert draft.tokens.tolist() == [1, 0, 2, 1]
    assert draft.parents == (0, 1, 1, 1)
    assert draft.n_main == 2
    assert draft.probs is not None
    assert torch.equal(draft.probs, probs[[0, 1, 1, 1]])
    assert add_siblings(torch.tensor([[1, 0, 2]]), probs[:1], [2]).parents is None
    assert draft.main_path().tokens.tolist() == [1, 0]


def test_exact_passes_verify_the_chain_alone() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, BUSHY[0].recipe, exact=True)
    for prompt, n in product(PROMPTS[:2], (7, 24)):
        result = decoder.generate(prompt, n)
        assert result.tokens == full.greedy(prompt, n)
        assert not result.stats.by_drafter[0].siblings
