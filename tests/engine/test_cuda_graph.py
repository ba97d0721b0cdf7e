"""The graph engine: which passes it captures; replaying them on a GPU changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny import LAYERS, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import DraftScores, forward, load_model, no_grad
from skipsearch.engine import cuda_graph as graph_module
from skipsearch.engine.cuda_graph import MAX_CAPTURED_ROWS, MIN_KEYS, GraphAdapter
from skipsearch.engine.sampler import GreedySampler, SamplingParams, TemperatureSampler
from skipsearch.errors import ModelError
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

CAPACITY = 4 * MIN_KEYS
MASK = SkipMask(LAYERS, (1,), (2,))


def recorded(model: GraphAdapter, cache: KVCache | None = None) -> list[tuple[Any, ...]]:
    """The keys of what is recorded: of a cache, or of all."""
    caches = list(model._caches.values()) if cache is None else [model._caches[cache]]
    return [key for each in caches for key in each.passes]


@pytest.fixture
def model() -> GraphAdapter:
    with use_engine("graph"):
        shared = tiny_model_and_reference()[0]
    assert isinstance(shared, GraphAdapter)
    return GraphAdapter(shared.fused_model)


class Text:
    """A cache with a text in it, ready for passes after it."""

    def __init__(self, model: GraphAdapter, length: int, capacity: int = CAPACITY):
        self.model, self.cache = model, model.new_cache(1, capacity)
        self.planner = Planner(capacity, model.spec.device)
        self.tokens = torch.arange(length)[None] * 7 % 64
        with torch.no_grad():
            forward(model, self.tokens, self.cache, self.planner.plan_chain(0, length))
        self.cache.length = length

    @no_grad
    def run(
        self, rows: int, mask: SkipMask | None = None, last_only: bool = False
    ) -> torch.Tensor | None:
        tokens = torch.arange(rows)[None] + 3
        logits = self.model.run(
            tokens, self.cache, self.planner.plan_chain(self.cache.length, rows), mask, last_only
        )
        return None if logits is None else logits.clone()

    @no_grad
    def uncaptured(self, rows: int, mask: SkipMask | None = None) -> torch.Tensor:
        tokens = torch.arange(rows)[None] + 3
        return forward(
            self.model.fused_model,
            tokens,
            self.cache,
            self.planner.plan_chain(self.cache.length, rows),
            mask,
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("mask", [None, MASK])
def test_a_recorded_pass_gives_the_logits_of_the_pass(
    model: GraphAdapter, rows: int, mask: SkipMask | None
) -> None:
    text = Text(model, 20)
    expected = text.uncaptured(rows, mask)
    for _ in range(2):  # recorded, then replayed
        logits = text.run(rows, mask)
        assert logits is not None
        torch.testing.assert_close(logits, expected)
    last = text.run(rows, mask, last_only=True)
    assert last is not None
    torch.testing.assert_close(last, expected[:, -1:])


def scores_of(scored: DraftScores) -> torch.Tensor:
    """Return the one field of the two that a sampler fills in."""
    assert (scored.choice is None) != (scored.probs is None)
    return scored.choice if scored.choice is not None else scored.probs  # type: ignore[return-value]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, top_p=0.9), SamplingParams(1.3, top_k=5)]
)
def test_a_recorded_draft_step_scores_as_the_pass_and_the_picker_do(
    model: GraphAdapter, sampling: SamplingParams
) -> None:
    picker = (
        GreedySampler()
        if sampling.is_greedy
        else TemperatureSampler(sampling, torch.Generator().manual_seed(0))
    )
    text, token = Text(model, 20), torch.tensor([[3]])
    expected = picker.score(text.uncaptured(1, MASK)[:, -1], with_confidence=True)
    plan = text.planner.plan_chain(20, 1)
    with torch.no_grad():
        first = model.run_draft_step(token, text.cache, plan, MASK, picker, True)
        copied = None if first is None else scores_of(first).clone()
        again = model.run_draft_step(torch.tensor([[44]]), text.cache, plan, MASK, picker, True)
        unsure = model.run_draft_step(token, text.cache, plan, MASK, picker, False)
    assert first is not None
    assert again is not None
    assert unsure is not None
    torch.testing.assert_close(copied, scores_of(expected))
    torch.testing.assert_close(
        scores_of(first), copied, msg="the next step wrote over what was gathered"
    )
    assert not torch.equal(scores_of(again), copied)
    assert unsure.confidence is None
    assert len(recorded(model)) == 2, "one with and one without confidence"


def test_a_draft_under_a_confidence_policy_runs_recorded_steps_and_nothing_else(
    model: GraphAdapter,
) -> None:
    mask = SkipMask(LAYERS, (1,), (2,))
    passes: list[SkipMask | None] = []
    run = model.run
    model.run = lambda tokens, cache, plan, mask, last_only: (
        passes.append(mask),
        run(tokens, cache, plan, mask, last_only),
    )[1]  # type: ignore[method-assign]
    stats = (
        Decoder(model, mask, draft_length=4, exit_policy=make_exit("confidence", threshold=0.3))
        .generate([5, 17, 40], 20)
        .stats
    )
    assert stats.drafted > stats.accepted > 0
    assert set(passes) == {None}, "logits of a draft step are scored where they are made"


def test_rows_are_rounded_up_and_keys_doubled_so_that_few_recordings_serve_all(
    model: GraphAdapter,
) -> None:
    text = Text(model, 20)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8):
        text.run(rows)
    assert sorted(rows for _, _, rows, *_ in recorded(model)) == [1, 2, 4, 8]
    text.cache.length = MIN_KEYS
    text.run(1)
    assert {keys for _, _, _, keys, *_ in recorded(model)} == {MIN_KEYS, 2 * MIN_KEYS}


def test_a_cache_that_grows_is_recorded_anew_and_what_was_recorded_over_its_old_buffers_goes(
    model: GraphAdapter,
) -> None:
    text = Text(model, 20, capacity=MIN_KEYS)
    for mask in (None, MASK):
        text.run(3, mask)
    assert len(recorded(model)) == 2
    expected = text.uncaptured(3)
    text.cache.reserve(MIN_KEYS + 1)
    logits = text.run(3)
    assert logits is not None
    torch.testing.assert_close(logits, expected)
    assert [mask for mask, *_ in recorded(model)] == [None]


def test_another_mask_and_another_cache_are_recorded_anew_and_the_oldest_goes_first(
    model: GraphAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "MAX_CAPTURES", 3)
    text, other = Text(model, 20), Text(model, 30)
    text.run(1)
    text.run(1, MASK)
    other.run(1)
    text.run(1)  # used again: no longer the oldest
    other.run(1, MASK)
    assert [mask for mask, *_ in recorded(model, text.cache)] == [None]
    assert [mask for mask, *_ in recorded(model, other.cache)] == [None, MASK]


def test_a_recording_goes_with_its_cache_and_no_other_does(model: GraphAdapter) -> None:
    """At once, as the cache itself should, and not when the garbage collector runs."""
    texts = [Text(model, 20), Text(model, 30)]
    for text in texts:
        text.run(1)
        text.run(3, MASK)
    del text
    assert len(recorded(model)) == 4
    ended = weakref.ref(texts[0].cache)
    gc.disable()
    try:
        del texts[0]
        assert ended() is None
        assert recorded(model) == recorded(model, texts[0].cache)
    finally:
        gc.enable()


def test_a_request_that_has_ended_leaves_no_cache_behind(model: GraphAdapter) -> None:
    decoder, caches = Decoder(model, MASK, draft_length=3), weakref.WeakSet[KVCache]()
    new_cache = model.new_cache
    model.new_cache = lambda *shape: (cache := new_cache(*shape), caches.add(cache))[0]  # type: ignore[method-assign]
    stats = decoder.generate([5, 17, 40], 20).stats
    assert stats.drafted > stats.accepted > 0
    assert len(caches) == 1
    assert recorded(model)
    gc.disable()
    try:
        decoder.loop.idle_caches = []
        assert not caches
        assert not recorded(model)
    finally:
        gc.enable()


class FakeCUDA:
    """Stands in for `torch.cuda` while passes are captured: notes who captures, and takes time over
    it, so that others get in between.
    """

    def __init__(self) -> None:
        self.inside, self.most, self.captured, self.modes = 0, 0, 0, set[str]()

    def Stream(self) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        sleep(0.01)
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str = "global") -> Iterator[None]:
        self.modes.add(capture_error_mode)
        yield
        self.captured += 1
        self.inside -= 1


def test_threads_capture_one_at_a_time_and_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCUDA()
    monkeypatch.setattr(graph_module.torch, "cuda", fake)
    with ThreadPoolExecutor(4) as pool:
        replays = list(pool.map(lambda n: graph_module._capture(lambda: n), range(8)))
    assert [replay() for replay in replays] == list(range(8))
    assert (fake.captured, fake.most, fake.modes) == (8, 1, {"thread_local"})


def test_masks_that_move_are_not_recorded_until_one_stays(
    model: GraphAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "MAX_CAPTURED_MASKS", 2)
    monkeypatch.setattr(graph_module, "STABLE_AFTER", 3)
    text = Text(model, 20)
    masks = [SkipMask(LAYERS, (i,), ()) for i in range(4)]
    assert [text.run(1, mask) is not None for mask in masks] == [True, True, False, False]
    assert text.run(1) is not None, "full passes are no mask's"
    assert text.run(2, masks[0]) is not None, "one that is known may be recorded in other shapes"
    assert [text.run(1, masks[2]) is not None for _ in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert [text.run(1, mask) is not None for mask in (masks[3], masks[2], masks[3])] == [
        False,
        True,
        False,
    ]
    assert Text(model, 20).run(1, masks[3]) is not None, "another cache begins anew"


def test_a_decoder_says_that_masks_which_move_are_not_recorded(model: GraphAdapter) -> None:
    clasp = CLaSp(skip=2, interval=1, draft_length=3, exit=make_exit("fixed"))
    [warning] = Decoder(model, Recipe((clasp,))).warnings
    assert "clasp chooses masks while decoding" in warning
    assert Decoder(model, MASK).warnings == []
    assert Decoder(model.fused_model, Recipe((clasp,))).warnings == []


@pytest.mark.parametrize("what", ["prefill", "long", "end of the cache", "replay", "batch"])
def test_what_is_not_a_short_chain_is_left_to_the_loop(model: GraphAdapter, what: str) -> None:
    text = Text(model, 20, capacity=MIN_KEYS)
    rows, batch = {"long": MAX_CAPTURED_ROWS + 1}.get(what, 4), 2 if what == "batch" else 1
    start = {"prefill": 0, "end of the cache": MIN_KEYS - 4}.get(what, 20)
    plan = text.planner.plan_chain(start, 3 if what == "end of the cache" else rows, batch)
    if what == "end of the cache":
        text.cache.capacity = MIN_KEYS - 1
    if what == "replay":
        plan = PassPlan(
            plan.positions,
            plan.slots,
            plan.n_keys,
            plan.mask,
            plan.first_slot,
            key_positions=plan.slots,
        )
    cache = KVCache(LAYERS, batch, MIN_KEYS) if what == "batch" else text.cache
    tokens = torch.zeros(batch, plan.positions.shape[1], dtype=torch.long)
    assert model.run(tokens, cache, plan, None, False) is None


def test_it_needs_a_gpu() -> None:
    with pytest.raises(
        ModelError,
        match="records CUDA graphs and demo is on cpu: use --device cuda, or --engine lean",
    ):
        load_model("demo", device="cpu", engine="graph")


# --- on a GPU


DEMO_MASK = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
PROMPT = "def parse_arguments(argv=None):\n"


@pytest.mark.gpu
def test_on_a_gpu_another_mask_is_recorded_in_well_under_a_second() -> None:
    model = load_model("demo", device="cuda", dtype="bfloat16", engine="graph")
    prompt = list(model.tokenizer(PROMPT).input_ids)
    masks = (DEMO_MASK, SkipMask(20, attn=(3,), mlp=(4,)))
    decoders = [Decoder(model, mask) for mask in masks]  # captures go with a decoder's cache
    for decoder in decoders:
        started = perf_counter()
        decoder.generate(prompt, 8, ignore_eos=True)
        print(f"a new mask and eight tokens: {perf_counter() - started:.3f} s")
    assert {key[0] for key in recorded(model)} >= set(masks)  # type: ignore[arg-type]
