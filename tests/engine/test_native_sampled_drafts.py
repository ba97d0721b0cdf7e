"""Sampled drafts of the native engine in one call equal single draft steps, seed by seed."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
import torch
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st
from models.tiny import LAYERS
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.drafters.reduced_session import HeadRowsSampler
from skipsearch.engine import draft_chain, draft_step, no_grad
from skipsearch.engine.reduced_model import make_reduced_model
from skipsearch.engine.sampler import SamplingParams, TemperatureSampler, TokenSampler
from skipsearch.models.adapter import ModelAdapter

from .test_native_drafts import CAPACITY, DTYPES, masks, native, prefilled

pytestmark = pytest.mark.xdist_group("native")
NO_MASK = SkipMask(LAYERS)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 2.5, 100.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
)


def seeded(sampling: SamplingParams, seed: int) -> TemperatureSampler:
    return TemperatureSampler(sampling, torch.Generator().manual_seed(seed))


@no_grad
def check_sampled_draft(
    model: ModelAdapter,
    mask: SkipMask,
    max_tokens: int,
    threshold: float,
    sampling: SamplingParams,
    seed: int,
    vocabulary: Vocabulary | None = None,
) -> int:
    """Tokens, distributions and the generator's state after one call are those of single steps.
    Returns the number of tokens.
    """
    target, inner = model, [seeded(sampling, seed) for _ in range(2)]
    samplers: list[TokenSampler] = [*inner]
    if vocabulary is not None:
        reduced_model = make_reduced_model(model, Reading(vocabulary=vocabulary))
        assert reduced_model.new_head is not None
        head = reduced_model.new_head()
        target = reduced_model.restrict(head)
        samplers = [HeadRowsSampler(sampler, head) for sampler in inner]
    pending, chain_cache, planner = prefilled(model, 9)
    scores = draft_chain(
        target, pending, chain_cache, planner, mask, samplers[0], max_tokens, threshold
    )
    assert scores is not None
    token, cache, _ = prefilled(model, 9)
    tokens, distributions, confidences = list[int](), list[Tensor](), list[float]()
    for n in range(max_tokens):
        plan = planner.plan_chain(9 + n, 1)
        step = draft_step(target, token, cache, plan, mask, samplers[1], True)
        token, probs = samplers[1].draw(step)
        assert probs is not None
        tokens.append(int(token))
        distributions.append(probs)
        confidences.append(float(step.confidence))  # type: ignore[arg-type]
        if confidences[-1] < threshold:
            break
    assert scores.choice is not None
    assert scores.choice.tolist() == [[token] for token in tokens]
    torch.testing.assert_close(scores.probs, torch.cat(distributions), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scores.confidence, torch.tensor(confidences), rtol=1e-5, atol=1e-7)
    assert torch.equal(inner[0].generator.get_state(), inner[1].generator.get_state())
    return len(tokens)


@pytest.mark.parametrize("vocabulary", [None, Vocabulary(lowest=21, tokens="")], ids=["all", "few"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sampled_draft_in_one_call_is_its_steps(
    dtype: torch.dtype, vocabulary: Vocabulary | None
) -> None:
    lengths = set[tuple[int, int]]()

    @with_examples(60)
    @given(
        mask=masks,
        max_tokens=st.integers(1, 12),
        threshold=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        sampling=samplings,
        seed=st.integers(0, 99),
    )
    def holds(
        mask: SkipMask, max_tokens: int, threshold: float, sampling: SamplingParams, seed: int
    ) -> None:
        model = native("llama", dtype)
        got = check_sampled_draft(model, mask, max_tokens, threshold, sampling, seed, vocabulary)
        lengths.add((max_tokens, got))

    holds()
    assert any(got == max_tokens > 1 for max_tokens, got in lengths)
    assert any(got < max_tokens for max_tokens, got in lengths)


@no_grad
def test_tokens_are_as_frequent_as_their_distribution_says() -> None:
    model = native("llama", torch.float32)
    sampler, count = seeded(SamplingParams(0.7, top_k=5), 3), 4000
    drawn, prepared = np.zeros(model.spec.vocab_size), prefilled(model, 9)
    for _ in range(count):
        scores = draft_chain(model, *prepared, NO_MASK, sampler, 1, 0.0)
        assert scores is not None
        assert scores.choice is not None
        assert scores.probs is not None
        drawn[int(scores.choice)] += 1
    shares = scores.probs[0].numpy()
    assert int((shares > 0).sum()) == 5
    assert abs(shares.sum() - 1) < 1e-6
    assert (drawn[shares == 0] == 0).all()
    assert (np.abs(drawn / count - shares) <= 5 * np.sqrt(shares * (1 - shares) / count)).all()


@pytest.mark.parametrize("bad", [nan, inf], ids=str)
@no_grad
def test_logits_that_are_not_finite_draw_any_token(bad: float) -> None:
    """The draft goes on; the verify pass, whose logits are another matter, decides."""
    model = native("llama", torch.float32)
    token, cache, planner = prefilled(model, 9)
    for values in cache.values:
        if values is not None:
            values[:, :, :9] = bad
    scores = draft_chain(
        model, token, cache, planner, NO_MASK, seeded(SamplingParams(1.0), 0), 3, 0.0
    )
    assert scores is not None
    assert scores.probs is not None
    torch.testing.assert_close(
        scores.probs, torch.full_like(scores.probs, 1 / scores.probs.shape[1])
    )


@no_grad
def test_siblings_and_what_the_engine_may_not_draw_are_left_to_single_steps() -> None:
    model = native("llama")
    sampler = seeded(SamplingParams(1.0), 0)
    exact = TemperatureSampler(SamplingParams(1.0), torch.Generator(), engine_draws=False)
    for chosen, in_one_call in ((sampler, True), (sampler.top(2), False), (exact, False)):
        scores = draft_chain(model, *prefilled(model, 9), NO_MASK, chosen, 4, 0.0)
        assert (scores is not None) == in_one_call
    token, cache, planner = prefilled(model, 9)
    past_the_end = draft_chain(model, token, cache, planner, NO_MASK, sampler, CAPACITY - 8, 0.0)
    assert past_the_end is None
