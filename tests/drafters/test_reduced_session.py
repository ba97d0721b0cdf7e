"""Drafts that read less: their tokens and distributions, and what merged passes read."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.core.recipe import Siblings
from skipsearch.drafters import Draft
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.reduced_session import ReducedSession
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.sampler import GreedySampler
from skipsearch.errors import MaskError

from .test_drafter_contract import PROMPT, context, sampling

pytestmark = pytest.mark.xdist_group("native")
FEW = Vocabulary(lowest=0, tokens="1 2 30-40")
ALLOWED = {*FEW.token_ids(), *PROMPT, 40}


def skip_few(weights: str = "stored", siblings: Siblings | None = None) -> Skip:
    return Skip.from_mask(
        SkipMask(LAYERS, (1, 3), (0, 2)),
        12,
        Fixed(),
        siblings,
        Reading(weights, FEW),  # type: ignore[arg-type]
    )


@torch.no_grad()
def draft_with(spec: Skip, engine: str, picker: object = None, siblings: bool = False) -> Draft:
    with use_engine(engine):
        ctx = context(picker)  # type: ignore[arg-type]
        draft = spec.build(ctx.model, []).new_session().draft(ctx, 12)
    assert draft is not None
    return draft


@pytest.mark.parametrize("engine", ["hf", "lean", "native"])
@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_tokens_are_of_the_vocabulary_or_of_the_request(engine: str, weights: str) -> None:
    # The engine native fills the vocabulary up with the lowest ids, to a multiple of 32 tokens.
    allowed = {*range(32), *ALLOWED} if engine == "native" else ALLOWED
    assert set(draft_with(skip_few(weights), engine).tokens.tolist()) <= allowed
    tree = draft_with(skip_few(weights, Siblings(below=1.0, most=3)), engine)
    assert tree.parents is not None
    assert set(tree.tokens.tolist()) <= allowed
    for parent in set(tree.parents):
        same = [t for t, p in zip(tree.tokens.tolist(), tree.parents, strict=True) if p == parent]
        assert len(set(same)) == len(same)


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_q_is_zero_for_other_tokens_and_sums_to_one(engine: str) -> None:
    draft = draft_with(skip_few(), engine, sampling())
    assert draft.probs is not None
    assert draft.probs.shape[-1] == VOCAB
    others = sorted(set(range(VOCAB)) - {*range(32), *ALLOWED})
    assert others
    assert float(draft.probs[:, others].abs().max()) == 0
    torch.testing.assert_close(
        draft.probs.sum(dim=-1), torch.ones(len(draft.probs)).to(draft.probs)
    )
    drawn = draft.probs.gather(1, draft.tokens[: len(draft.probs), None])
    assert float(drawn.min()) > 0


@torch.no_grad()
def test_each_draft_knows_the_tokens_of_the_text_so_far() -> None:
    with use_engine("native"):
        ctx = context()
        session = skip_few().build(ctx.model, []).new_session()
        assert isinstance(session, ReducedSession)
        session.draft(ctx, 3)
        assert session._head is not None
        assert set(PROMPT) <= set(session._head.token_ids.tolist())
        assert 63 not in session._head.token_ids.tolist()
        ctx.history.append(63)
        session.draft(ctx, 3)
        assert 63 in session._head.token_ids.tolist()


@torch.no_grad()
def test_the_committed_kv_and_the_model_are_left_alone() -> None:
    with use_engine("native"):
        ctx = context()
        before = [t[:, :, : ctx.cache.length].clone() for t in ctx.cache.keys if t is not None]
        skip_few("int4").build(ctx.model, []).new_session().draft(ctx, 6)
        after = [t[:, :, : ctx.cache.length] for t in ctx.cache.keys if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_vocabulary_of_another_model_is_refused_in_one_sentence() -> None:
    spec = Skip.from_mask(
        SkipMask(LAYERS), 4, Fixed(), reading=Reading(vocabulary=Vocabulary.from_ids([VOCAB + 7]))
    )
    with pytest.raises(MaskError, match=f"token {VOCAB + 7} .* another model"):
        spec.build(tiny_model_and_reference()[0], [])


def test_two_samplers_of_different_heads_are_told_apart() -> None:
    from skipsearch.drafters.reduced_session import HeadRowsSampler
    from skipsearch.engine.reduced_model import make_reduced_model

    model = tiny_model_and_reference()[0]
    new_head = make_reduced_model(model, Reading(vocabulary=FEW)).new_head
    assert new_head is not None
    first, second = new_head(), new_head()
    keys = [HeadRowsSampler(GreedySampler(), head).key for head in (first, second)]
    first.add([63])
    assert len({*keys, HeadRowsSampler(GreedySampler(), first).key}) == 3
