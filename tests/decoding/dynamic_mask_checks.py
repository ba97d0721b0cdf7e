"""Checks of drafters that choose their mask while they decode. They raise AssertionError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers.drafting import wrap_drafters
from helpers.tiny import LAYERS, tiny_model_and_reference
from torch.nn.functional import cosine_similarity

from decoding.checks import PROMPTS
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.asd.rule import select_sublayers
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.dynamic_mask import DynamicMaskDrafter, DynamicMaskSession
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.swift.spec import SWIFT, SiblingSchedule
from skipsearch.engine import forward, run_layers
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import Planner

FIXED = make_exit("fixed")
CHOOSING: tuple[DrafterSpec, ...] = (
    CLaSp(skip=2, interval=1, draft_length=4, exit=FIXED),
    CLaSp(
        skip=4,
        unit="sublayer",
        interval=5,
        interval_unit="tokens",
        never_skip=(0,),
        draft_length=5,
        exit=make_exit("confidence", threshold=0.3),
    ),
    ASD(
        threshold=0.9,
        every=2,
        keep_last=1,
        draft_length=4,
        exit=make_exit("adaptive", threshold=0.4),
    ),
    SWIFT(skip_ratio=0.5, window=4, bayes_interval=3, max_score=1.0, draft_length=4, exit=FIXED),
    SWIFT(
        skip_ratio=0.5,
        window=4,
        bayes_interval=3,
        max_score=1.0,
        faithful=True,
        draft_length=4,
        exit=make_exit("confidence", threshold=0.2),
        tree=SiblingSchedule(thresholds=(0.9, 0.4), widths=(1, 3, 4)),
    ),
)


class Noted(DynamicMaskDrafter):
    """A drafter that keeps its sessions for a test."""

    def __init__(self, inner: Any):
        self.inner, self.sessions = inner, list[DynamicMaskSession]()

    def new_session(self) -> Any:
        self.sessions.append(self.inner.new_session())
        return self.sessions[-1]


def noted(model: ModelAdapter, recipe: Recipe, exact: bool = False) -> tuple[Decoder, list[Noted]]:
    """Return a decoder and its drafters that choose masks."""
    found: list[Noted] = []

    def around(drafter: Any) -> Any:
        if not drafter.new_session().selects_mask:
            return drafter
        found.append(Noted(drafter))
        return found[-1]

    return wrap_drafters(Decoder(model, recipe, exact=exact), around), found


def check_choosing(
    specs: Sequence[DrafterSpec] = CHOOSING,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n: int = 28,
    world: Any = None,
) -> DecodeStats:
    """Check that greedy text is the full model's own, alone and after lookup, for all masks."""
    model, full = world or tiny_model_and_reference()
    total = DecodeStats()
    for spec in specs:
        for recipe in (Recipe((spec,)), Recipe((Lookup(min_match=2, draft_length=3), spec))):
            decoder = Decoder(model, recipe)
            for prompt in prompts:
                result = decoder.generate(prompt, n)
                assert result.tokens == full.greedy(prompt, n), (spec, prompt)
                total += result.stats
    return total


def kept_states(model: ModelAdapter, text: Sequence[int], at: int) -> torch.Tensor:
    """Return the full model's states [L + 1, H] at one position of a text."""
    cache, planner = model.new_cache(1, 128), Planner(128, model.spec.device)
    states: list[torch.Tensor] = []
    tokens = torch.tensor([list(text)], device=model.spec.device)
    forward(
        model,
        tokens,
        cache,
        planner.plan_chain(0, len(text)),
        tap=lambda i, h: states.append(h[0, at]),
    )
    return torch.stack(states)


@torch.no_grad()
def planned_by_hand(model: ModelAdapter, text: Sequence[int], at: int, skip: int) -> SkipMask:
    """Return CLaSp's mask of whole layers for the token at this position, by equation 2.

    It computes one state and one row at a time. A row is a new pass over the text before the token,
    with the layer run on the state at the position of the token.
    """
    states, n = kept_states(model, text, at), model.spec.n_layers
    planner = Planner(128, model.spec.device)

    def run(layer: int, g: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache(1, 128)
        if at:
            before, plan = (
                torch.tensor([list(text[:at])], device=model.spec.device),
                planner.plan_chain(0, at),
            )
            run_layers(model, model.embed(before, plan.positions), cache, plan)
        return model.block(layer, g[None, None], cache, planner.plan_chain(at, 1))[0, 0]

    best: dict[tuple[int, int], tuple[torch.Tensor, tuple[int, ...]]] = {(0, 0): (states[0], ())}
    for i in range(1, n + 1):
        for j in range(min(i, skip) + 1):
            ways = []
            if (i - 1, j - 1) in best:
                g, path = best[i - 1, j - 1]
                ways.append((float(cosine_similarity(g, states[i], dim=0)), 1, g, (*path, i - 1)))
            if (i - 1, j) in best:
                g, path = best[i - 1, j]
                ran = states[i] if j == 0 else run(i - 1, g)
                ways.append((float(cosine_similarity(ran, states[i], dim=0)), 0, ran, path))
            if ways:
                _, _, g, path = max(ways, key=lambda way: way[:2])
                best[i, j] = g, path
    return SkipMask.from_layers(n, best[n, skip][1])


def check_clasp() -> None:
    """Check that every plan is that of the program, at the last verified token, and on time."""
    model, full = tiny_model_and_reference()
    often, seldom = (
        CLaSp(skip=2, interval=interval, draft_length=3, exit=FIXED) for interval in (1, 3)
    )
    cases = [
        (Recipe((often,)), often, PROMPTS[2], 30),
        (Recipe((often,)), often, PROMPTS[0], 60),
        (Recipe((Lookup(min_match=1, draft_length=2), seldom)), seldom, PROMPTS[2], 30),
    ]
    for recipe, spec, prompt, n in cases:
        decoder, [drafter] = noted(model, recipe)
        lengths = [len(prompt)]
        tokens: list[int] = []
        for chunk in decoder.stream(prompt, n):
            tokens += chunk.tokens
            lengths.append(
                len(prompt) + len(tokens) - 1
            )  # committed, once the round of this chunk is over
        assert tokens == full.greedy(prompt, n)
        session = drafter.sessions[0]
        text = [*prompt, *tokens]
        in_force = planned_by_hand(model, text, len(prompt) - 1, spec.skip)
        assert session.mask_history[0] == (0, in_force)
        seen = dict(session.mask_history)
        for done in range(1, session.n_rounds):
            if done % spec.interval == 0:
                in_force = planned_by_hand(model, text, lengths[done + 1] - 1, spec.skip)
            assert seen.get(done, in_force) == in_force, done
            assert (done in seen) == (
                in_force
                != max(((r, m) for r, m in session.mask_history if r < done), key=lambda x: x[0])[1]
            ), done
        assert len(session.mask_history) > 2


def hooked_cosines(hf: Any, prompt: Sequence[int]) -> list[float]:
    """Return the cosine of each attention of a Hugging Face model over a prompt, by hooks."""
    cosines, residual, hooks = list[float](), list[torch.Tensor](), []

    def before(module: Any, inputs: Any, output: Any) -> None:
        residual.append(inputs[0])

    def behind(module: Any, inputs: Any, output: Any) -> None:
        h = residual.pop()
        cosines.append(float(cosine_similarity(h, h + output[0], dim=-1).mean()))

    for layer in hf.model.layers:
        hooks += [
            layer.input_layernorm.register_forward_hook(before),
            layer.self_attn.register_forward_hook(behind),
        ]
    hf(torch.tensor([list(prompt)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return cosines


def check_asd() -> None:
    """Check that cosines are those of Hugging Face's own modules over the prompt.

    The prompt is read in one pass or in several. The mask of a request depends on that request
    alone.
    """
    model, full = tiny_model_and_reference()
    spec = ASD(threshold=0.93, every=3, keep_last=1, draft_length=3, exit=FIXED)
    prompts, expected = (PROMPTS[2] * 2, PROMPTS[0]), []
    for prompt in prompts:
        cosines = hooked_cosines(full.hf, prompt)
        expected.append(
            SkipMask(LAYERS, *select_sublayers(cosines, spec.threshold, spec.every, spec.keep_last))
        )
        for exact in (False, True):
            decoder, [drafter] = noted(model, Recipe((spec,)), exact)
            decoder.generate(prompt, 6)
            sums = [s / len(prompt) for s in drafter.sessions[0].policy.cosine_sums]  # type: ignore[attr-defined]
            assert torch.allclose(
                torch.tensor(sums, dtype=torch.double),
                torch.tensor(cosines, dtype=torch.double),
                atol=1e-6,
            )
    assert expected[0] != expected[1]
    decoder, [drafter] = noted(model, Recipe((spec,)))
    streams = [decoder.stream(prompt, 8) for prompt in prompts]
    for _ in zip(*streams, strict=False):
        pass
    assert [session.mask_history for session in drafter.sessions] == [
        [(0, mask)] for mask in expected
    ], "one mask a request, of its prompt alone"


Judged = list[tuple[SkipMask, int, list[int]]]  # (mask, tokens that it named, all tokens so far)


def judged_masks(spec: SWIFT, way: str) -> tuple[Any, Judged]:
    """Return (drafter that searched during one request, masks that it judged in this way)."""
    model, full = tiny_model_and_reference()
    decoder, [drafter] = noted(model, Recipe((spec,)))
    judged: Judged = []
    policy = type(drafter.inner.new_session().policy)
    real = getattr(policy, way)

    def named(self: Any, ctx: Any, mask: SkipMask) -> int:
        found = real(self, ctx, mask)
        judged.append((mask, found, list(ctx.history)))
        return int(found)

    setattr(policy, way, named)
    try:
        result = decoder.generate(PROMPTS[2], 40)
    finally:
        setattr(policy, way, real)
    assert result.tokens == full.greedy(PROMPTS[2], 40)
    assert drafter.inner.search.n_trials > 5
    return drafter.inner, judged


@torch.no_grad()
def check_swift_as_published() -> None:
    """Check the published rule of SWIFT.

    The score of a mask is how many of the first generated tokens the thinned model predicts when it
    reads them after the full model's K/V of the prompt. The mask with the best share so far stays
    in use, and the first mask counts as 0.
    """
    model, prompt = tiny_model_and_reference()[0], PROMPTS[2]
    spec = SWIFT(
        skip_ratio=0.5,
        window=6,
        bayes_interval=4,
        max_score=1.0,
        tolerance=10_000,
        faithful=True,
        draft_length=3,
        exit=FIXED,
    )
    inner, judged = judged_masks(spec, "_score_first")
    best, in_force = 0, inner.search.mask
    for mask, found, history in judged:
        text = history[len(prompt) : len(prompt) + spec.window + 1]
        cache, planner = model.new_cache(1, 128), Planner(128, model.spec.device)
        forward(
            model,
            torch.tensor([list(prompt)], device=model.spec.device),
            cache,
            planner.plan_chain(0, len(prompt)),
        )
        logits = forward(
            model,
            torch.tensor([text[:-1]], device=model.spec.device),
            cache,
            planner.plan_chain(len(prompt), spec.window),
            mask,
        )
        assert found == int(
            (logits[0].argmax(-1) == torch.tensor(text[1:], device=model.spec.device)).sum()
        )
        if found > best:
            best, in_force = found, mask
    assert (inner.search.mask, inner.search.score) == (in_force, best / spec.window)
    assert len(judged) == inner.search.n_trials, "the mask at the start is not judged"
    points = [point for point, _ in inner.search.results]
    assert any(0 < x < 1 for point in points for x in point), (
        "the process proposes points between the masks"
    )
    assert all(len(point) == 2 * LAYERS for point in points)


@torch.no_grad()
def check_swift() -> None:
    """Check that the score of a mask is how many of the latest tokens its one-row drafts predict.

    A mask replaces another one only if its score is higher.
    """
    model, _ = tiny_model_and_reference()
    spec = SWIFT(
        skip_ratio=0.5,
        window=6,
        bayes_interval=4,
        max_score=1.0,
        tolerance=10_000,
        draft_length=3,
        exit=FIXED,
    )
    inner, judged = judged_masks(spec, "_score_recent")
    for mask, found, history in judged[:12]:
        alone = 0
        for place in range(len(history) - 1 - spec.window, len(history) - 1):
            cache, planner = model.new_cache(1, 128), Planner(128, model.spec.device)
            forward(
                model,
                torch.tensor([history[:place]], device=model.spec.device),
                cache,
                planner.plan_chain(0, place),
            )
            logits = forward(
                model,
                torch.tensor([[history[place]]], device=model.spec.device),
                cache,
                planner.plan_chain(place, 1),
                mask,
            )
            alone += int(logits.argmax()) == history[place + 1]
        assert found == alone
    assert all(
        mask.n_skipped == inner.n_skipped
        and not mask.sublayers & {0, 1, 2 * LAYERS - 2, 2 * LAYERS - 1}
        for mask, _, _ in judged
    )
    assert inner.search.mask in {mask for mask, _, _ in judged}
