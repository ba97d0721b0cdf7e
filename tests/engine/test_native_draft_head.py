"""A draft head on the engine native: mix, layer and head in one call."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import module_folder, small_mtp
from helpers.tiny import tiny_model_and_reference, use_engine

from skipsearch.core.reading import BITS_OF_WEIGHTS
from skipsearch.drafters.mtp.weights import TrainedHead, load_draft_head
from skipsearch.engine import no_grad
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.blocks import round_weight
from skipsearch.engine.native.draft_head import NativeHeadRunner
from skipsearch.engine.sampler import GREEDY, SamplingParams, TokenSampler, make_sampler
from skipsearch.errors import ModelError
from skipsearch.models.adapter import DraftScores
from skipsearch.models.kv_cache import Planner

pytestmark = pytest.mark.xdist_group("native")
ROWS, STEPS = 5, 4


def head_on(engine: str) -> TrainedHead:
    spec = small_mtp()
    assert spec.module is not None
    with use_engine(engine):
        model = tiny_model_and_reference()[0]
    return load_draft_head(model, spec.module, [module_folder()])


def text_of(head: TrainedHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the token after each."""
    random = torch.Generator().manual_seed(1)
    spec = head.model.spec
    tokens = torch.randint(0, spec.vocab_size, (1, ROWS), generator=random)
    return torch.randn(1, ROWS, spec.hidden_size, generator=random).to(spec.dtype), tokens


@no_grad
def test_it_computes_what_other_engines_compute() -> None:
    native, other = head_on("native"), head_on("hf")
    assert isinstance(native.adapter, NativeAdapter)
    hidden, tokens = text_of(native)
    outputs = []
    for head in (native, other):
        cache, planner = head.new_cache(64), Planner(64, hidden.device)
        states = head.run(hidden, tokens, cache, planner.plan_chain(0, ROWS))
        step = head.run(states[:, -1:], tokens[:, :1], cache, planner.plan_chain(ROWS, 1))
        outputs.append((states, step, head.compute_logits(head.adapter, step)))
    for of_native, of_other in zip(*outputs, strict=True):
        torch.testing.assert_close(of_native, of_other, atol=1e-4, rtol=1e-4)


@no_grad
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.2, top_k=9)], ids=str)
@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_a_chain_in_one_call_is_the_chain_of_single_steps(
    weights: str, sampling: SamplingParams
) -> None:
    head = head_on("native").rounded(weights)  # type: ignore[arg-type]
    hidden, tokens = text_of(head)
    planner, runner = Planner(64, hidden.device), head.runner

    def new_sampler() -> TokenSampler:
        return make_sampler(sampling, torch.Generator().manual_seed(3))

    def run_chain(threshold: float) -> DraftScores:
        assert runner is not None
        cache, plan = head.new_cache(64), planner.plan_chain(0, ROWS)
        scores = runner.run_chain(
            head.adapter, hidden, tokens, cache, plan, new_sampler(), STEPS, threshold
        )
        assert scores is not None
        return scores

    scores, sampler = run_chain(0.0), new_sampler()
    cache, chosen, distributions = head.new_cache(64), list[int](), list[torch.Tensor]()
    states = head.run(hidden, tokens, cache, planner.plan_chain(0, ROWS))[:, -1:]
    for step in range(STEPS):
        token, probs = sampler.draw(
            sampler.score(head.compute_logits(head.adapter, states)[:, -1], True)
        )
        chosen.append(int(token))
        distributions += [] if probs is None else [probs]
        states = head.run(states, token, cache, planner.plan_chain(ROWS + step, 1))
    assert scores.choice is not None
    assert scores.choice[:, 0].tolist() == chosen
    assert (scores.probs is None) == sampling.is_greedy
    if scores.probs is not None:
        torch.testing.assert_close(scores.probs, torch.cat(distributions), rtol=1e-4, atol=1e-6)
    assert scores.confidence is not None
    confidences = scores.confidence.tolist()
    for sure in confidences:
        above = torch.tensor(sure).nextafter(torch.tensor(2.0)).item()
        ended = run_chain(above)
        assert ended.choice is not None
        first_unsure = next(i for i, c in enumerate(confidences, 1) if c < above)
        assert ended.choice[:, 0].tolist() == chosen[:first_unsure]


@pytest.mark.parametrize("weights", ["int8", "int5"])
def test_a_rounded_head_shares_the_layers_of_the_model(weights: str) -> None:
    head = head_on("native")
    rounded = head.rounded(weights)  # type: ignore[arg-type]
    runner, before = rounded.runner, head.runner
    assert isinstance(runner, NativeHeadRunner)
    assert isinstance(before, NativeHeadRunner)
    bits = BITS_OF_WEIGHTS[weights]
    expected = round_weight(before.mix.projection.to_dense(), bits)
    assert torch.equal(runner.mix.projection.to_dense(), expected)
    own, shared = runner.adapter.fused_model.layers, before.adapter.fused_model.layers
    assert own[:-1] == shared[:-1]
    down = shared[-1][1].down.to_dense()
    assert torch.equal(own[-1][1].down.to_dense(), round_weight(down, bits))


def test_other_engines_have_no_head_in_fewer_bits() -> None:
    head = head_on("hf")
    assert head.runner is None
    assert head.rounded("stored") is head
    with pytest.raises(ModelError, match="engine native"):
        head.rounded("int8")
