"""Greedy drafts of the native engine in one call equal single draft steps, token by token."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoding.checks import MASKS, PROMPTS
from decoding.count_checks import StopAt
from helpers.drafting import decoder_with
from helpers.modules import module_folder, small_module
from helpers.properties import with_examples
from helpers.tiny import tiny_model_and_reference, use_engine
from hypothesis import given
from hypothesis import strategies as st
from models.tiny import LAYERS, VOCAB, new_hf_model, some_tokens
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.decoding import Decoder
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.session import SkipDrafter
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import RowCache, SharedCache, draft_chain, draft_step, forward, no_grad
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.native import NativeAdapter, structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.sampler import GreedySampler, SamplingParams, TemperatureSampler
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.kv_cache import KVCache, Planner

pytestmark = pytest.mark.xdist_group("native")
CPU, CAPACITY = torch.device("cpu"), 40
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NAMES = ["llama", "llama-tied", "cwm", "exaone4"]  # the last two with sliding windows of 8
masks = st.builds(
    lambda sublayers: SkipMask.from_sublayers(LAYERS, sublayers),
    st.sets(st.integers(0, 2 * LAYERS - 1)),
)


@cache
def native(name: str, dtype: torch.dtype = torch.float64) -> NativeAdapter:
    model = new_hf_model(name).to(dtype)
    model_under_native = wrap_engine(
        fuse_model(model, adapt(model).spec, family_of(model.config)), "native"
    )
    assert isinstance(model_under_native, NativeAdapter)
    return model_under_native


def prefilled(model: ModelAdapter, length: int) -> tuple[Tensor, KVCache, Planner]:
    """(the pending token, the cache with `length` tokens before it, its planner)."""
    tokens, cache, planner = (
        some_tokens(CAPACITY),
        model.new_cache(1, CAPACITY),
        Planner(CAPACITY, CPU),
    )
    forward(model, tokens[:, :length], cache, planner.plan_chain(0, length), last_only=True)
    cache.length = length
    return tokens[:, length : length + 1], cache, planner


@no_grad
def check_drafts(
    model: ModelAdapter, mask: SkipMask, length: int, max_tokens: int, threshold: float
) -> int:
    """Tokens, top probabilities and every K/V in the cache are those of single steps. Returns the
    number of tokens.
    """
    token, cache, planner = prefilled(model, length)
    pending, chain_cache, _ = prefilled(model, length)
    sampler = GreedySampler()
    scores = draft_chain(model, pending, chain_cache, planner, mask, sampler, max_tokens, threshold)
    assert scores is not None
    assert scores.confidence is not None
    tokens, confidences = [], []
    for n in range(max_tokens):
        scored = draft_step(
            model, token, cache, planner.plan_chain(length + n, 1), mask, sampler, True
        )
        assert scored.confidence is not None
        assert scored.choice is not None
        token = scored.choice
        tokens.append(int(token))
        confidences.append(float(scored.confidence))
        if confidences[-1] < threshold:
            break
    assert scores.choice is not None
    assert scores.choice.tolist() == [[token] for token in tokens]
    assert scores.confidence.tolist() == confidences
    for chain_kv, step_kv in zip(
        (*chain_cache.keys, *chain_cache.values), (*cache.keys, *cache.values), strict=True
    ):
        assert (chain_kv is None and step_kv is None) or torch.equal(chain_kv, step_kv)
    assert chain_cache.length == length
    return len(tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_in_one_call_is_its_steps_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Up to the last slot of the cache, and beyond the window of layers that have one."""
    lengths = set[tuple[int, int]]()

    @with_examples(30)
    @given(
        mask=masks,
        max_tokens=st.integers(1, 12),
        threshold=st.one_of(st.just(0.0), st.floats(0, 0.2), st.just(1.0)),
        data=st.data(),
    )
    def holds(mask: SkipMask, max_tokens: int, threshold: float, data: st.DataObject) -> None:
        length = data.draw(
            st.one_of(st.just(CAPACITY - max_tokens), st.integers(1, CAPACITY - max_tokens))
        )
        lengths.add(
            (max_tokens, check_drafts(native(name, dtype), mask, length, max_tokens, threshold))
        )

    holds()
    assert any(got == max_tokens > 1 for max_tokens, got in lengths)
    assert any(got < max_tokens for max_tokens, got in lengths), (
        "some drafts are ended by the threshold"
    )


@no_grad
def test_siblings_are_the_next_most_likely_tokens_of_each_step() -> None:
    model, mask, choices = native("llama"), SkipMask(LAYERS, (1,)), 4
    for sampler in (GreedySampler(choices), GreedySampler(VOCAB + 5)):
        token, cache, planner = prefilled(model, 9)
        found = draft_chain(model, *prefilled(model, 9), mask, sampler, 6, 0.0)
        assert found is not None
        assert found.choice is not None
        assert found.confidence is not None
        for n, (ranked, confidences) in enumerate(zip(found.choice, found.confidence, strict=True)):
            scored = draft_step(
                model, token, cache, planner.plan_chain(9 + n, 1), mask, sampler, True
            )
            assert scored.choice is not None
            assert ranked.tolist() == scored.choice[0].tolist()
            torch.testing.assert_close(
                confidences, scored.confidence[0].float(), rtol=1e-5, atol=1e-6
            )  # type: ignore[index]
            token = scored.choice[:, :1]


# --- what is left to single steps


@no_grad
def test_what_one_call_cannot_do_is_left_to_steps() -> None:
    model, mask, greedy = native("llama"), SkipMask(LAYERS, (1,)), GreedySampler()
    token, cache, planner = prefilled(model, 9)

    def drafted(
        model: ModelAdapter = model,
        cache: KVCache = cache,
        sampler: Any = greedy,
        max_tokens: int = 4,
    ) -> Any:
        return draft_chain(model, token, cache, planner, mask, sampler, max_tokens, 0.0)

    assert drafted() is not None
    assert drafted(max_tokens=CAPACITY - 9) is not None
    assert drafted(max_tokens=CAPACITY - 8) is None, (
        "past the end of the cache the step that needs it says so"
    )
    assert drafted(native("gemma3_text")) is None, "its logits go through a soft cap"
    assert drafted(native("llama").fused_model) is None
    row = RowCache(
        SharedCache(LAYERS, 2, CAPACITY),
        0,
        lambda *wanted: pytest.fail("drafts of a whole round join no others"),
    )
    assert drafted(cache=row) is None, (
        "each of its steps may be one pass with those of other requests"
    )


@no_grad
def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    model = native("llama")
    _, cache, planner = prefilled(model, 9)
    with pytest.raises(IndexError, match="out of range"):
        draft_chain(
            model,
            torch.tensor([[VOCAB]]),
            cache,
            planner,
            SkipMask(LAYERS, (1,)),
            GreedySampler(),
            3,
            0.0,
        )


# --- drafters


@contextmanager
def watched() -> Iterator[list[int]]:
    """The lengths of all drafts that are made in one call."""
    lengths, real = list[int](), NativeLibrary.run_draft_chain

    def draft(self: NativeLibrary, *rest: Any) -> int:
        lengths.append(real(self, *rest))
        return lengths[-1]

    with patch.object(NativeLibrary, "run_draft_chain", draft):
        yield lengths


def step_by_step() -> Any:
    return patch.object(NativeAdapter, "run_draft_chain", lambda *_: None)


UNSURE = make_exit("confidence", threshold=0.3)
LEARNING = make_exit("adaptive", threshold=0.4, target_acceptance=0.7, step=0.5, beta2=0.1)
RECIPES = [
    Skip.from_mask(MASKS[0], 4, make_exit("fixed")),
    Skip.from_mask(MASKS[1], 1, UNSURE),
    Skip.from_mask(MASKS[2], 12, UNSURE),
    Skip.from_mask(MASKS[3], 7, LEARNING),
    Skip.from_mask(MASKS[2], 5, UNSURE, Siblings(below=0.6, most=2)),
    Skip.from_mask(MASKS[0], 6, LEARNING, Siblings(below=0.3, most=3)),
    small_module(0.1, 4),
    CLaSp(skip=2, draft_length=4, exit=UNSURE),
    ASD(threshold=0.9, every=2, keep_last=1, draft_length=4, exit=LEARNING),
]


@pytest.mark.parametrize("spec", RECIPES, ids=str)
def test_a_drafter_drafts_the_same_in_one_call_and_step_by_step(spec: Any) -> None:
    """And what it is told of a round is the same, so that a threshold that learns moves alike."""
    with use_engine("native"):
        model, full = tiny_model_and_reference()
    decoder = Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
    drafted = accepted = 0
    for prompt in PROMPTS:
        with watched() as lengths:
            at_once = decoder.generate(prompt, 30)
        with step_by_step():
            steps = decoder.generate(prompt, 30)
        assert at_once.tokens == steps.tokens == full.greedy(prompt, 30)
        assert at_once.stats.by_drafter == steps.stats.by_drafter
        assert (at_once.stats.rounds, at_once.stats.rejecting_rounds) == (
            steps.stats.rounds,
            steps.stats.rejecting_rounds,
        )
        assert len(lengths) == at_once.stats.by_drafter[0].rounds > 0
        assert sum(lengths) == at_once.stats.drafted
        drafted, accepted = drafted + at_once.stats.drafted, accepted + at_once.stats.accepted
    assert 0 < accepted < drafted


def test_a_policy_that_has_to_be_asked_after_each_token_is_asked() -> None:
    with use_engine("native"):
        model, full = tiny_model_and_reference()
    decoder = decoder_with(model, SkipDrafter(MASKS[0], StopAt(2)), 5)  # type: ignore[arg-type]
    with watched() as lengths:
        found = decoder.generate(PROMPTS[0], 20)
    assert found.tokens == full.greedy(PROMPTS[0], 20)
    assert lengths == []
    assert 0 < found.stats.accepted < found.stats.drafted


def test_a_policy_that_lives_on_drafts_with_what_it_has_learnt() -> None:
    lasting = make_exit(
        "adaptive", threshold=0.9, target_acceptance=0.1, step=1.0, beta2=0.5, across_requests=True
    )
    with use_engine("native"):
        model, _ = tiny_model_and_reference()
    decoders = [Decoder(model, Recipe((Skip.from_mask(MASKS[0], 6, lasting),))) for _ in range(2)]
    at_once = [decoders[0].generate(prompt, 20).stats.drafted for prompt in PROMPTS]
    with step_by_step():
        assert [decoders[1].generate(prompt, 20).stats.drafted for prompt in PROMPTS] == at_once


# --- bugs, planted into the loop over steps


def in_python(stuck: str | None = None, late: int = 0) -> Callable[..., int]:
    """What the library does for a draft. stuck: what stays as it is from step to step; late: tokens
    drafted after the one that ends it.
    """

    def draft(
        self: NativeLibrary,
        model: structs.ModelStruct,
        first: structs.PassArgs,
        max_tokens: int,
        threshold: float,
    ) -> int:
        over = None
        slots = torch.arange(CAPACITY)  # those of the plan are the same
        start = first.n_keys - 1
        for k in range(max_tokens):
            first.positions = slots[start + (0 if stuck == "position" else k) :].data_ptr()
            first.slots = slots[start + (0 if stuck == "slot" else k) :].data_ptr()
            first.n_keys = start + 1 + k
            self.call("run_pass", model, first)
            if over is None and ctypes.c_float.from_address(first.confidence).value < threshold:
                over = k
            if over is not None and k - over >= late:
                return k + 1
            if stuck != "token":
                first.tokens = first.choice
            first.choice += 8
            first.confidence += 4
        return max_tokens

    return draft


def check_some_drafts() -> None:
    for name, (length, max_tokens), threshold in itertools.product(
        ("llama", "cwm"), ((9, 6), (CAPACITY - 5, 5)), (0.0, 0.06, 1.0)
    ):
        check_drafts(native(name), SkipMask(LAYERS, (1,), (0,)), length, max_tokens, threshold)


def test_the_check_passes_without_a_bug() -> None:
    check_some_drafts()
    with patch.object(NativeLibrary, "run_draft_chain", in_python()):
        check_some_drafts()


@pytest.mark.parametrize(
    "bug", [{"stuck": "position"}, {"stuck": "slot"}, {"stuck": "token"}, {"late": 1}], ids=str
)
def test_the_check_fails_while_a_bug_is_planted(bug: dict[str, Any]) -> None:
    with (
        patch.object(NativeLibrary, "run_draft_chain", in_python(**bug)),
        pytest.raises(AssertionError),
    ):
        check_some_drafts()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@no_grad
def test_the_first_step_of_a_draft_may_read_several_tokens(name: str, sampled: bool) -> None:
    model, mask, text = native(name), SkipMask(LAYERS, (1,), (0,)), some_tokens(CAPACITY)
    drafts = []
    for n_unread in (1, 4):
        _, cache, planner = prefilled(model, 6)
        cache.length = 10 - n_unread
        if cache.length > 6:
            rows = cache.length - 6
            forward(model, text[:, 6 : cache.length], cache, planner.plan_chain(6, rows), mask)
        generator = torch.Generator().manual_seed(0)
        sampler = TemperatureSampler(SamplingParams(0.9), generator) if sampled else GreedySampler()
        pending = text[:, cache.length : 10]
        scores = draft_chain(model, pending, cache, planner, mask, sampler, 5, 0.0)
        assert scores is not None
        assert scores.choice is not None
        drafts.append((scores.choice.tolist(), scores.confidence, scores.probs))
    (choice, confidence, probs), others = drafts[0], drafts[1]
    assert choice == others[0]
    assert torch.equal(confidence, others[1])
    assert not sampled or torch.equal(probs, others[2])
    last = text[:, CAPACITY - 6 :]
    cache.length = CAPACITY - 6
    past_the_end = draft_chain(model, last, cache, planner, mask, sampler, 2, 0.0)
    assert past_the_end is None
