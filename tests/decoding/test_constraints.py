"""Decoding under a constraint emits the tokens of the masked model, however they were drafted."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.marks import engine_params
from helpers.properties import with_examples
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, use_engine, with_eos
from helpers.toy_constraint import ToyMatcher, constrained_by, make_rule
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, make_masks
from skipsearch.decoding.acceptor import Acceptor
from skipsearch.drafters import Draft
from skipsearch.drafters.lookup.spec import Lookup

from .checks import DRAFTINGS, MASKS, PROMPTS, Drafting, assert_partly_accepted
from .constraint_checks import (
    EOS,
    check_constrained_counts,
    check_constrained_greedy,
    check_constrained_law,
    masked_greedy,
)
from .schema_checks import DRAFTINGS_OF_SCHEMAS, check_schema, schemas, thinking_text, world


def test_greedy_tokens_are_those_of_the_masked_model_for_chains_trees_and_processors() -> None:
    check_constrained_greedy((None, *DRAFTINGS[1::2]), seeds=(0,))


@pytest.mark.thorough
def test_that_holds_of_every_drafting_and_another_rule() -> None:
    check_constrained_greedy(seeds=(1,))


@pytest.mark.parametrize("engine", engine_params("native", thorough=("lean", "graph")))
def test_that_holds_on_every_engine(engine: str) -> None:
    with use_engine(engine):
        check_constrained_greedy(DRAFTINGS[::2], seeds=(3,))


def test_requests_of_a_batch_do_not_disturb_each_other() -> None:
    check_constrained_greedy(DRAFTINGS[2::4], seeds=(4,), batch=True)


@pytest.mark.parametrize(
    "settings",
    [{}, {"siblings": Siblings(below=1.0, most=1)}, {"lookup": True}, {"few_tokens": True}],
    ids=str,
)
def test_sampled_texts_have_the_masked_models_probabilities(settings: dict) -> None:
    check_constrained_law(**settings)


def test_forced_tokens_are_drafted_without_a_recipe_unless_the_caller_says_no() -> None:
    model, _ = tiny_model_and_reference()
    model = with_eos(model, EOS)
    with constrained_by(make_rule(0, VOCAB, EOS), EOS):
        drafted = Decoder(model).generate(PROMPTS[0], 20)
        plain = Decoder(model, draft_forced=False).generate(PROMPTS[0], 20)
    assert drafted.tokens == plain.tokens
    assert plain.stats.drafted == 0
    assert drafted.stats.drafted > 0
    assert drafted.stats.rounds < plain.stats.rounds


@pytest.mark.parametrize(
    "drafting",
    [Drafting(SkipMask(LAYERS), 4), Drafting(None, lookup=Lookup(min_match=1, draft_length=4))],
    ids=["skip", "lookup"],
)
def test_a_drafter_continues_forced_tokens_in_the_same_round(drafting: Drafting) -> None:
    model, _ = tiny_model_and_reference()
    model = with_eos(model, EOS)
    prompt = PROMPTS[0] * 8
    total = 0
    for seed in range(6):
        rule = make_rule(seed, VOCAB, EOS)
        with constrained_by(rule, EOS):
            chunks = list(drafting.decoder(model).stream(prompt, 24, trace=True))
        text: list[int] = []
        for chunk in chunks:
            proposal = chunk.proposal
            if proposal is not None and proposal.drafter_index == 1:  # the forced tokens
                matcher = ToyMatcher(rule, EOS)
                matcher.advance(text)
                total += len(proposal.tokens) > len(matcher.forced_tokens())
            text += chunk.tokens
    assert total > 0


def test_illegal_draft_tokens_cost_no_row() -> None:
    model, _ = tiny_model_and_reference()
    model = with_eos(model, EOS)
    rule, seen = make_rule(2, VOCAB, EOS), 0
    real = Acceptor.cut

    def cut(self: Acceptor, draft: Draft) -> Draft | None:
        nonlocal seen
        result = real(self, draft)
        assert self.constraint is not None
        matcher, tokens = self.constraint.matcher, [] if result is None else result.tokens.tolist()
        parents = range(len(tokens))
        if result is not None and result.parents is not None:
            parents = result.parents
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[parent], token])
            assert matcher.count_legal(paths[-1]) == len(paths[-1])
        seen += len(draft.tokens) - len(tokens)
        return result

    drafting = Drafting(MASKS[0], 5, siblings=Siblings(below=1.0, most=3))
    with pytest.MonkeyPatch.context() as patch, constrained_by(rule, EOS):
        patch.setattr(Acceptor, "cut", cut)
        for prompt in PROMPTS:
            drafting.decoder(model).generate(prompt, 20)
    assert seen > 0


def test_a_round_accepts_no_more_than_it_drafted_and_a_drafter_learns_which_of_its_nodes() -> None:
    check_constrained_counts()


def test_the_masks_of_a_tree_follow_each_nodes_own_path() -> None:
    rule = make_rule(1, VOCAB, EOS)
    matcher = ToyMatcher(rule, EOS)
    first, second = sorted(matcher.legal(()))[:2] if len(matcher.legal(())) > 1 else (0, 1)
    masks = make_masks(matcher, [first, second], [0, 0], VOCAB)
    for row, path in zip(masks, [(), (first,), (second,)], strict=True):
        legal = matcher.legal(path)
        if matcher.count_legal(path) == len(path):
            assert set(row.nonzero()[0].tolist()) == legal
    assert matcher.tokens == []


@pytest.mark.xdist_group("native")
def test_answers_of_random_schemas_are_those_of_a_loop_over_hugging_face() -> None:
    total = DecodeStats()

    @with_examples(25)
    @given(schemas, st.sampled_from(DRAFTINGS_OF_SCHEMAS), st.integers(1, 24))
    def holds(schema: dict[str, Any], drafting: Drafting | None, n: int) -> None:
        nonlocal total
        total += check_schema(schema, drafting, (5, 17, 40), n)

    holds()
    assert total.accepted > 0


@pytest.mark.xdist_group("native")
def test_answers_after_thinking_are_those_of_a_loop_over_hugging_face() -> None:
    """Drafts straddle the end of the thinking, which is anywhere in the tokens."""
    total, n_ended = DecodeStats(), 0

    @with_examples(10)
    @given(
        schemas,
        st.sampled_from(DRAFTINGS_OF_SCHEMAS),
        st.integers(12, 22),
        st.integers(0, 20),
        st.integers(1, 4),
    )
    def holds(schema: dict[str, Any], drafting: Any, n: int, at: int, length: int) -> None:
        nonlocal total, n_ended
        mark = thinking_text((5, 17, 40))[at : at + length]
        stats = check_schema(schema, drafting, (5, 17, 40), n, mark)
        n_ended += stats.tokens < n
        total += stats

    holds()
    assert_partly_accepted(total)
    assert n_ended > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", "lean", "graph", "native"])
def test_that_holds_of_a_thousand_schemas(engine: str) -> None:
    """Run it by hand: `pytest -m slow tests/decoding/test_constraints.py -s`."""
    total, cases = DecodeStats(), 0
    with use_engine(engine):
        world.cache_clear()
        world()

        @with_examples(1000)
        @given(schemas, st.sampled_from(DRAFTINGS_OF_SCHEMAS), st.integers(1, 40))
        def holds(schema: dict[str, Any], drafting: Drafting | None, n: int) -> None:
            nonlocal total, cases
            total += check_schema(schema, drafting, (5, 17, 40), n)
            cases += 1

        holds()
    world.cache_clear()
    assert_partly_accepted(total)
    print(f"\n{engine}: {cases} schemas, {total.drafted} drafted, {total.accepted} accepted")


@pytest.mark.parametrize("engine", ["lean", "native"])
def test_exact_decoding_and_sessions_follow_the_constraint(engine: str) -> None:
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    model, total = with_eos(model, EOS), DecodeStats()
    rule = make_rule(6, VOCAB, EOS)
    with constrained_by(rule, EOS):
        for exact in (False, True):
            recipe = Drafting(MASKS[0], 4, lookup=Lookup(min_match=1, draft_length=3)).recipe
            session = Decoder(model, recipe, exact=exact).new_session()
            for prompt in (PROMPTS[0], (*PROMPTS[0], 7, 8), PROMPTS[2]):
                result = session.generate(prompt, 16)
                assert result.tokens == masked_greedy(full, prompt, rule, 16, EOS)
                total += result.stats
    assert_partly_accepted(total)
