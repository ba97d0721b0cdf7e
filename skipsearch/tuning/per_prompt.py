"""Predict recipes whose drafter chooses one mask per prompt.

`asd` is such a drafter, and so is `clasp` if it plans only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.drafters.base import DecodeContext
from skipsearch.drafters.dynamic_mask import MaskPolicy
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.engine import forward, no_grad
from skipsearch.engine.sampler import GreedySampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import RoundTable, rounds_from_replay, rounds_without_model
from skipsearch.replay.simulate import Prediction
from skipsearch.replay.sweep import fine_policies, sweep
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import RecipeShape

MaskByPrompt = Mapping[int, SkipMask]  # by prompt index


@no_grad
def mask_from_prefill(
    model: ModelAdapter, policy: MaskPolicy, prompt_ids: Sequence[int]
) -> SkipMask:
    """Return the mask that a policy chooses after it observed the prefill of a prompt."""
    import torch

    device = model.spec.device
    rows = torch.tensor([list(prompt_ids)], device=device)
    # The policy may plan with passes of up to one token per sub-layer.
    planner = Planner(len(prompt_ids) + 2 * model.spec.n_layers, device)
    cache, plan = model.new_cache(1, planner.capacity), planner.plan_chain(0, len(prompt_ids))
    forward(
        model,
        rows,
        cache,
        plan,
        last_only=True,
        tap=policy.tap(model, cache, plan, len(prompt_ids)),
    )
    cache.length = len(prompt_ids)
    return policy.initial_mask(
        DecodeContext(
            model, cache, planner, rows[:, -1:], list(prompt_ids), len(prompt_ids), GreedySampler()
        )
    )


class PerPromptObjective:
    """An objective that predicts the best recipe if each prompt has a mask of its own.

    At most `max_prompts` prompts are used. They are evenly spaced, and each has at least two
    generated tokens.
    """

    def __init__(self, objective: ReplayObjective, max_prompts: int):
        self.objective, self.replay = objective, objective.replay
        indices = [i for i, text in enumerate(self.replay.continuations) if len(text) > 1]
        self.prompt_indices = indices[:: -(-len(indices) // max_prompts)]
        self._single_replays: dict[int, Replay] = {}
        self._rounds: dict[tuple[int, SkipMask], RoundTable] = {}

    def best_recipe(
        self,
        masks: MaskByPrompt,
        make_spec: Callable[[DraftPolicy], DrafterSpec],
        shape: RecipeShape,
        fine: bool = False,
    ) -> Candidate:
        """Return the recipe with the best draft policy and, if the shape has one, the best lookup.

        masks: the mask of each prompt. fine: try all settings, not only those of a search.
        """
        options = self.objective.list_lookups(shape.after_lookup)
        policies = self.objective.coarse_policies
        if fine:
            policies = fine_policies(self.objective.max_draft)
        else:
            options = options[:1]
        seconds, lookups = min(
            ((self.predict_seconds(masks, policies, lookups), lookups) for lookups in options),
            key=lambda pair: float(pair[0].min()),
        )
        policy = policies[int(seconds.argmin())]
        return Candidate.from_prediction(
            Recipe((*lookups, make_spec(policy))),
            self._predict(masks, policy, lookups),
            self.objective.plain_pass_s,
        )

    def predict_seconds(
        self, masks: MaskByPrompt, policies: Sequence[DraftPolicy], lookups: Sequence[Lookup]
    ) -> np.ndarray:
        """Return the predicted seconds of each policy on all prompts together, [policies]."""
        total = np.zeros(len(policies))
        for prompt_index, mask in masks.items():
            if mask.n_skipped:
                rounds = self._rounds_of_prompt(prompt_index, mask)
                proposals = self.objective.propose_lookups(lookups, rounds)
                total += sweep(rounds, mask, policies, self.objective.costs, proposals)[:, 0]
            else:
                prediction = self._simulate_prompt(prompt_index, mask, policies[0], lookups)
                total += prediction.seconds.sum()
        return total

    def _predict(
        self, masks: MaskByPrompt, policy: DraftPolicy, lookups: Sequence[Lookup]
    ) -> Prediction:
        parts = [
            self._simulate_prompt(prompt_index, mask, policy, lookups)
            for prompt_index, mask in masks.items()
        ]
        return Prediction(
            sum((part.stats for part in parts), DecodeStats()),
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.tokens for part in parts]),
        )

    def _simulate_prompt(
        self, prompt_index: int, mask: SkipMask, policy: DraftPolicy, lookups: Sequence[Lookup]
    ) -> Prediction:
        """Predict one prompt. A mask that skips nothing drafts nothing."""
        rounds = self._rounds_of_prompt(prompt_index, mask)
        drafts = mask.n_skipped > 0
        return self.objective.simulate_recipe(
            rounds,
            mask if drafts else None,
            policy if drafts else None,
            self.objective.costs,
            self.objective.propose_lookups(lookups, rounds),
        )

    def _rounds_of_prompt(self, prompt_index: int, mask: SkipMask) -> RoundTable:
        if (prompt_index, mask) not in self._rounds:
            if mask.n_skipped:
                if prompt_index not in self._single_replays:
                    self._single_replays[prompt_index] = self.replay.single_prompt(prompt_index)
                rounds = rounds_from_replay(self._single_replays[prompt_index](mask))
            else:
                counts = self.replay.batches.experts_read.get(prompt_index)
                rounds = rounds_without_model(
                    [self.replay.continuations[prompt_index]],
                    [self.replay.token_budgets[prompt_index]],
                    None if counts is None else {0: counts},
                )
            self._rounds[prompt_index, mask] = replace(rounds, prompt_indices=(prompt_index,))
        return self._rounds[prompt_index, mask]
