"""Sampling with drafts is sampling from the full model: chi-square tests by enumeration.

Seeds are fixed, so the result is the same in every run. A true sampler would fail one of these
tests with a probability of about 1 in 10,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.marks import thorough
from helpers.table_model import TABLE_LAYERS, TableModel
from helpers.tiny import FullModel, tiny_llama
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.exits import make_exit
from skipsearch.engine.sampler import GreedySampler, SamplingParams, TemperatureSampler
from skipsearch.models import adapt

from .checks import assert_partly_accepted
from .sampling_checks import (
    TABLE_MASK,
    Warp,
    check_sampling,
    check_sampling_in_one_call,
    exact_distribution,
    surprise,
)

WARPS = [
    Warp(),
    Warp(0.4),
    Warp(1.7),
    Warp(top_p=0.7),
    Warp(top_k=2),
    Warp(0.6, top_p=0.85, top_k=4),
]


class Certain:
    """A drafter that drafts its most likely token even if the request samples: its q is one-hot."""

    def __init__(self, inner: Drafter):
        self.inner = inner

    def new_session(self) -> CertainSession:
        return CertainSession(self.inner.new_session())


class CertainSession(DraftSession):
    def __init__(self, inner: DraftSession):
        self.inner = inner

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        draft = self.inner.draft(replace(ctx, sampler=GreedySampler()), most)
        assert draft is not None
        assert draft.probs is None
        return draft

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.inner.verified(ctx, path)


@pytest.mark.parametrize("warp", [*thorough(*WARPS[:-1]), WARPS[-1]], ids=str)
def test_sampled_texts_are_distributed_as_the_full_models_own(warp: Warp) -> None:
    assert_partly_accepted(check_sampling(warp))


@pytest.mark.xdist_group("native")
def test_a_draft_that_the_engine_draws_in_one_call_leaves_the_distribution_unchanged() -> None:
    assert_partly_accepted(check_sampling_in_one_call())


@pytest.mark.thorough
def test_a_longer_draft_leaves_the_distribution_unchanged() -> None:
    stats = check_sampling(draft_length=3, length=5)
    assert_partly_accepted(stats)
    assert stats.tau is not None
    assert stats.tau > 1.5


def test_a_draft_that_is_certain_of_its_tokens_leaves_the_distribution_unchanged() -> None:
    assert_partly_accepted(check_sampling(Warp(0.8), drafter=Certain))


def test_a_policy_that_ends_drafts_by_confidence_leaves_the_distribution_unchanged() -> None:
    assert_partly_accepted(check_sampling(exit_policy=make_exit("confidence", threshold=0.55)))


@pytest.mark.thorough
def test_a_real_llama_is_sampled_from_unchanged() -> None:
    hf = tiny_llama(layers=2, vocab=5, hidden=8, context=16)
    full = FullModel(hf)
    mask = SkipMask(2, (1,), (0,))
    assert_partly_accepted(
        check_sampling(
            Warp(0.7, top_p=0.95), 700, model=adapt(hf), mask=mask, next_logits=full.next_logits
        )
    )


def test_a_seed_repeats_a_sample_and_another_seed_gives_another() -> None:
    decoder = Decoder(
        TableModel(vocab=40), TABLE_MASK, draft_length=3, exit_policy=make_exit("fixed")
    )
    samples = [
        decoder.generate([3], 30, temperature=1.0, seed=seed).tokens for seed in (7, 7, 8, 9)
    ]
    assert samples[0] == samples[1]
    assert len({tuple(s) for s in samples}) == 3


def test_a_seed_repeats_a_sample_without_drafting() -> None:
    decoder = Decoder(TableModel(vocab=40))
    assert (
        decoder.generate([3], 20, temperature=1.0, seed=1).tokens
        == decoder.generate([3], 20, temperature=1.0, seed=1).tokens
    )


def test_sampling_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    Decoder(TableModel(), TABLE_MASK).generate([1], 6, temperature=1.0, seed=4)
    assert torch.equal(before, torch.get_rng_state())


def test_whole_numbers_do_where_fractions_do() -> None:
    decoder = Decoder(TableModel(), TABLE_MASK)
    assert (
        decoder.generate([1], 6, temperature=1, seed=2).tokens
        == decoder.generate([1], 6, temperature=1.0, seed=2).tokens
    )
    assert (
        decoder.generate([1], 6, temperature=1.0, top_k=3.0).tokens
        == decoder.generate([1], 6, temperature=1.0, top_k=3).tokens
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}], ids=str)
def test_sampling_from_one_token_is_greedy_decoding(limit: dict[str, float]) -> None:
    model = TableModel(vocab=30)
    greedy = Decoder(model).generate([2], 12).tokens
    decoder = Decoder(model, TABLE_MASK, draft_length=4)
    assert decoder.generate([2], 12, **({"temperature": 1.0} | limit)).tokens == greedy  # type: ignore[arg-type]


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_tokens_are_drawn_from_what_transformers_own_warpers_leave(warp: Warp) -> None:
    logits = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(warp.temperature)(None, logits)
    expected = TopKLogitsWarper(warp.top_k)(None, expected) if warp.top_k else expected
    expected = (
        TopPLogitsWarper(warp.top_p)(None, expected) if warp.top_p < 1 else expected
    ).softmax(-1)
    found = TemperatureSampler(
        SamplingParams(warp.temperature, warp.top_p, warp.top_k), torch.Generator()
    ).warp_to_probs(logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        found, torch.from_numpy(np.stack([warp.probabilities(row) for row in logits.numpy()]))
    )


def test_the_draft_is_confident_by_what_it_draws_from_and_by_its_softmax_where_it_is_greedy() -> (
    None
):
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    picker = TemperatureSampler(SamplingParams(0.5, top_k=2), torch.Generator().manual_seed(0))
    scored = picker.score(logits, with_confidence=True)
    assert picker.draw(scored)[1] is scored.probs
    assert float(scored.confidence) == pytest.approx(1 / (1 + np.exp(-2)))
    assert float(GreedySampler().score(logits, with_confidence=True).confidence) == pytest.approx(
        1 / (1 + np.exp(-1) + np.exp(-2))
    )


def test_the_table_models_two_forward_passes_agree() -> None:
    model = TableModel()
    for prompt in ([0], [3, 1], [4, 4, 2, 0, 1]):
        assert Decoder(model).generate(prompt, 1).tokens == [
            int(model.next_logits(prompt).argmax())
        ]
    plain = check_sampling(samples=500, mask=SkipMask(TABLE_LAYERS))
    assert plain.accepted == plain.drafted


def test_the_chi_square_test_tells_a_fair_sample_from_a_loaded_one() -> None:
    model, rng = TableModel(), np.random.default_rng(0)
    exact, loaded = (exact_distribution(model.next_logits, (2, 0), 3, Warp(t)) for t in (1.0, 0.75))
    outcomes = list(exact)
    verdicts = []
    for truth in (exact, loaded):
        picks = rng.choice(len(outcomes), size=1200, p=[truth[o] for o in outcomes])
        verdicts.append(surprise(Counter(outcomes[i] for i in picks), exact))
    assert verdicts[0] > 0.01
    assert verdicts[1] < 1e-6
    assert surprise(Counter({(9, 9, 9): 1}), exact) == 0
