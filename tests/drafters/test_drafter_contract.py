"""What every drafter promises. A drafter is tested here from the moment its line stands in
DRAFTERS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import pytest
import torch
from helpers.draft_models import draft_model_of, draft_spec
from helpers.drafting import begin_session, decoder_with
from helpers.marks import thorough
from helpers.modules import module_folder, small_kangaroo, small_module, small_mtp, small_s3d
from helpers.tiny import VOCAB, FullModel, tiny_model_and_reference
from torch import Tensor

from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.drafters import DRAFTERS, DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.engine import forward
from skipsearch.engine.sampler import (
    GreedySampler,
    SamplingParams,
    TemperatureSampler,
    TokenSampler,
)
from skipsearch.models.kv_cache import KVCache, Planner

# How each drafter is set up for these tests: a new one adds its line.
SPECS: dict[str, DrafterSpec] = {
    "skip": Skip(attn=(1, 3), mlp=(0, 2), draft_length=12, exit=Fixed()),
    "lookup": Lookup(min_match=1, draft_length=12),
    "adapted": small_module(),
    "asd": ASD(threshold=0.9, every=3, keep_last=1, draft_length=12, exit=Fixed()),
    "clasp": CLaSp(skip=2, interval=2, draft_length=12, exit=Fixed()),
    "swift": SWIFT(draft_length=12, exit=Fixed()),
    "kangaroo": small_kangaroo(),
    "s3d": small_s3d(draft_tokens=12),
    "mtp": small_mtp(),
    "draft-model": draft_spec(draft_model_of("qwen2")[0], 12),
}
CAPACITY = 64
PROMPT = [
    5,
    17,
    40,
    3,
    22,
    5,
    17,
]  # its end stood in it before, so that lookup has something to say


def build(kind: str) -> Drafter:
    return SPECS[kind].build(tiny_model_and_reference()[0], [module_folder()])


def context(picker: TokenSampler | None = None) -> DecodeContext:
    """A round that is about to start: a prompt in the cache, one token pending."""
    model, _ = tiny_model_and_reference()
    cache, planner = model.new_cache(1, CAPACITY), Planner(CAPACITY, torch.device("cpu"))
    with torch.no_grad():
        forward(
            model, torch.tensor([PROMPT]), cache, planner.plan_chain(0, len(PROMPT)), last_only=True
        )
    cache.length = len(PROMPT)
    pending = torch.tensor([[40]])  # what stood behind the same tokens before
    return DecodeContext(
        model, cache, planner, pending, [*PROMPT, 40], len(PROMPT), picker or GreedySampler()
    )


def sampling(seed: int = 0) -> TemperatureSampler:
    return TemperatureSampler(SamplingParams(0.9, top_k=20), torch.Generator().manual_seed(seed))


def committed(cache: KVCache) -> list[Tensor]:
    return [t[:, :, : cache.length].clone() for t in (*cache.keys, *cache.values) if t is not None]


@torch.no_grad()
def drafted(kind: str, ctx: DecodeContext, most: int) -> Draft:
    draft = begin_session(build(kind), ctx).draft(ctx, most)
    assert draft is not None
    return draft


def test_every_drafter_is_built_here() -> None:
    assert set(SPECS) == set(DRAFTERS)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_carries_the_name_it_is_listed_under(kind: str) -> None:
    assert SPECS[kind].kind == kind


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("picker", [GreedySampler, sampling])
def test_it_proposes_at_least_one_token_and_no_more_than_it_may(
    kind: str, most: int, picker: Callable[[], TokenSampler]
) -> None:
    draft = drafted(kind, context(picker()), most)
    [n] = draft.tokens.shape
    assert 1 <= n <= most
    assert draft.tokens.dtype == torch.int64
    assert 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < VOCAB


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_sampled_draft_comes_with_the_distributions_it_was_drawn_from_or_is_certain(
    kind: str,
) -> None:
    draft = drafted(kind, context(sampling()), 5)
    if draft.probs is None:
        return
    assert draft.probs.shape == (len(draft.tokens), VOCAB)
    torch.testing.assert_close(
        draft.probs.sum(-1), torch.ones(draft.tokens.shape, dtype=draft.probs.dtype)
    )
    assert float(draft.probs.min()) >= 0
    assert bool((draft.probs.gather(-1, draft.tokens[..., None]) > 0).all()), (
        "a token that q never draws was drawn"
    )


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_greedy_draft_is_certain_of_its_tokens(kind: str) -> None:
    probs = drafted(kind, context(), 5).probs
    assert probs is None or set(probs.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("picker", [GreedySampler, sampling])
def test_the_same_round_is_drafted_the_same_way_again(
    kind: str, picker: Callable[[], TokenSampler]
) -> None:
    assert torch.equal(
        drafted(kind, context(picker()), 6).tokens, drafted(kind, context(picker()), 6).tokens
    )


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_leaves_what_is_committed_alone(kind: str) -> None:
    ctx = context()
    before, length, history, pending = (
        committed(ctx.cache),
        ctx.cache.length,
        list(ctx.history),
        ctx.pending.clone(),
    )
    drafted(kind, ctx, 8)
    assert ctx.cache.length == length
    assert all(torch.equal(a, b) for a, b in zip(before, committed(ctx.cache), strict=True))
    assert ctx.history == history
    assert torch.equal(ctx.pending, pending)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_writes_no_slot_behind_its_last_proposal(kind: str) -> None:
    ctx = context()
    draft = drafted(kind, ctx, 4)
    end = ctx.cache.length + max(
        len(draft.tokens), SPECS[kind].scratch_slots
    )  # the pending token and all proposals but the last
    assert not any(
        bool(t[:, :, end:].any()) for t in (*ctx.cache.keys, *ctx.cache.values) if t is not None
    )


class Witness:
    """Notes the order in which a decoder calls a drafter and its sessions."""

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.calls: list[str] = []

    def new_session(self) -> WitnessSession:
        return WitnessSession(self, self.inner.new_session())


class WitnessSession:
    def __getattr__(self, name: str) -> Any:  # what a session that watches has beside
        return getattr(self.inner, name)

    def begin(self, ctx: DecodeContext) -> None:
        assert ctx.history[: ctx.prompt_length] == ctx.history
        assert ctx.cache.length == ctx.prompt_length
        self.calls.append("begin")
        self.inner.begin(ctx)

    def __init__(self, witness: Witness, inner: DraftSession):
        self.calls, self.inner = witness.calls, inner

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        found = self.inner.draft(ctx, most)
        self.calls.append("draft" if found else "nothing")
        return found

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        assert list(path) == list(range(1, 1 + len(path)))
        self.calls.append("verified")
        self.inner.verified(ctx, path)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decoder_tells_it_after_every_verify_pass_of_its_own_what_was_accepted(
    kind: str, temperature: float
) -> None:
    model, _ = tiny_model_and_reference()
    drafter = build(kind)
    witness = Witness(drafter)
    decoder = decoder_with(model, witness, 3)
    for _ in range(2):
        decoder.generate(PROMPT, 14, temperature=temperature)
    assert [witness.calls[0], witness.calls.count("begin")] == ["begin", 2]
    followers = Counter(pairwise(witness.calls))
    assert followers["draft", "verified"] == witness.calls.count("draft") > 2, (
        "and only a round of its own"
    )
    assert witness.calls.count("verified") == witness.calls.count("draft")


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draft_length", [4, *thorough(1, 12)])
def test_decoding_with_it_is_lossless(kind: str, draft_length: int) -> None:
    model, full = tiny_model_and_reference()
    assert isinstance(full, FullModel)
    decoder = decoder_with(model, build(kind), draft_length)
    for prompt in (PROMPT, [0], [7] * 12):
        assert decoder.generate(prompt, 14).tokens == full.greedy(prompt, 14)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_requests_that_interleave_draft_as_they_would_alone(kind: str) -> None:
    model, _ = tiny_model_and_reference()
    prompts = (PROMPT, [0, 9, 0], [7] * 5)

    def drafts_of(prompts: Sequence[Sequence[int]], together: bool) -> list[list[tuple[int, ...]]]:
        decoder = decoder_with(model, build(kind), 4)
        streams = [decoder.stream(prompt, 14) for prompt in prompts]
        chunks = list(zip_longest(*streams)) if together else list(zip_longest(*map(list, streams)))
        return [
            [tuple(chunk.tokens) for chunk in column if chunk]
            for column in zip(*chunks, strict=True)
        ]

    assert drafts_of(prompts, together=True) == drafts_of(prompts, together=False)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_a_profile_stores_builds_it_again(kind: str) -> None:
    assert Recipe.from_data(Recipe((SPECS[kind],)).as_data()) == Recipe((SPECS[kind],))
