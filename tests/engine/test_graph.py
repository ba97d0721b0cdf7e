"""The graph engine: which passes it records, that few recordings serve all, and, on a GPU, that replaying them changes nothing."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
from helpers.tiny import LAYERS, driven_by, small_world

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding import Decoder
from skipsearch.decoding.sampling import GreedyPicker, Sampling, SamplingPicker
from skipsearch.drafters.clasp import CLaSp
from skipsearch.engine import forward, inference, load_model
from skipsearch.engine import graph as graph_module
from skipsearch.engine.graph import LEAST_KEYS, RECORDED_ROWS, GraphAdapter
from skipsearch.errors import ModelError
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe

CAPACITY = 4 * LEAST_KEYS
MASK = SkipMask(LAYERS, (1,), (2,))


@pytest.fixture
def model() -> GraphAdapter:
    with driven_by("graph"):
        shared = small_world()[0]
    assert isinstance(shared, GraphAdapter)
    return GraphAdapter(shared.lean)


class Text:
    """A cache with a text in it, ready for passes behind it."""

    def __init__(self, model: GraphAdapter, length: int, capacity: int = CAPACITY):
        self.model, self.cache = model, model.new_cache(1, capacity)
        self.planner = Planner(capacity, model.spec.device)
        self.tokens = torch.arange(length)[None] * 7 % 64
        with torch.no_grad():
            forward(model, self.tokens, self.cache, self.planner.chain(0, length))
        self.cache.length = length

    @inference
    def run(self, rows: int, mask: SkipMask | None = None, last_only: bool = False) -> torch.Tensor | None:
        tokens = torch.arange(rows)[None] + 3
        logits = self.model.run(tokens, self.cache, self.planner.chain(self.cache.length, rows), mask, last_only)
        return None if logits is None else logits.clone()

    @inference
    def uncaptured(self, rows: int, mask: SkipMask | None = None) -> torch.Tensor:
        tokens = torch.arange(rows)[None] + 3
        return forward(self.model.lean, tokens, self.cache, self.planner.chain(self.cache.length, rows), mask)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("mask", [None, MASK])
def test_a_recorded_pass_gives_the_logits_of_the_pass(model: GraphAdapter, rows: int, mask: SkipMask | None) -> None:
    text = Text(model, 20)
    expected = text.uncaptured(rows, mask)
    for _ in range(2):  # recorded, then replayed
        logits = text.run(rows, mask)
        assert logits is not None
        torch.testing.assert_close(logits, expected)
    last = text.run(rows, mask, last_only=True)
    assert last is not None
    torch.testing.assert_close(last, expected[:, -1:])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9), Sampling(1.3, top_k=5)])
def test_a_recorded_draft_step_scores_as_the_pass_and_the_picker_do(model: GraphAdapter, sampling: Sampling) -> None:
    picker = GreedyPicker() if sampling.greedy else SamplingPicker(sampling, torch.Generator().manual_seed(0))
    text, token = Text(model, 20), torch.tensor([[3]])
    expected = picker.score(text.uncaptured(1, MASK)[:, -1], confidence=True)
    plan = text.planner.chain(20, 1)
    with torch.no_grad():
        first = model.run_scored(token, text.cache, plan, MASK, picker, True)
        kept = None if first is None else first.weights.clone()
        again = model.run_scored(torch.tensor([[44]]), text.cache, plan, MASK, picker, True)
        unsure = model.run_scored(token, text.cache, plan, MASK, picker, False)
    assert first is not None
    assert again is not None
    assert unsure is not None
    torch.testing.assert_close(kept, expected.weights)
    torch.testing.assert_close(first.weights, kept, msg="the next step wrote over what was gathered")
    assert not torch.equal(again.weights, kept)
    assert unsure.confidence is None
    assert len(model._recordings) == 2, "one with and one without confidence"


def test_a_draft_under_a_confidence_policy_runs_recorded_steps_and_nothing_else(model: GraphAdapter) -> None:
    mask = SkipMask(LAYERS, (1,), (2,))
    passes: list[SkipMask | None] = []
    run = model.run
    model.run = lambda tokens, cache, plan, mask, last_only: (passes.append(mask), run(tokens, cache, plan, mask, last_only))[1]  # type: ignore[method-assign]
    stats = Decoder(model, mask, draft_length=4, exit_policy=make_exit("confidence", threshold=0.3)).generate([5, 17, 40], 20).stats
    assert stats.drafted > stats.accepted > 0
    assert set(passes) == {None}, "logits of a draft step are scored where they are made"


def test_rows_are_rounded_up_and_keys_doubled_so_that_few_recordings_serve_all(model: GraphAdapter) -> None:
    text = Text(model, 20)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8):
        text.run(rows)
    assert sorted(key[3] for key in model._recordings) == [1, 2, 4, 8]
    text.cache.length = LEAST_KEYS
    text.run(1)
    assert {key[4] for key in model._recordings} == {LEAST_KEYS, 2 * LEAST_KEYS}


def test_another_mask_and_another_cache_are_recorded_anew_and_the_oldest_goes_first(model: GraphAdapter,
                                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MOST_RECORDINGS", 3)
    text, other = Text(model, 20), Text(model, 30)
    text.run(1)
    text.run(1, MASK)
    other.run(1)
    first = next(iter(model._recordings))
    text.run(1)  # used again: no longer the oldest
    other.run(1, MASK)
    assert len(model._recordings) == 3
    assert first in model._recordings
    assert (id(text.cache), MASK, 1, LEAST_KEYS) not in model._recordings


def test_masks_that_move_are_not_recorded_until_one_stays(model: GraphAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "RECORDED_MASKS", 2)
    monkeypatch.setattr(graph_module, "SETTLED", 3)
    text = Text(model, 20)
    masks = [SkipMask(LAYERS, (i,), ()) for i in range(4)]
    assert [text.run(1, mask) is not None for mask in masks] == [True, True, False, False]
    assert text.run(1) is not None, "full passes are no mask's"
    assert text.run(2, masks[0]) is not None, "one that is known may be recorded in other shapes"
    assert [text.run(1, masks[2]) is not None for _ in range(5)] == [False, False, False, True, True]
    assert [text.run(1, mask) is not None for mask in (masks[3], masks[2], masks[3])] == [False, True, False]
    assert Text(model, 20).run(1, masks[3]) is not None, "another cache begins anew"


def test_a_decoder_says_that_masks_which_move_are_not_recorded(model: GraphAdapter) -> None:
    clasp = CLaSp(skip=2, interval=1, draft_length=3, exit=make_exit("fixed"))
    [warning] = Decoder(model, Recipe((clasp,))).warnings
    assert "clasp chooses masks while decoding" in warning
    assert Decoder(model, MASK).warnings == []
    assert Decoder(model.lean, Recipe((clasp,))).warnings == []



@pytest.mark.parametrize("what", ["prefill", "long", "end of the cache", "replay", "batch"])
def test_what_is_not_a_short_chain_is_left_to_the_loop(model: GraphAdapter, what: str) -> None:
    text = Text(model, 20, capacity=LEAST_KEYS)
    rows, batch = {"long": RECORDED_ROWS + 1}.get(what, 4), 2 if what == "batch" else 1
    start = {"prefill": 0, "end of the cache": LEAST_KEYS - 4}.get(what, 20)
    plan = text.planner.chain(start, 3 if what == "end of the cache" else rows, batch)
    if what == "end of the cache":
        text.cache.capacity = LEAST_KEYS - 1
    if what == "replay":
        plan = PassPlan(plan.positions, plan.slots, plan.keys, plan.visible, plan.start, key_positions=plan.slots)
    cache = KVCache(LAYERS, batch, LEAST_KEYS) if what == "batch" else text.cache
    tokens = torch.zeros(batch, plan.positions.shape[1], dtype=torch.long)
    assert model.run(tokens, cache, plan, None, False) is None


def test_it_needs_a_gpu() -> None:
    with pytest.raises(ModelError, match="records CUDA graphs and demo is on cpu: use --device cuda, or --engine lean"):
        load_model("demo", device="cpu", engine="graph")


# --- on a GPU ----------------------------------------------------------------------------------------------------------------


DEMO_MASK = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
PROMPT = "def parse_arguments(argv=None):\n"


@pytest.mark.gpu
def test_on_a_gpu_another_mask_is_recorded_in_well_under_a_second() -> None:
    model = load_model("demo", device="cuda", dtype="bfloat16", engine="graph")
    prompt = list(model.tokenizer(PROMPT).input_ids)
    Decoder(model, DEMO_MASK).generate(prompt, 40, ignore_eos=True)
    started = perf_counter()
    Decoder(model, SkipMask(20, attn=(3,), mlp=(4,))).generate(prompt, 8, ignore_eos=True)
    print(f"a new mask and eight tokens: {perf_counter() - started:.3f} s")
    assert model._recordings  # type: ignore[attr-defined]
