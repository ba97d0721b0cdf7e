"""What every drafter promises. A drafter is tested here from the moment its line stands in DRAFTERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from helpers.tiny import LAYERS, VOCAB, FullModel, small_world
from torch import Tensor

from skipsearch.cache import KVCache, Planner
from skipsearch.decoding import Decoder
from skipsearch.decoding.sampling import GreedyPicker, Sampling, SamplingPicker
from skipsearch.drafters import DRAFTERS, DecodeContext, Draft, Drafter
from skipsearch.drafters.base import TokenPicker
from skipsearch.engine import forward
from skipsearch.errors import SkipSearchError
from skipsearch.exits.fixed import Fixed
from skipsearch.mask import SkipMask
from skipsearch.names import resolve

# How each drafter is built for these tests: a new one adds its line.
BUILD: dict[str, Callable[..., Drafter]] = {
    "skip": lambda make: make(SkipMask(LAYERS, (1, 3), (0, 2)), Fixed()),
}
CAPACITY = 64
PROMPT = [5, 17, 40, 3, 22]


def build(kind: str) -> Drafter:
    drafter: Drafter = BUILD[kind](resolve("drafter", kind, DRAFTERS, SkipSearchError))
    return drafter


def context(picker: TokenPicker | None = None) -> DecodeContext:
    """A round that is about to start: a prompt in the cache, one token pending."""
    model, _ = small_world()
    cache, planner = model.new_cache(1, CAPACITY), Planner(CAPACITY, torch.device("cpu"))
    with torch.no_grad():
        logits = forward(model, torch.tensor([PROMPT]), cache, planner.chain(0, len(PROMPT)), last_only=True)
    cache.length = len(PROMPT)
    pending = logits[:, -1].argmax(-1, keepdim=True)
    return DecodeContext(model, cache, planner, pending, [[*PROMPT, int(pending)]], picker or GreedyPicker())


def sampling(seed: int = 0) -> SamplingPicker:
    return SamplingPicker(Sampling(0.9, top_k=20), torch.Generator().manual_seed(seed))


def committed(cache: KVCache) -> list[Tensor]:
    return [t[:, :, :cache.length].clone() for t in (*cache.keys, *cache.values) if t is not None]


@torch.no_grad()
def drafted(kind: str, ctx: DecodeContext, most: int) -> Draft:
    return build(kind).draft(ctx, most)


def test_every_drafter_is_built_here() -> None:
    assert set(BUILD) == set(DRAFTERS)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_carries_the_name_it_is_listed_under(kind: str) -> None:
    assert build(kind).kind == kind


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("picker", [GreedyPicker, sampling])
def test_it_proposes_at_least_one_token_and_no_more_than_it_may(kind: str, most: int, picker: Callable[[], TokenPicker]) -> None:
    draft = drafted(kind, context(picker()), most)
    batch, n = draft.tokens.shape
    assert batch == 1
    assert 1 <= n <= most
    assert draft.tokens.dtype == torch.int64
    assert 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < VOCAB
    assert len(draft.lengths) == 1
    assert 1 <= draft.lengths[0] <= n
    assert draft.parents is None or draft.parents.shape == (n,)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_sampled_draft_comes_with_the_distributions_it_was_drawn_from_or_is_certain(kind: str) -> None:
    draft = drafted(kind, context(sampling()), 5)
    if draft.probs is None:
        return
    assert draft.probs.shape == (*draft.tokens.shape, VOCAB)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(draft.tokens.shape, dtype=draft.probs.dtype))
    assert float(draft.probs.min()) >= 0
    assert bool((draft.probs.gather(-1, draft.tokens[..., None]) > 0).all()), "a token that q never draws was drawn"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_greedy_draft_is_certain_of_its_tokens(kind: str) -> None:
    probs = drafted(kind, context(), 5).probs
    assert probs is None or set(probs.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("picker", [GreedyPicker, sampling])
def test_the_same_round_is_drafted_the_same_way_again(kind: str, picker: Callable[[], TokenPicker]) -> None:
    assert torch.equal(drafted(kind, context(picker()), 6).tokens, drafted(kind, context(picker()), 6).tokens)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_leaves_what_is_committed_alone(kind: str) -> None:
    ctx = context()
    before, length, history, pending = committed(ctx.cache), ctx.cache.length, [list(ctx.history[0])], ctx.pending.clone()
    drafted(kind, ctx, 8)
    assert ctx.cache.length == length
    assert all(torch.equal(a, b) for a, b in zip(before, committed(ctx.cache), strict=True))
    assert ctx.history == history
    assert torch.equal(ctx.pending, pending)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_writes_no_slot_behind_its_last_proposal(kind: str) -> None:
    ctx = context()
    draft = drafted(kind, ctx, 4)
    end = ctx.cache.length + draft.tokens.shape[1]   # the pending token and all proposals but the last
    assert not any(bool(t[:, :, end:].any()) for t in (*ctx.cache.keys, *ctx.cache.values) if t is not None)


class Witness:
    """Notes the order in which a decoder calls a drafter."""

    kind: ClassVar[str] = "witness"

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.calls: list[str] = []

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft:
        self.calls.append("draft")
        return self.inner.draft(ctx, max_tokens)

    def commit(self, accepted: list[list[int]]) -> None:
        assert len(accepted) == 1
        assert accepted[0] == list(range(len(accepted[0])))
        self.calls.append("commit")
        self.inner.commit(accepted)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decoder_tells_it_after_every_verify_pass_what_was_accepted(kind: str, temperature: float) -> None:
    model, _ = small_world()
    decoder = Decoder(model, SkipMask(LAYERS), draft_length=3)
    witness = decoder.loop.drafter = Witness(build(kind))
    decoder.generate(PROMPT, 20, temperature=temperature)
    assert witness.calls == ["draft", "commit"] * (len(witness.calls) // 2)
    assert len(witness.calls) >= 10


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draft_length", [1, 4, 12])
def test_decoding_with_it_is_lossless(kind: str, draft_length: int) -> None:
    model, full = small_world()
    assert isinstance(full, FullModel)
    decoder = Decoder(model, SkipMask(LAYERS), draft_length=draft_length)
    decoder.loop.drafter = build(kind)
    for prompt in (PROMPT, [0], [7] * 12):
        assert decoder.generate(prompt, 14).tokens == full.greedy(prompt, 14)
