"""The two ways a mask is judged during a search, in the best recipe that has it: predicted from replay, or timed on the wall clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, Protocol

import numpy as np

from skipsearch.costs import Costs, InOnePass
from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.s3d import Tree
from skipsearch.drafters.skip import Skip
from skipsearch.errors import DecodeError
from skipsearch.evaluation.at_once import Choices, nodes_to_depth
from skipsearch.evaluation.lookups import Copied, Lookups, grid
from skipsearch.evaluation.prompts import Workload
from skipsearch.evaluation.replay import Replay, Replayed
from skipsearch.evaluation.rounds import Rounds, lay_out, without_passes
from skipsearch.evaluation.simulate import Prediction, prices_of, simulate
from skipsearch.evaluation.sweep import every, exploring, has_no_memory, sibling_grid, sweep, sweep_lookups
from skipsearch.evaluation.trained import TrainedDraft
from skipsearch.evaluation.wall import race
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import DrafterSpec, Recipe
from skipsearch.stats import Price, Trial, TrialState

MAX_DRAFT = 12  # Draft & Verify's K
SAMPLES = (12, 6, 3)   # every twelfth batch of continuations, then every sixth, then every third
LEAST_SAMPLED = 6      # prompts below which a sample says too little
MOST_LOOKUPS = 6       # settings of lookup that are tried before a skip drafter, each also with a least match of 1
WITH_SIBLINGS = 8      # draft policies of a mask that are tried with siblings
SIBLINGS_BRING = 1.01  # times as fast as without, or they are left out: a smaller gain could not be told from none
LOOKUP_SKIP = "lookup,skip"
CHOOSING = ("clasp", "asd", "swift")       # choose their masks while they decode, each alone and behind lookup; auto leaves them out
TRAINED = ("adapted", "kangaroo", "s3d")   # need a module, each alone and behind lookup; where there is one, auto weighs it too
SHAPES: dict[str, tuple[str, ...]] = {   # what `--drafters` may say, and the shapes of recipe that it allows
    "auto": ("lookup", "skip", LOOKUP_SKIP),
    "lookup": ("lookup",),
    "skip": ("skip",),
    LOOKUP_SKIP: (LOOKUP_SKIP,),
    **{shape: (shape,) for kind in (*CHOOSING, *TRAINED) for shape in (kind, f"lookup,{kind}")},
}
BEHIND = 1.0           # standard errors: of two masks that are alike, the new one is dropped at every sixth look


class Objective(Protocol):
    """Judges a mask: the driver of a search hands each mask that a searcher asks for to one of these, and tells the searcher the trial.

    fidelity: what its trials are marked with. An objective that believed in skipping exactly half would be

        class Half:
            fidelity = "belief"

            def judge(self, mask: SkipMask) -> Trial:
                return Trial(mask, seconds_per_token=1 + abs(mask.n_skipped - mask.n_layers), fidelity=self.fidelity)

    `ReplayObjective` predicts, `WallObjective` measures.
    """

    fidelity: str

    def judge(self, mask: SkipMask) -> Trial:
        """The trial, with the recipe that the mask was judged in."""


def alone(mask: SkipMask, policy: DraftPolicy) -> Skip:
    """A skip drafter of a mask and a draft policy."""
    return Skip.of(mask, policy.draft_length, policy.exit, policy.siblings)


@dataclass(frozen=True)
class Found:
    """A recipe and what replay predicts of it."""

    recipe: Recipe
    prediction: Prediction

    def prices(self, plain: float) -> list[Price | None]:
        """For the guard. plain: seconds of a plain pass."""
        return prices_of(self.prediction.stats, plain)

    @property
    def seconds_per_token(self) -> float:
        return self.prediction.seconds_per_token


class ReplayObjective:
    """Predicted seconds per verified token of the best recipe of a mask, from one replay and the latency table.

    shapes: those that a recipe may have. Masks are judged for the positions that lookup leaves over where a shape has lookup before the
    skip drafter and lookup alone pays, else for all of them.

    A mask that falls behind the best one that this process has judged, on a sample of the prompts and by more than chance explains prompt
    by prompt, is not replayed on the rest: its trial is that of the sample, in proportion to what the best one took there and on all of
    them. So it goes with a twelfth of the prompts (where that is 6 of them), with a sixth, and with a third.
    Source: successive rejection by paired differences, as in F-Race (Birattari et al. 2002).
    """

    fidelity = "replay"

    def __init__(self, replay: Replay, costs: Costs, shapes: Sequence[str] = ("skip",)):
        self.replay, self.costs, self.shapes = replay, costs, tuple(shapes)
        self.max_draft = len(costs.verify) - 1
        self.exploring = exploring(self.max_draft)
        self._rungs = _rungs([len(chosen) for chosen in replay.batches.chosen])
        self._leader: list[Prediction] = []   # of the best mask so far, on the prompts of the first rung, of two rungs, …, on all of them
        self._laid_out: tuple[SkipMask, Rounds] | None = None
        self.lookups = Lookups(replay.prompts, replay.tokens) if any("lookup" in shape for shape in shapes) else None
        self.ranked_lookups = self._rank_lookups()

    def afresh(self) -> ReplayObjective:
        """The same, having judged nothing: for another search, which is not to lean on what this one found."""
        return ReplayObjective(self.replay, self.costs, self.shapes)

    @property
    def lookup_pays(self) -> bool:
        """Whether lookup alone is predicted to beat plain decoding."""
        return bool(self.ranked_lookups) and self.ranked_lookups[0][1] < self.costs.verify[0]

    @property
    def searched_shape(self) -> str:
        """Of the recipes that masks are judged in."""
        return LOOKUP_SKIP if LOOKUP_SKIP in self.shapes and (self.lookup_pays or "skip" not in self.shapes) else "skip"

    def judge(self, mask: SkipMask) -> Trial:
        replayed: list[Replayed] = []
        reached: list[Prediction] = []
        before = self.before(self.searched_shape)[:1]
        for rung in self._rungs:
            replayed += self.replay(mask, only=rung)
            found = self._best(lay_out(replayed), mask, self.exploring, before)
            part = found.prediction
            reached.append(part)
            if self._leader and len(reached) < len(self._rungs):
                theirs = self._leader[len(reached) - 1]
                behind = part.seconds - theirs.seconds   # [prompts so far]
                if behind.sum() > BEHIND * behind.std() * sqrt(len(behind)):
                    return self._trial(mask, found, self._leader[-1].seconds_per_token / theirs.seconds_per_token)
        if not self._leader or part.seconds_per_token < self._leader[-1].seconds_per_token:
            self._leader = reached
        return self._trial(mask, found)

    def _trial(self, mask: SkipMask, found: Found, scale: float = 1.0) -> Trial:
        best = found.prediction
        return Trial(mask, scale * best.seconds_per_token, scale * best.stderr, "replay", best.stats.by_drafter[-1].alpha, best.stats.tau,
                     self.costs.draft(mask) / self.costs.verify[0], baseline_seconds_per_token=self.costs.verify[0], recipe=found.recipe)

    def best_recipe(self, mask: SkipMask, shape: str | None = None, fine: bool = False, siblings: bool = True) -> Found:
        """The best recipe of this shape (of the searched one if None) that has this mask. fine: of all settings, not only of those that
        a search tries. siblings: False leaves them out."""
        if self._laid_out is None or self._laid_out[0] != mask:   # the finalists are asked for in several shapes, one after another
            self._laid_out = mask, lay_out(self.replay(mask))
        rounds, before = self._laid_out[1], self.before(shape or self.searched_shape)
        if not fine:
            return self._best(rounds, mask, self.exploring, before[:1])
        coarse = self._best(rounds, mask, self.exploring, before).recipe
        return self._best(rounds, mask, every(self.max_draft), [tuple(d for d in coarse.drafters if isinstance(d, Lookup))],
                          siblings=siblings)

    def best_trained(self, draft: TrainedDraft, shape: str, siblings: bool = True) -> Found:
        """The best recipe with a trained draft: alone, or behind lookup. siblings: False leaves them out."""
        before = self.before(LOOKUP_SKIP if shape.startswith("lookup,") else "skip")

        def spec(_: SkipMask, policy: DraftPolicy) -> DrafterSpec:
            return draft.spec(policy)

        if draft.choices is not None:
            return self._best_at_once(draft, draft.choices(self.replay), before)
        rounds, costs = draft.rounds(self.replay), draft.priced(self.costs)
        lookups = tuple(d for d in self._best(rounds, draft.mask, self.exploring, before, spec, costs=costs).recipe.drafters
                        if isinstance(d, Lookup))
        return self._best(rounds, draft.mask, every(self.max_draft), [lookups], spec, siblings and draft.siblings, costs)

    def _best_at_once(self, draft: TrainedDraft, choices: Choices, before: Sequence[tuple[Lookup, ...]]) -> Found:
        """Of chains of every length and of trees, which have to bring what siblings have to."""
        found, gains = list[Found](), list[float]()
        for tree in choices.trees():
            depth, chain = max(tree.depths), tree.trunk == len(tree.parents)

            def spec(_: SkipMask, policy: DraftPolicy, tree: Tree | None = None if chain else tree) -> DrafterSpec:
                return draft.spec(policy).model_copy(update={"tree": tree})

            costs = InOnePass.of(self.costs, nodes_to_depth(tree))
            found.append(self._best(choices.rounds(tree), draft.mask, [DraftPolicy(depth)], before, spec, costs=costs))
            gains.append(1.0 if chain else SIBLINGS_BRING)
        return min(zip(found, gains, strict=True), key=lambda pair: pair[0].seconds_per_token * pair[1])[0]

    def best_lookup(self) -> Found:
        """The best recipe of lookup alone, for shapes that have it."""
        return self.lookup_alone(self.ranked_lookups[0][0])

    def lookup_alone(self, spec: Lookup) -> Found:
        """A recipe of this lookup."""
        assert self.lookups is not None
        rounds = without_passes(self.replay.tokens, self.replay.rooms)
        return Found(Recipe((spec,)), simulate(rounds, None, None, self.costs, [self.lookups(spec, rounds.prompts)]))

    def _rank_lookups(self) -> list[tuple[Lookup, float]]:
        """Each setting of lookup alone with its seconds per token, best first."""
        if self.lookups is None:
            return []
        rounds, options = without_passes(self.replay.tokens, self.replay.rooms), grid(self.max_draft)
        seconds = sweep_lookups(rounds, [self.lookups(spec, rounds.prompts) for spec in options], self.costs).sum(axis=1)
        return sorted(zip(options, (seconds / rounds.lengths.sum()).tolist(), strict=True), key=lambda pair: pair[1])

    def before(self, shape: str) -> list[tuple[Lookup, ...]]:
        """What may stand before the skip drafter, the best one alone first; then more of them, and each with a least match of 1."""
        if shape != LOOKUP_SKIP:
            return [()]
        kept = [spec for spec, _ in self.ranked_lookups[:MOST_LOOKUPS]]
        eager = [spec.model_copy(update={"min_match": 1}) for spec in kept]
        return [(spec,) for spec in dict.fromkeys([*kept, *eager])]

    def _best(self, rounds: Rounds, mask: SkipMask, policies: Sequence[DraftPolicy], before: Sequence[tuple[Lookup, ...]],
              spec: Callable[[SkipMask, DraftPolicy], DrafterSpec] = alone, siblings: bool = False,
              costs: Costs | None = None) -> Found:
        """siblings: try them with the best of the policies, too. costs: this objective's own if None."""
        costs, siblings = costs or self.costs, siblings and not self.replay.model.spec.recurrent
        best: tuple[float, DraftPolicy, tuple[Lookup, ...], list[Copied]] | None = None
        for lookups in before:
            copied = [self.lookups(spec, rounds.prompts) for spec in lookups] if self.lookups is not None else []
            seconds = sweep(rounds, mask, policies, costs, copied).sum(axis=1)
            if siblings:
                good = [policies[i] for i in seconds.argsort() if has_no_memory(policies[i])][:WITH_SIBLINGS]
                more = [replace(policy, siblings=beside) for policy in good for beside in sibling_grid()]
                policies = [*policies, *more]
                seconds = np.concatenate([seconds, sweep(rounds, mask, more, costs, copied).sum(axis=1) * SIBLINGS_BRING])
            i = int(seconds.argmin())
            if best is None or seconds[i] < best[0]:
                best = float(seconds[i]), policies[i], lookups, copied
        assert best is not None
        _, policy, lookups, copied = best
        return Found(Recipe((*lookups, spec(mask, policy))), simulate(rounds, mask, policy, costs, copied))

    def surface(self, mask: SkipMask) -> list[dict[str, Any]]:
        """The predicted speedup of a mask alone under each fixed length and each confidence threshold."""
        options = [p for p in every(self.max_draft) if p.exit.kind != "adaptive"]
        rounds = lay_out(self.replay(mask))
        seconds = sweep(rounds, mask, options, self.costs).sum(axis=1) / rounds.lengths.sum()
        return [{"kind": p.exit.kind, "draft_length": p.draft_length, "threshold": getattr(p.exit, "threshold", None),
                 "speedup": self.costs.verify[0] / float(s)} for p, s in zip(options, seconds, strict=True)]


def _rungs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Indices of the batches that each rung adds, of batches of so many prompts; a rung with too few prompts goes into the next."""
    rungs, taken, left = list[tuple[int, ...]](), list[int](), list(range(len(sizes)))
    for nth in SAMPLES:
        taken += (more := [i for i in left if i % nth == 1])   # the shortest texts of all are not in the first
        left = [i for i in left if i not in more]
        if sum(sizes[i] for i in taken) >= LEAST_SAMPLED and left:
            rungs.append(tuple(taken))
            taken = []
    return [*rungs, tuple(sorted([*taken, *left]))]


class WallObjective:
    """Real decoding of a few prompts, interleaved with plain decoding. Time is given in units of the search's own baseline:
    measured ratio × baseline, so that a machine that slows down does not make later masks look worse."""

    fidelity = "wall"

    def __init__(self, model: ModelAdapter, workload: Workload, policy_for: ReplayObjective, baseline: float):
        self.model, self.workload, self.policy_for, self.baseline = model, workload, policy_for, baseline

    def judge(self, mask: SkipMask) -> Trial:
        found = self.policy_for.best_recipe(mask)
        recipe = found.recipe
        try:
            plain, ours = race([Decoder(self.model), Decoder(self.model, recipe, prices=found.prices(self.baseline))], self.workload)
        except DecodeError:
            return Trial(mask, inf, fidelity="wall", state=TrialState.FAILED, recipe=recipe)
        speedup = ours.speedup_over(plain)
        seconds = self.baseline / speedup.mean
        stats = ours.stats
        beta = (stats.draft_seconds / stats.drafted) / plain.seconds_per_token if stats.drafted else None
        return Trial(mask, seconds, seconds * (speedup.high - speedup.low) / (3.92 * speedup.mean), "wall", stats.alpha, stats.tau, beta,
                     baseline_seconds_per_token=self.baseline, recipe=recipe)
