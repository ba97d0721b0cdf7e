"""Replay of sampled texts: the chance that each emitted token was an accepted draft, and the memory
that texts are kept in.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from helpers.properties import with_examples
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.decoding.acceptance import accept_sampled
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import forward
from skipsearch.engine.sampler import SamplingParams, TemperatureSampler
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.replay import Replay, accept_probability

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7))
MASK = SkipMask(LAYERS, (1, 3), (2,))
SAMPLINGS = (SamplingParams(0.7, top_p=0.95), SamplingParams(1.3), SamplingParams(0.9, top_k=5))
TOKENS = 24

weights = st.integers(2, 6).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any),) * 2)
)


@cache
def world(sampling: SamplingParams = SAMPLINGS[0]) -> tuple[ModelAdapter, Replay]:
    model, _ = tiny_model_and_reference()
    return model, Replay(model, PROMPTS, TOKENS, 6, sampling=sampling, seed=3)


def distributions(pq: tuple[list[int], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = (torch.tensor(w, dtype=torch.float64) for w in pq)
    return p / p.sum(), q / q.sum()


# --- the formula


@with_examples(200)
@given(weights)
def test_over_tokens_of_the_full_model_its_mean_is_the_acceptance_rate_of_speculative_sampling(
    pq: tuple[list[int], list[int]],
) -> None:
    p, q = distributions(pq)
    emitted = p > 0
    mean = (p[emitted] * accept_probability(q[emitted], p[emitted])).sum()
    assert float(mean) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@with_examples(100)
@given(weights)
def test_of_each_emitted_token_it_is_the_share_that_was_an_accepted_draft(
    pq: tuple[list[int], list[int]],
) -> None:
    """Bayes by hand: the draft draws x from q, it stands with min(1, p / q), else the residual is
    drawn from.
    """
    p, q = distributions(pq)
    stood = q * torch.where(q > 0, (p / q.clamp(min=1e-300)).clamp(max=1), 0)
    residual = (p - q).clamp(min=0)
    replaced = (1 - stood.sum()) * (residual / residual.sum() if residual.sum() > 0 else residual)
    emitted = p > 0
    share = (stood / (stood + replaced))[emitted]
    torch.testing.assert_close(accept_probability(q[emitted], p[emitted]), share, rtol=0, atol=1e-9)


def test_that_is_what_the_decoders_own_rule_does() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64),
    )
    stood, emitted = torch.zeros(3), torch.zeros(3)
    for _ in range(6000):
        x = torch.multinomial(q, 1, generator=generator)
        n, following = accept_sampled(x, q[None], torch.stack([p, p]), generator)
        emitted[int(x) if n else following] += 1
        stood[int(x)] += n
    np.testing.assert_allclose(stood / emitted, accept_probability(q, p), atol=0.03)


def test_a_token_that_rounding_alone_made_impossible_is_no_trouble() -> None:
    q, p = torch.tensor([0.0, 0.4]), torch.zeros(2)
    assert accept_probability(q, p).tolist() == [0, 1]


# --- the replay


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@torch.no_grad()
def test_each_position_is_a_draft_pass_on_that_token_alone(sampling: SamplingParams) -> None:
    """From a fresh cache each: the full model's own pass gives p, a draft pass on the same token
    gives q.
    """
    model, replay = world(sampling)
    picker = TemperatureSampler(sampling, torch.Generator())
    everything = []
    for prompt, generated, replayed in zip(
        PROMPTS, replay.continuations, replay(MASK), strict=True
    ):
        for j, following in enumerate(generated[1:]):
            text = torch.tensor([[*prompt, *generated[: j + 1]]])
            length = text.shape[1]
            cache, planner = model.new_cache(1, length), Planner(length, text.device)
            p = picker.warp_to_probs(
                forward(model, text, cache, planner.plan_chain(0, length), last_only=True)[:, -1]
            )[0]
            q = picker.warp_to_probs(
                forward(model, text[:, -1:], cache, planner.plan_chain(length - 1, 1), MASK)[:, -1]
            )[0]
            assert replayed.acceptance[j] == pytest.approx(
                min(1.0, float(q[following] / p[following])), rel=1e-4
            )
            assert replayed.confidence[j] == pytest.approx(float(q.max()), rel=1e-4)
        everything += replayed.acceptance.tolist()
        assert replayed.acceptance.dtype.kind == "f"
    assert any(a == 1 for a in everything)
    assert any(0 < a < 1 for a in everything)
    assert replay.measure_acceptance(MASK) == pytest.approx(np.mean(everything))


def test_the_text_is_what_plain_decoding_samples_with_a_seed_of_each_prompts_own() -> None:
    model, replay = world()
    decoder = Decoder(model)
    assert replay.continuations == [
        decoder.generate(p, TOKENS, temperature=0.7, top_p=0.95, seed=3 + i, end_on_repeat=6).tokens
        for i, p in enumerate(PROMPTS)
    ]
    assert replay.continuations != Replay(model, PROMPTS, TOKENS, 6).continuations


def test_a_draft_that_skips_nothing_is_always_accepted() -> None:
    _, replay = world()
    assert replay.measure_acceptance(SkipMask(LAYERS)) == pytest.approx(1, abs=1e-6)


def test_its_mean_is_the_acceptance_rate_of_real_sampled_decoding() -> None:
    """One drafted token a round, so that the draft sees the full model's K/V alone, as in
    replay.
    """
    model, _ = tiny_model_and_reference()
    prompts = [(i, (7 * i) % VOCAB) for i in range(25)]
    decoder = Decoder(model, MASK, draft_length=1, exit_policy=make_exit("fixed"))
    real = sum(
        (
            decoder.generate(p, 20, temperature=0.7, top_p=0.95, seed=1000 + i).stats
            for i, p in enumerate(prompts)
        ),
        DecodeStats(),
    )
    replayed = Replay(model, prompts, 20, None, sampling=SAMPLINGS[0]).measure_acceptance(MASK)
    assert real.alpha == pytest.approx(replayed, abs=0.08), (
        "three standard errors of some 280 rounds"
    )
    assert 0.2 < replayed < 0.9
