"""Drafters that choose one mask for a request, as replay judges them: every prompt under a mask of its own.

`asd` is such a drafter, and so is `clasp` where it plans no second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from skipsearch.cache import Planner
from skipsearch.decoding.sampling import GreedyPicker
from skipsearch.drafters.base import DecodeContext
from skipsearch.drafters.choosing import MaskPolicy
from skipsearch.drafters.lookup import Lookup
from skipsearch.engine import forward, inference
from skipsearch.evaluation.lookups import Copied
from skipsearch.evaluation.objectives import LOOKUP_SKIP, Found, ReplayObjective
from skipsearch.evaluation.replay import Replay
from skipsearch.evaluation.rounds import Rounds, lay_out, without_passes
from skipsearch.evaluation.simulate import Prediction, simulate
from skipsearch.evaluation.sweep import every, sweep
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import DrafterSpec, Recipe
from skipsearch.stats import DecodeStats

Masks = Mapping[int, SkipMask]   # by the number of the prompt


@inference
def read_prompt(model: ModelAdapter, policy: MaskPolicy, prompt: Sequence[int]) -> SkipMask:
    """The mask that a policy chooses for a prompt, whose prefill it is shown."""
    import torch

    device = model.spec.device
    rows = torch.tensor([list(prompt)], device=device)
    # A plan of one token takes as many rows as there are sub-layers, at most.
    planner = Planner(len(prompt) + 2 * model.spec.n_layers, device)
    cache, plan = model.new_cache(1, planner.capacity), planner.chain(0, len(prompt))
    forward(model, rows, cache, plan, last_only=True, tap=policy.tap(model, cache, plan, len(prompt)))
    cache.length = len(prompt)
    return policy.first(DecodeContext(model, cache, planner, rows[:, -1:], list(prompt), len(prompt), GreedyPicker()))


class OneMaskEach:
    """Judges masks of which each prompt has its own, in the best recipe that replay finds for them all together.

    prompts: numbers of those that it judges on; by default all that have something to draft, at most `most` of them, spread evenly.
    """

    def __init__(self, objective: ReplayObjective, most: int):
        self.objective, self.replay = objective, objective.replay
        texts = [i for i, text in enumerate(self.replay.tokens) if len(text) > 1]
        self.prompts = texts[::-(-len(texts) // most)]
        self._alone: dict[int, Replay] = {}
        self._rounds: dict[tuple[int, SkipMask], Rounds] = {}

    def best(self, masks: Masks, spec: Callable[[DraftPolicy], DrafterSpec], shape: str, fine: bool = False) -> Found:
        """The best draft policy, and the best lookup before it where the shape has one, over the prompts of `masks`."""
        policies = every(self.objective.max_draft) if fine else self.objective.exploring
        before = self.objective.before(LOOKUP_SKIP if shape.startswith("lookup,") else "skip")
        totals = [(self.seconds(masks, policies, lookups), lookups) for lookups in (before if fine else before[:1])]
        seconds, lookups = min(totals, key=lambda pair: float(pair[0].min()))
        policy = policies[int(seconds.argmin())]
        return Found(Recipe((*lookups, spec(policy))), self._predicted(masks, policy, lookups))

    def seconds(self, masks: Masks, policies: Sequence[DraftPolicy], lookups: Sequence[Lookup]) -> np.ndarray:
        """Of all prompts together, by policy."""
        total = np.zeros(len(policies))
        for number, mask in masks.items():
            if mask.n_skipped:
                rounds = self._of(number, mask)
                total += sweep(rounds, mask, policies, self.objective.costs, self._copied(lookups, rounds))[:, 0]
            else:
                total += self._simulated(number, mask, policies[0], lookups).seconds.sum()
        return total

    def _predicted(self, masks: Masks, policy: DraftPolicy, lookups: Sequence[Lookup]) -> Prediction:
        parts = [self._simulated(number, mask, policy, lookups) for number, mask in masks.items()]
        stats = sum((part.stats for part in parts), DecodeStats())
        return Prediction(stats, np.concatenate([part.seconds for part in parts]), np.concatenate([part.tokens for part in parts]))

    def _simulated(self, number: int, mask: SkipMask, policy: DraftPolicy, lookups: Sequence[Lookup]) -> Prediction:
        """A mask that skips nothing drafts nothing."""
        rounds = self._of(number, mask)
        drafts = mask.n_skipped > 0
        return simulate(rounds, mask if drafts else None, policy if drafts else None, self.objective.costs, self._copied(lookups, rounds))

    def _copied(self, lookups: Sequence[Lookup], rounds: Rounds) -> list[Copied]:
        assert self.objective.lookups is not None or not lookups
        return [self.objective.lookups(spec, rounds.prompts) for spec in lookups] if self.objective.lookups else []

    def _of(self, number: int, mask: SkipMask) -> Rounds:
        if (number, mask) not in self._rounds:
            if mask.n_skipped:
                alone = self._alone.get(number) or self._alone.setdefault(number, self.replay.of(number))
                rounds = lay_out(alone(mask))
            else:
                rounds = without_passes([self.replay.tokens[number]], [self.replay.rooms[number]])
            self._rounds[number, mask] = replace(rounds, prompts=(number,))
        return self._rounds[number, mask]
