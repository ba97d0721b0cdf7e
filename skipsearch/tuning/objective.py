"""Predict the decode time of the best recipe with a mask, a lookup or a trained draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

import numpy as np

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, Reading
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.core.stats import Trial
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.forced_replay import ForcedReplay
from skipsearch.replay.lookup_replay import LookupProposals, LookupReplay, lookup_grid
from skipsearch.replay.replay import PromptReplay, Replay
from skipsearch.replay.rounds import RoundTable, rounds_from_replay, rounds_without_model
from skipsearch.replay.simulate import Prediction, simulate
from skipsearch.replay.sweep import (
    coarse_policies,
    fine_policies,
    is_memoryless,
    sibling_grid,
    sweep,
    sweep_lookups,
)
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.recipe_shape import LOOKUP_SKIP, SKIP, RecipeShape

MAX_DRAFT = 12  # Draft & Verify's K
RUNG_STRIDES = (
    12,
    6,
    3,
)  # a rung replays every twelfth batch of continuations, then every sixth, …
MAX_SEARCH_POSITIONS = 512  # of more text, a search uses the third that the rungs take
MIN_RUNG_PROMPTS = 4  # a sample of fewer prompts says too little
MAX_LOOKUPS = 6  # settings of lookup tried before a skip drafter, each also with a match of 1 token
MIN_MASK_GAIN = 1.02  # if no mask can gain more, none is searched
MAX_KEPT_ROUNDS = 16  # masks whose round tables are kept, about 1 MB each
MIN_SIBLING_GAIN = 1.01  # a smaller gain from siblings is within the noise
POLICIES_WITH_SIBLINGS = 8  # draft policies of a mask that are tried with siblings
# A mask is dropped if it is slower than the best one by more standard errors than this. A mask that
# is as fast as the best one is dropped at a rung with a probability of one in six.
DROP_SIGMAS = 1.0


class Objective(Protocol):
    """An objective: it judges each mask that a searcher proposes.

    An objective that prefers to skip exactly half of the sub-layers would be

        class Half:
            fidelity = "belief"

            def judge(self, mask: SkipMask) -> Trial:
                return Trial(mask, seconds_per_token=1 + abs(mask.n_skipped - mask.n_layers),
                fidelity=self.fidelity)

    `ReplayObjective` predicts, `WallObjective` measures.
    """

    fidelity: str  # stored in its trials

    def judge(self, mask: SkipMask) -> Trial:
        """Return the trial of a mask. It names the recipe with which the mask was judged."""


@dataclass(frozen=True)
class Bound:
    """The seconds per token that no mask can beat, and those of the best recipe without a mask."""

    least_s: float
    known_s: float

    @property
    def allows_gain(self) -> bool:
        """Whether some mask may be faster than what is known already."""
        return self.least_s < self.known_s / MIN_MASK_GAIN


def make_skip_spec(mask: SkipMask, policy: DraftPolicy, reading: Reading = READ_ALL) -> Skip:
    """Return the skip drafter of a mask and a draft policy. reading: what its passes read."""
    return Skip.from_mask(mask, policy.draft_length, policy.exit, policy.siblings, reading)


class ReplayObjective:
    """An objective that predicts seconds per token, from one replay and the latency table.

    If recipes may be `lookup,skip`, and lookup alone pays or recipes must not be `skip`, masks are
    judged after lookup: at the positions where lookup proposes nothing. Otherwise, masks are judged
    at all positions.

    A mask is first judged on a sample of the prompts. If it is slower than the best mask so far,
    prompt by prompt, by more than chance explains, it is dropped. Its time on all prompts is then
    extrapolated from the sample: it is multiplied by the best mask's time on all prompts over the
    best mask's time on the sample. There are three samples (rungs), each part of the next: a
    twelfth of the prompts (if that is at least 4), a sixth and a third. A search uses no more than
    these, unless the text is short. Source: successive
    rejection by paired differences, as in F-Race (Birattari et al. 2002).
    """

    fidelity = "replay"

    def __init__(
        self,
        replay: Replay,
        costs: Costs,
        shapes: Sequence[str] = ("skip",),
        reading: Reading = READ_ALL,
        forced: ForcedReplay | None = None,
        make_spec: Callable[[SkipMask, DraftPolicy, Reading], DrafterSpec] = make_skip_spec,
    ):
        """Make an objective.

        reading: what a draft pass reads. `replay` and `costs` are those of such drafts. forced: the
        tokens that a constraint forces, which are drafted before every recipe. make_spec: makes the
        drafter that has the mask. In `shapes`, `skip` stands for this drafter.
        """
        self.forced, self.make_spec = forced, make_spec
        self.replay, self.costs, self.reading = replay, costs, reading
        self.shapes = tuple(map(RecipeShape.parse, shapes))  # allowed shapes of a recipe
        self.max_draft = len(costs.verify) - 1
        self.coarse_policies = coarse_policies(self.max_draft)
        rungs = _split_rungs([len(indices) for indices in replay.batches.prompt_indices])
        n_positions = sum(segment.end - segment.first for segment in replay.segments)
        # The best masks are judged on all of a long text at the end alone (`best_recipe`).
        self._rungs = rungs[:-1] if len(rungs) > 1 and n_positions > MAX_SEARCH_POSITIONS else rungs
        # Predictions of the best mask so far: on the prompts of the first rung, of the first two
        # rungs, …, of all. Objectives of one search share the list.
        self._leader: list[Prediction] = []
        self._rounds: dict[SkipMask, RoundTable] = {}  # of the masks replayed last on all segments
        self.lookup_replay = (
            LookupReplay(replay.prompt_ids, replay.continuations)
            if any(shape.kind == "lookup" or shape.after_lookup for shape in self.shapes)
            else None
        )
        self.ranked_lookups = self._rank_lookups()

    def fresh_copy(self) -> ReplayObjective:
        """Return a copy for another search, without a best mask so far."""
        return ReplayObjective(
            self.replay,
            self.costs,
            list(map(str, self.shapes)),
            self.reading,
            self.forced,
            self.make_spec,
        )

    def with_reading(
        self, reading: Reading, drafting_model: ModelAdapter | None, costs: Costs
    ) -> ReplayObjective:
        """Return an objective for drafts that read something else.

        drafting_model: the model that drafts, with its whole head; None: the verifying model.
        costs: of such drafts.
        """
        objective = copy(self)
        objective.replay = self.replay.with_draft(drafting_model, reading.vocabulary)
        objective.costs, objective.reading = costs, reading
        objective._leader, objective._rounds = [], {}
        return objective

    def share_leader(self, other: ReplayObjective) -> None:
        """Compare masks with the best one that either objective has judged.

        other: an objective for other drafts of the same texts.
        """
        self._leader = other._leader

    @property
    def plain_pass_s(self) -> float:
        """Seconds of a plain pass."""
        return self.costs.verify[0]

    @property
    def lookup_pays(self) -> bool:
        """Whether lookup alone is predicted to beat plain decoding."""
        return bool(self.ranked_lookups) and self.ranked_lookups[0][1] < self.plain_pass_s

    @property
    def searched_shape(self) -> RecipeShape:
        """The shape of the recipes with which masks are judged."""
        after_lookup = LOOKUP_SKIP in self.shapes and (self.lookup_pays or SKIP not in self.shapes)
        return LOOKUP_SKIP if after_lookup else SKIP

    def judge(self, mask: SkipMask, others: Sequence[ReplayObjective] = ()) -> Trial:
        """Return the trial of a mask, predicted on growing samples of the prompts.

        others: objectives for drafts of the same model with other vocabularies. The same passes
        judge all of them, and the trial is that of the fastest.
        """
        objectives = [self, *others]
        replayed: list[list[PromptReplay]] = [[] for _ in objectives]
        predictions: list[Prediction] = []
        for rung in self._rungs:
            for of_one, added in zip(replayed, self._replay(mask, objectives, rung), strict=True):
                of_one += added
            candidates = [
                one.predict_coarse(rounds_from_replay(of_one), mask)
                for one, of_one in zip(objectives, replayed, strict=True)
            ]
            i = min(range(len(candidates)), key=lambda k: candidates[k].seconds_per_token)
            fastest, candidate = objectives[i], candidates[i]
            assert candidate.prediction is not None
            prediction = candidate.prediction
            predictions.append(prediction)
            if self._leader and len(predictions) < len(self._rungs):
                leader = self._leader[len(predictions) - 1]
                lag_s = prediction.seconds - leader.seconds  # [prompts so far]
                if lag_s.sum() > DROP_SIGMAS * lag_s.std() * sqrt(len(lag_s)):
                    scale = self._leader[-1].seconds_per_token / leader.seconds_per_token
                    return fastest._make_trial(mask, candidate.recipe, prediction, scale)
        if sum(map(len, self._rungs)) == len(self.replay.batches):
            # In the order of the segments, as everywhere but between rungs.
            in_order = sorted(replayed[i], key=lambda r: r.prompt_index)
            fastest._keep_rounds(mask, rounds_from_replay(in_order))
        if not self._leader or prediction.seconds_per_token < self._leader[-1].seconds_per_token:
            self._leader[:] = predictions
        return fastest._make_trial(mask, candidate.recipe, prediction)

    def _replay(
        self, mask: SkipMask, objectives: Sequence[ReplayObjective], batch_indices: Sequence[int]
    ) -> list[list[PromptReplay]]:
        """Judge a mask with the vocabulary of each objective, from the same passes."""
        return self.replay.judge(
            mask,
            [one.replay.vocabulary for one in objectives],
            batch_indices=batch_indices,
            drafting_model=self.replay.drafting_model,
        )

    def _keep_rounds(self, mask: SkipMask, rounds: RoundTable) -> None:
        """Keep the round table of a mask on all segments: the best masks are asked for again."""
        while len(self._rounds) >= MAX_KEPT_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        self._rounds[mask] = rounds

    def predict_sample_s(self, mask: SkipMask, others: Sequence[ReplayObjective] = ()) -> float:
        """Predict the seconds per token of a mask on the smallest sample of the prompts.

        others: as in `judge`.
        """
        objectives = [self, *others]
        replayed = self._replay(mask, objectives, self._rungs[0])
        return min(
            one.predict_coarse(rounds_from_replay(of_one), mask).seconds_per_token
            for one, of_one in zip(objectives, replayed, strict=True)
        )

    def predict_bound(self, mask: SkipMask) -> Bound:
        """Return what no mask can beat, on the smallest sample of the prompts.

        mask: skips all that may be skipped. The bound is the time of a draft that costs as much as
        with this mask, and is accepted as often as a draft that skips nothing.
        """
        nothing = SkipMask(mask.n_layers)
        rounds = rounds_from_replay(self.replay(nothing, batch_indices=self._rungs[0]))
        lookups = self.list_lookups(self.searched_shape.after_lookup)[0]
        known_s = [self.plain_pass_s, self.predict_coarse(rounds, nothing).seconds_per_token]
        if lookups:
            proposals = self.propose_lookups(lookups, rounds)
            by_lookup = self.simulate_recipe(rounds, None, None, self.costs, proposals)
            known_s.append(by_lookup.seconds_per_token)
        return Bound(self.predict_coarse(rounds, mask).seconds_per_token, min(known_s))

    def _make_trial(
        self, mask: SkipMask, recipe: Recipe, prediction: Prediction, scale: float = 1.0
    ) -> Trial:
        """Return a trial from a prediction.

        scale: seconds per token on all prompts over those on the replayed prompts.
        """
        return Trial(
            mask,
            scale * prediction.seconds_per_token,
            scale * prediction.stderr,
            "replay",
            prediction.stats.by_drafter[-1].alpha,
            prediction.stats.tau,
            self.costs.draft_step_seconds(mask) / self.plain_pass_s,
            baseline_seconds_per_token=self.plain_pass_s,
            recipe=recipe,
        )

    def best_recipe(
        self,
        mask: SkipMask,
        after_lookup: bool | None = None,
        fine: bool = False,
        siblings: bool = True,
    ) -> Candidate:
        """Return the best recipe with this mask.

        after_lookup: whether lookup comes first; None: as in the searched shape.
        fine: try all settings, not only those of the mask search. siblings: if `fine`, try
        siblings, too.
        """
        if mask not in self._rounds:
            self._keep_rounds(mask, rounds_from_replay(self.replay(mask)))
        rounds = self._rounds[mask]
        if after_lookup is None:
            after_lookup = self.searched_shape.after_lookup
        options = self.list_lookups(after_lookup)
        if not fine:
            return self.predict_best(rounds, mask, self.coarse_policies, options[:1])
        coarse = self.predict_best(rounds, mask, self.coarse_policies, options).recipe
        return self.predict_best(
            rounds, mask, fine_policies(self.max_draft), [lookups_of(coarse)], siblings=siblings
        )

    def predict_coarse(self, rounds: RoundTable, mask: SkipMask) -> Candidate:
        """Return the best recipe with this mask among the settings of the mask search.

        rounds: from the replay of some prompts with this mask.
        """
        lookups = self.list_lookups(self.searched_shape.after_lookup)[:1]
        return self.predict_best(rounds, mask, self.coarse_policies, lookups)

    def best_lookup(self) -> Candidate:
        """Return the best recipe of lookup alone, if a shape has lookup."""
        return self.predict_lookup(self.ranked_lookups[0][0])

    def predict_lookup(self, spec: Lookup) -> Candidate:
        """Predict the recipe that has this lookup alone."""
        assert self.lookup_replay is not None
        rounds = self._rounds_without_model()
        prediction = self.simulate_recipe(
            rounds, None, None, self.costs, self.propose_lookups((spec,), rounds)
        )
        return Candidate.from_prediction(Recipe((spec,)), prediction, self.plain_pass_s)

    def simulate_recipe(
        self,
        rounds: RoundTable,
        mask: SkipMask | None,
        policy: DraftPolicy | None,
        costs: Costs,
        proposals: Sequence[LookupProposals],
    ) -> Prediction:
        """Predict a recipe. Its counters have no entry for forced tokens."""
        prediction = simulate(rounds, mask, policy, costs, proposals)
        segments = self.replay.segments
        prediction = replace(
            prediction, prompt_indices=tuple(segments[i].text for i in rounds.prompt_indices)
        )
        if self.forced is not None:
            del prediction.stats.by_drafter[0]
        return prediction

    def _rounds_without_model(self) -> RoundTable:
        """Return the round table of recipes of lookup alone."""
        replay = self.replay
        return rounds_without_model(replay.continuations, replay.token_budgets)

    def _rank_lookups(self) -> list[tuple[Lookup, float]]:
        """Return (setting, seconds per token) of each recipe of lookup alone, best first."""
        if self.lookup_replay is None:
            return []
        rounds = self._rounds_without_model()
        options = lookup_grid(self.max_draft)
        proposals = [self.propose_lookups((spec,), rounds) for spec in options]
        seconds = sweep_lookups(rounds, proposals, self.costs).sum(axis=1)
        return sorted(
            zip(options, (seconds / rounds.n_positions.sum()).tolist(), strict=True),
            key=lambda pair: pair[1],
        )

    def list_lookups(self, after_lookup: bool) -> list[tuple[Lookup, ...]]:
        """Return the lookups to try before another drafter.

        These are the best settings, best first, then the same settings with `min_match=1`.
        after_lookup: False: return `[()]`, no lookup.
        """
        if not after_lookup:
            return [()]
        best = [spec for spec, _ in self.ranked_lookups[:MAX_LOOKUPS]]
        eager = [spec.model_copy(update={"min_match": 1}) for spec in best]
        return [(spec,) for spec in dict.fromkeys([*best, *eager])]

    def propose_lookups(
        self, lookups: Sequence[Lookup], rounds: RoundTable
    ) -> list[LookupProposals]:
        """Return the proposals of each lookup at the positions of `rounds`.

        If there are forced tokens, they come first.
        """
        forced = [] if self.forced is None else [self.forced(rounds.prompt_indices)]
        if self.lookup_replay is None:
            assert not lookups
            return forced
        return [*forced, *(self.lookup_replay(spec, rounds.prompt_indices) for spec in lookups)]

    def predict_best(
        self,
        rounds: RoundTable,
        mask: SkipMask,
        policies: Sequence[DraftPolicy],
        lookup_options: Sequence[tuple[Lookup, ...]],
        make_spec: Callable[[SkipMask, DraftPolicy], DrafterSpec] | None = None,
        siblings: bool = False,
        costs: Costs | None = None,
    ) -> Candidate:
        """Return the best recipe over all policies and lookups.

        make_spec: makes the last drafter; None: `self.make_spec`. siblings: also try siblings, with
        the best of the policies. costs: None: `self.costs`.
        """
        costs = costs or self.costs
        siblings = siblings and not self.replay.verifying_model.spec.is_recurrent
        best: tuple[float, DraftPolicy, tuple[Lookup, ...], list[LookupProposals]] | None = None
        for lookups in lookup_options:
            proposals = self.propose_lookups(lookups, rounds)
            seconds = sweep(rounds, mask, policies, costs, proposals).sum(axis=1)
            if siblings:
                by_time = [policies[i] for i in seconds.argsort() if is_memoryless(policies[i])]
                with_siblings = [
                    replace(policy, siblings=option)
                    for policy in by_time[:POLICIES_WITH_SIBLINGS]
                    for option in sibling_grid()
                ]
                policies = [*policies, *with_siblings]
                more_seconds = sweep(rounds, mask, with_siblings, costs, proposals).sum(axis=1)
                seconds = np.concatenate([seconds, more_seconds * MIN_SIBLING_GAIN])
            i = int(seconds.argmin())
            if best is None or seconds[i] < best[0]:
                best = float(seconds[i]), policies[i], lookups, proposals
        assert best is not None
        _, policy, lookups, proposals = best
        spec = make_spec(mask, policy) if make_spec else self.make_spec(mask, policy, self.reading)
        return Candidate.from_prediction(
            Recipe((*lookups, spec)),
            self.simulate_recipe(rounds, mask, policy, costs, proposals),
            self.plain_pass_s,
        )


def lookups_of(recipe: Recipe) -> tuple[Lookup, ...]:
    """Return the lookups of a recipe."""
    return tuple(drafter for drafter in recipe.drafters if isinstance(drafter, Lookup))


def _split_rungs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the indices of the batches that each rung adds to the sample.

    sizes: number of prompts of each batch. A rung with too few prompts is merged into the next, or
    the last one into the one before it, so that the rungs take a third of the batches.
    """
    rungs, pending, remaining = list[tuple[int, ...]](), list[int](), list(range(len(sizes)))
    for stride in RUNG_STRIDES:
        added = [i for i in remaining if i % stride == 1]  # 1: not the shortest texts of all
        pending += added
        remaining = [i for i in remaining if i not in added]
        if sum(sizes[i] for i in pending) >= MIN_RUNG_PROMPTS and remaining:
            rungs.append(tuple(pending))
            pending = []
    if rungs:
        rungs[-1] += tuple(pending)
        pending = []
    return [*rungs, tuple(sorted([*pending, *remaining]))]
