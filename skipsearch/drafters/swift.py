"""`swift`: a search for the mask goes on while requests are decoded, judged by how often a thinned pass names the tokens just written."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Drafter
from skipsearch.drafters.choosing import ChoosingDrafter
from skipsearch.drafters.skip import AnyExit
from skipsearch.errors import DecodeError
from skipsearch.fields import Fraction
from skipsearch.mask import SkipMask
from skipsearch.recipe import DrafterSpec

if TYPE_CHECKING:
    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Tap
    from skipsearch.models.spec import ModelAdapter

CANDIDATES = 256   # random masks of which the Gaussian process chooses one
KAPPA = 2.5        # of its upper confidence bound; the published value
NOISE = 1e-2       # variance of a score, in units of the variance of all
FITTED = 200       # latest trials that it learns from: its cost grows with their cube
Count = Annotated[int, Field(ge=1, le=100_000)]


class SWIFT(DrafterSpec):
    """Searches on the fly: every few rounds another mask with as many sub-layers skipped is tried on the latest `window` tokens of the
    text, in one pass, and takes over where it names more of them than the mask in force. The first and the last layer are always kept.

    What it learns lives on across the requests of a decoder: greedy text stays the same, a sample may become another one of the same
    distribution. Against the published code, both masks are judged on the same tokens, the mask at the start is judged too, and no tree is
    drafted. Source: SWIFT (Xia et al. 2025), section 4 and its code.
    """

    kind: Literal["swift"] = "swift"
    skip_ratio: Fraction = Field(default=0.45, description="share of the sub-layers between first and last layer to skip, 0..1")
    window: Count = Field(default=32, description="tokens that a mask is tried on")
    interval: Count = Field(default=1, description="rounds from one trial to the next")
    bayes_interval: Count = Field(default=25, description="every so many trials a Gaussian process proposes, at the others chance does")
    max_score: Fraction = Field(default=0.95, description="share of named tokens that ends the search, 0..1")
    tolerance: Count = Field(default=300, description="trials without a gain that end the search")
    most_trials: Count = Field(default=1000, description="trials that end the search")
    seed: Annotated[int, Field(ge=0, le=2**31)] = Field(default=0, description="of the masks that chance proposes")
    exit: AnyExit

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        return SWIFTDrafter(self, model)  # type: ignore[return-value]

    @property
    def scratch(self) -> int:
        return self.window

    def __str__(self) -> str:
        return f"swift skips {self.skip_ratio:.0%}, tries masks on {self.window} tokens, {self.exit}, up to {self.draft_length}"


@dataclass
class Stream:
    """What the search knows, over all requests. named, tried: of the mask in force, tokens that it named and was tried on.
    results: (bits, score) of every trial. rounds: over all requests."""

    mask: SkipMask
    named: int = 0
    tried: int = 0
    trials: int = 0
    without_gain: int = 0
    rounds: int = 0
    results: list[tuple[tuple[int, ...], float]] = field(default_factory=list)

    @property
    def score(self) -> float:
        return self.named / self.tried if self.tried else 0.0


class SWIFTDrafter(ChoosingDrafter):
    """stream: shared by its requests; one at a time changes it."""

    def __init__(self, spec: SWIFT, model: ModelAdapter):
        super().__init__(lambda: OnTheFly(self), spec.exit)
        self.spec, self.model, self.changing = spec, model, threading.Lock()
        n = model.spec.n_layers
        self.free = list(range(2, 2 * n - 2))                # sub-layers of the first and the last layer stay
        self.count = int(len(self.free) * spec.skip_ratio)
        odd = [s for s in self.free if s // 2 % 2]            # the published start: layers 1, 3, 5, …
        self.stream = Stream(SkipMask.from_sublayers(n, sorted(odd, key=lambda s: (-s % 2, s))[:self.count]))
        self._random = random.Random(spec.seed)

    @property
    def searching(self) -> bool:
        spec, stream = self.spec, self.stream
        return (bool(self.count) and stream.trials < spec.most_trials and stream.without_gain < spec.tolerance
                and stream.score <= spec.max_score)

    def proposal(self) -> SkipMask:
        """Every `bayes_interval`-th by a Gaussian process, the others by chance."""
        n, stream = self.model.spec.n_layers, self.stream
        if (stream.trials + 1) % self.spec.bayes_interval or len(stream.results) < 2:
            return SkipMask.from_sublayers(n, self._random.sample(self.free, self.count))
        import torch
        from botorch.models import SingleTaskGP

        masks = [SkipMask.from_sublayers(n, self._random.sample(self.free, self.count)) for _ in range(CANDIDATES)]
        known, scores = zip(*stream.results[-FITTED:], strict=True)
        named = torch.tensor(scores, dtype=torch.double)[:, None]
        if named.std() == 0:   # nothing to learn from
            return masks[0]
        named = (named - named.mean()) / named.std()
        with torch.random.fork_rng(devices=[]):   # a request's own random numbers stay its own
            process = SingleTaskGP(torch.tensor(known, dtype=torch.double), named, torch.full_like(named, NOISE), outcome_transform=None)
            posterior = process.posterior(torch.tensor([mask.bits for mask in masks], dtype=torch.double))
        bound = posterior.mean + KAPPA * posterior.variance.sqrt()
        return masks[int(bound.argmax())]

    def state(self) -> dict[str, Any]:
        """What the search knows, as plain data for JSON; `restore` goes on from it."""
        stream = self.stream
        return {"bits": list(stream.mask.bits), "named": stream.named, "tried": stream.tried, "trials": stream.trials,
                "without_gain": stream.without_gain, "rounds": stream.rounds, "results": [[list(b), s] for b, s in stream.results],
                "random": [list(part) if isinstance(part, tuple) else part for part in self._random.getstate()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises: DecodeError for what is no state of a model of this depth."""
        try:
            mask = SkipMask.from_bits(state["bits"])
            if mask.n_layers != self.model.spec.n_layers:
                raise ValueError(f"it is of a model with {mask.n_layers} layers, and this one has {self.model.spec.n_layers}")
            numbers = {name: int(state[name]) for name in ("named", "tried", "trials", "without_gain", "rounds")}
            stream = Stream(mask, **numbers, results=[(tuple(bits), float(score)) for bits, score in state["results"]])
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
            if drafter.searching and generated > spec.window + 1 and stream.rounds % spec.interval == 0:
                self._try(ctx)
            return stream.mask

    def _try(self, ctx: DecodeContext) -> None:
        drafter, stream, window = self.drafter, self.drafter.stream, self.drafter.spec.window
        if not stream.tried:
            stream.named, stream.tried = self._named(ctx, stream.mask), window
        mask = drafter.proposal()
        named = self._named(ctx, mask)
        stream.trials += 1
        stream.results.append((mask.bits, named / window))
        if named / window > stream.score:   # ahead of what the mask in force has shown so far: now both on the same tokens
            here = self._named(ctx, stream.mask)
            stream.named, stream.tried = stream.named + here, stream.tried + window
            if named > here:
                stream.mask, stream.named, stream.tried, stream.without_gain = mask, named, window, 0
                return
        stream.without_gain += 1

    def _named(self, ctx: DecodeContext, mask: SkipMask) -> int:
        """Of the latest tokens, how many the thinned model names, each behind the full model's own K/V; in one pass."""
        import torch

        from skipsearch.engine import forward

        window, device = self.drafter.spec.window, self.drafter.model.spec.device
        known = torch.tensor([ctx.history[-window - 1:]], device=device)
        last = len(ctx.history) - 1   # this one is only named
        places = torch.arange(last - window, last, device=device)[None]
        plan = ctx.planner.anchored(ctx.cache.length, places, places, torch.arange(window, device=device))
        logits = forward(self.drafter.model, known[:, :-1], ctx.cache, plan, mask)
        return int((logits.argmax(dim=-1) == known[:, 1:]).sum())
