"""`swift`: a mask is searched while requests are decoded, judged by how often a thinned pass predicts the tokens just written."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from skipsearch.drafters.base import DecodeContext, Drafter
from skipsearch.drafters.choosing import ChoosingDrafter
from skipsearch.drafters.skip import AnyExit
from skipsearch.errors import DecodeError
from skipsearch.fields import Fraction, Layers, Part, broken_rule, is_none, left_out
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Tap
    from skipsearch.models.spec import ModelAdapter

CANDIDATES = 256   # random masks of which the Gaussian process chooses one
KAPPA = 2.5        # of its upper confidence bound; the published value
NOISE = 1e-2       # variance of a score, in units of the variance of all
FITTED = 200       # latest trials that it learns from: its cost grows with their cube
Count = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=16)]
Point = tuple[float, ...]


class Tree(Part):
    """How many candidates are verified at a drafted token, the token itself included, by its top probability: `widths[0]` where it is above
    `thresholds[0]`, else `widths[1]` where it is above `thresholds[1]`, and so on; the last of `widths` where it is above none.

    Published are thresholds 0.95, 0.8, 0.5 with widths 3, 5, 8, 10, or 1, 3, 5, 10 where sampling.
    """

    thresholds: Annotated[tuple[Fraction, ...], Field(strict=False, min_length=1, max_length=8)] = Field(
        description="top probabilities, descending, 0..1")
    widths: Annotated[tuple[Width, ...], Field(strict=False, max_length=9)] = Field(
        description="candidates, one number more than there are thresholds, 1..16 each")

    @model_validator(mode="after")
    def _as_many_as_it_takes(self) -> Tree:
        if len(self.widths) != len(self.thresholds) + 1:
            raise broken_rule("widths", f"it has one number more than thresholds, which has {len(self.thresholds)}")
        if list(self.thresholds) != sorted(set(self.thresholds), reverse=True):
            raise broken_rule("thresholds", "each is below the one before it")
        return self

    @property
    def most(self) -> int:
        return max(self.widths) - 1

    def beside(self, confidence: float) -> int:
        return self.widths[next((i for i, t in enumerate(self.thresholds) if confidence > t), -1)] - 1


class Warm(Part):
    """A mask to start from, such as one that an earlier search found."""

    attn: Layers = Field(description="layers whose attention is skipped, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP is skipped, 0..n_layers-1, ascending")


class SWIFT(DrafterSpec):
    """Searches on the fly: every few rounds another mask with as many sub-layers skipped is tried on the latest `window` tokens of the
    text, in one pass, and takes over where it names more of them than the mask in force. The first and the last layer are always kept.

    What it learns lives on across the requests of a decoder: greedy text stays the same, a sample may become another one of the same
    distribution. Both masks are judged on the same tokens, the latest ones, each behind the full model's own K/V, and the mask at the start
    is judged too. faithful: as published, a mask is judged on the first tokens that were generated, by one pass of the thinned model over
    them; it takes over where its share is above the best of any text so far, the mask at the start counting as 0; and the Gaussian process
    learns of points between 0 and 1 whose highest coordinates are skipped. What is published and not lossless is nowhere.
    Source: SWIFT (Xia et al. 2025), section 4 and its code.
    """

    kind: Literal["swift"] = "swift"
    about = About("SWIFT (Xia et al. 2025)", "a stream of requests, or long ones, over which it searches; no training",
                  "lookup before it; a tree of candidates")
    moves = True
    skip_ratio: Fraction = Field(default=0.45, description="share of the sub-layers between first and last layer to skip, 0..1")
    window: Count = Field(default=32, description="tokens that a mask is tried on")
    interval: Count = Field(default=1, description="rounds from one trial to the next")
    bayes_interval: Count = Field(default=25, description="every so many trials a Gaussian process proposes, at the others chance does")
    max_score: Fraction = Field(default=0.95, description="share of named tokens that ends the search, 0..1")
    tolerance: Count = Field(default=300, description="trials without a gain that end the search")
    most_trials: Count = Field(default=1000, description="trials that end the search")
    seed: Annotated[int, Field(ge=0, le=2**31)] = Field(default=0, description="of the masks that chance proposes")
    faithful: bool = Field(default=False, exclude_if=left_out, description="whether masks are judged as published; left out if not")
    tree: Tree | None = Field(default=None, exclude_if=is_none, description="candidates beside drafted tokens; left out: none")
    warm: Warm | None = Field(default=None, exclude_if=is_none, description="the mask to start from; left out: every second layer")
    exit: AnyExit

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        return SWIFTDrafter(self, model)  # type: ignore[return-value]

    @property
    def scratch(self) -> int:
        return max(self.window, self.draft_length * self.tree.most if self.tree else 0)

    def __str__(self) -> str:
        every = f" every {self.interval} rounds" if self.interval > 1 else ""
        tree = f", up to {self.tree.most + 1} candidates a token" if self.tree else ""
        return (f"swift{' as published' if self.faithful else ''} skips {self.skip_ratio:.0%}, tries masks on {self.window} tokens{every}, "
                f"{self.exit}, up to {self.draft_length}{tree}")


@dataclass
class Stream:
    """What the search knows, over all requests. named, tried: of the mask in force, tokens that it named and was tried on.
    results: (point, score) of every trial; a point is what the Gaussian process learns of a mask. rounds: over all requests."""

    mask: SkipMask
    named: int = 0
    tried: int = 0
    trials: int = 0
    without_gain: int = 0
    rounds: int = 0
    results: list[tuple[Point, float]] = field(default_factory=list)

    @property
    def score(self) -> float:
        return self.named / self.tried if self.tried else 0.0


class SWIFTDrafter(ChoosingDrafter):
    """stream: shared by its requests; one at a time changes it."""

    def __init__(self, spec: SWIFT, model: ModelAdapter):
        super().__init__(lambda: OnTheFly(self), spec.exit, spec.tree)
        self.spec, self.model, self.changing = spec, model, threading.Lock()
        n = model.spec.n_layers
        self.free = list(range(2, 2 * n - 2))                # sub-layers of the first and the last layer stay
        self.count = int(len(self.free) * spec.skip_ratio)
        odd = [s for s in self.free if s // 2 % 2]            # the published start: layers 1, 3, 5, …
        start = SkipMask.from_sublayers(n, sorted(odd, key=lambda s: (-s % 2, s))[:self.count])
        self.stream = Stream(start if spec.warm is None else SkipMask(n, spec.warm.attn, spec.warm.mlp))
        self._random = random.Random(spec.seed)

    @property
    def learning(self) -> bool:
        spec, stream = self.spec, self.stream
        return (bool(self.count) and stream.trials < spec.most_trials and stream.without_gain < spec.tolerance
                and stream.score <= spec.max_score)

    def proposal(self) -> tuple[SkipMask, Point]:
        """(a mask, what the Gaussian process learns of it). Every `bayes_interval`-th it proposes, the others chance does."""
        stream = self.stream
        if (stream.trials + 1) % self.spec.bayes_interval or len(stream.results) < 2:
            return self._by_chance()
        import torch
        from botorch.models import SingleTaskGP

        options = [self._anywhere() if self.spec.faithful else self._by_chance() for _ in range(CANDIDATES)]
        known, scores = zip(*stream.results[-FITTED:], strict=True)
        named = torch.tensor(scores, dtype=torch.double)[:, None]
        if named.std() == 0:   # nothing to learn from
            return options[0]
        named = (named - named.mean()) / named.std()
        with torch.random.fork_rng(devices=[]):   # a request's own random numbers stay its own
            process = SingleTaskGP(torch.tensor(known, dtype=torch.double), named, torch.full_like(named, NOISE), outcome_transform=None)
            posterior = process.posterior(torch.tensor([point for _, point in options], dtype=torch.double))
        bound = posterior.mean + KAPPA * posterior.variance.sqrt()
        return options[int(bound.argmax())]

    def _by_chance(self) -> tuple[SkipMask, Point]:
        mask = SkipMask.from_sublayers(self.model.spec.n_layers, self._random.sample(self.free, self.count))
        return mask, mask.bits

    def _anywhere(self) -> tuple[SkipMask, Point]:
        """A point between the masks; its highest coordinates are skipped."""
        n = self.model.spec.n_layers
        point = tuple(self._random.random() if s in self.free else 0.0 for s in range(2 * n))
        return SkipMask.from_sublayers(n, sorted(self.free, key=lambda s: -point[s])[:self.count]), point

    def state(self) -> dict[str, Any]:
        """What the search knows, as plain data for JSON; `restore` goes on from it."""
        stream = self.stream
        return {"bits": list(stream.mask.bits), "named": stream.named, "tried": stream.tried, "trials": stream.trials,
                "without_gain": stream.without_gain, "rounds": stream.rounds,
                "results": [[list(point), score] for point, score in stream.results],
                "random": [list(part) if isinstance(part, tuple) else part for part in self._random.getstate()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises: DecodeError for what is no state of a model of this depth."""
        try:
            mask = SkipMask.from_bits(state["bits"])
            if mask.n_layers != self.model.spec.n_layers:
                raise ValueError(f"it is of a model with {mask.n_layers} layers, and this one has {self.model.spec.n_layers}")
            numbers = {name: int(state[name]) for name in ("named", "tried", "trials", "without_gain", "rounds")}
            stream = Stream(mask, **numbers, results=[(tuple(map(float, point)), float(score)) for point, score in state["results"]])
            version, internal, gauss = state["random"]
            self._random.setstate((version, tuple(internal), gauss))
            self.stream = stream
        except (KeyError, TypeError, ValueError) as error:
            raise DecodeError(f"this is no state of a swift drafter ({error}): give what `state` returned") from None


class OnTheFly:
    """One request's part in the search."""

    def __init__(self, drafter: SWIFTDrafter):
        self.drafter = drafter

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        return None

    def first(self, ctx: DecodeContext) -> SkipMask:
        return self.drafter.stream.mask

    def next(self, ctx: DecodeContext, path: Sequence[int]) -> SkipMask | None:
        drafter, spec = self.drafter, self.drafter.spec
        with drafter.changing:
            stream = drafter.stream
            stream.rounds += 1
            generated = len(ctx.history) - ctx.prompt   # before this round
            if drafter.learning and generated > spec.window + 1 and stream.rounds % spec.interval == 0:
                self._try(ctx)
            return stream.mask

    def _try(self, ctx: DecodeContext) -> None:
        drafter, stream, window = self.drafter, self.drafter.stream, self.drafter.spec.window
        judge = self._named_at_the_start if drafter.spec.faithful else self._named
        if not stream.tried and not drafter.spec.faithful:
            stream.named, stream.tried = judge(ctx, stream.mask), window
        mask, point = drafter.proposal()
        named = judge(ctx, mask)
        stream.trials += 1
        stream.results.append((point, named / window))
        if named / window > stream.score:   # ahead of what the mask in force has shown so far
            here = 0
            if not drafter.spec.faithful:   # now both on the same tokens
                here = judge(ctx, stream.mask)
                stream.named, stream.tried = stream.named + here, stream.tried + window
            if named > here:
                stream.mask, stream.named, stream.tried, stream.without_gain = mask, named, window, 0
                return
        stream.without_gain += 1

    def _named(self, ctx: DecodeContext, mask: SkipMask) -> int:
        """Of the latest tokens, how many the thinned model names, each behind the full model's own K/V; in one pass."""
        import torch

        window = self.drafter.spec.window
        last = len(ctx.history) - 1   # this one is only named
        places = torch.arange(last - window, last)
        return self._judged(ctx, mask, last - window, places, torch.arange(window))

    def _named_at_the_start(self, ctx: DecodeContext, mask: SkipMask) -> int:
        """Of the first tokens behind the prompt's K/V, how many the thinned model names when it reads them in one pass."""
        import torch

        window = self.drafter.spec.window
        return self._judged(ctx, mask, ctx.prompt, torch.full((window,), ctx.prompt), torch.zeros(window, dtype=torch.long))

    def _judged(self, ctx: DecodeContext, mask: SkipMask, start: int, anchors: Tensor, groups: Tensor) -> int:
        """The tokens from `start` on, `window` of them."""
        import torch

        from skipsearch.engine import forward

        window, device = self.drafter.spec.window, self.drafter.model.spec.device
        known = torch.tensor([ctx.history[start:start + window + 1]], device=device)
        places = torch.arange(start, start + window, device=device)[None]
        plan = ctx.planner.anchored(ctx.cache.length, places, anchors.to(device)[None], groups.to(device))
        logits = forward(self.drafter.model, known[:, :-1], ctx.cache, plan, mask)
        return int((logits.argmax(dim=-1) == known[:, 1:]).sum())
