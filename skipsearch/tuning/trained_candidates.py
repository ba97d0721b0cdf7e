"""Find the best recipe with a trained draft: its vocabulary, policy, siblings or tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from skipsearch.core.cost_model import Costs, OnePassDraftCosts
from skipsearch.core.reading import READ_ALL, DraftWeights, Reading, Vocabulary
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.s3d.spec import DraftTree
from skipsearch.replay.parallel_draft import DraftRanks, nodes_by_depth
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import RoundTable
from skipsearch.replay.sweep import coarse_policies, fine_policies
from skipsearch.replay.trained_replay import Readings, TrainedDraft
from skipsearch.timing.reading_costs import FormatCosts, measure_format_costs, price_reading
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.draft_timing import time_draft_steps
from skipsearch.tuning.objective import MIN_SIBLING_GAIN, ReplayObjective, lookups_of
from skipsearch.tuning.vocabularies import list_vocabularies

T = TypeVar("T")


class TrainedCandidates:
    """The recipes of trained drafts, with the replays and times that they share."""

    def __init__(self, objective: ReplayObjective):
        """objective: predicts recipes whose drafts read all of the model."""
        self.objective, self.replay, self.costs = objective, objective.replay, objective.costs
        # By module: (rounds or ranks, reading) of each replay.
        self._replays: dict[ModuleRef | None, list[tuple[Any, Reading]]] = {}
        self._head_costs: dict[Reading, FormatCosts] | None = None
        self._timed_costs: dict[tuple[ModuleRef | None, Reading], Costs] = {}

    def best(self, draft: TrainedDraft, after_lookup: bool, siblings: bool = True) -> Candidate:
        """Return the best recipe with a trained draft. siblings: try siblings, too."""
        lookup_options = self.objective.list_lookups(after_lookup)
        if draft.rank_drafts is not None:
            return min(
                (
                    self._best_parallel_draft(draft, ranks, reading, lookup_options)
                    for ranks, reading in self._replay_trained(draft, draft.rank_drafts)
                ),
                key=lambda candidate: candidate.seconds_per_token,
            )
        return min(
            (
                self._best_chain(draft, weights, lookup_options, siblings)
                for weights in draft.weights
            ),
            key=lambda candidate: candidate.seconds_per_token,
        )

    def _best_chain(
        self,
        draft: TrainedDraft,
        weights: DraftWeights,
        lookup_options: Sequence[tuple[Lookup, ...]],
        siblings: bool,
    ) -> Candidate:
        """Return the best recipe of a draft that makes one pass per token, in one format."""
        best: tuple[Candidate, RoundTable, Reading] | None = None
        for rounds, reading in self._replay_trained(draft, draft.replay_rounds):
            if reading.weights != weights:
                continue
            coarse = self.objective.predict_best(
                rounds,
                draft.mask,
                coarse_policies(self.objective.max_draft),
                lookup_options,
                lambda _, policy: draft.make_spec(policy, READ_ALL),
                costs=draft.adjust_costs(self._price_vocabulary(reading.vocabulary)),
            )
            if best is None or coarse.seconds_per_token < best[0].seconds_per_token:
                best = coarse, rounds, reading
        assert best is not None
        coarse, rounds, reading = best
        costs = draft.adjust_costs(self._price_vocabulary(reading.vocabulary))
        if draft.needs_timing:
            costs = self._time_steps(draft, reading, costs)
        return self.objective.predict_best(
            rounds,
            draft.mask,
            fine_policies(self.objective.max_draft),
            [lookups_of(coarse.recipe)],
            lambda _, policy: draft.make_spec(policy, reading),
            siblings and draft.allows_siblings,
            costs,
        )

    def _replay_trained(
        self, draft: TrainedDraft, replay: Callable[[Replay, Readings], list[T]]
    ) -> list[tuple[T, Reading]]:
        """Return the replay of a trained draft with each format and vocabulary that it may have."""
        if draft.ref not in self._replays:
            vocabularies = list(list_vocabularies(self.replay.model, self.replay.texts))
            if draft.vocabulary is not None:
                vocabularies = _restrict_all(vocabularies, draft.vocabulary)
            readings = [
                Reading(w, vocabulary) for w in draft.weights for vocabulary in vocabularies
            ]
            replayed = replay(self.replay, readings)
            self._replays[draft.ref] = list(zip(replayed, readings, strict=True))
        return self._replays[draft.ref]

    def _time_steps(self, draft: TrainedDraft, reading: Reading, costs: Costs) -> Costs:
        """Return the costs with timed draft steps."""
        key = draft.ref, reading
        if key not in self._timed_costs:
            self._timed_costs[key] = time_draft_steps(draft, reading, self.replay, costs)
        return self._timed_costs[key]

    def _price_vocabulary(self, vocabulary: Vocabulary | None) -> Costs:
        """Return the costs of drafts of the stored weights that have this vocabulary."""
        if vocabulary is None:
            return self.costs
        model = self.replay.model
        if self._head_costs is None:
            context = self.replay.mean_context()
            self._head_costs = measure_format_costs(
                model, context, [READ_ALL], sampling=self.replay.sampling
            )
        reading = Reading(vocabulary=vocabulary)
        return price_reading(self.costs, self._head_costs, reading, model.spec.vocab_size)

    def _best_parallel_draft(
        self,
        draft: TrainedDraft,
        draft_ranks: DraftRanks,
        reading: Reading,
        lookup_options: Sequence[tuple[Lookup, ...]],
    ) -> Candidate:
        """Return the best recipe among chains of every length and trees.

        A tree is chosen only if it is faster than the best chain by the factor MIN_SIBLING_GAIN.
        """
        costs = self._price_vocabulary(reading.vocabulary)

        def predict(tree: DraftTree, is_chain: bool) -> Candidate:
            update = {"tree": None if is_chain else tree}
            return self.objective.predict_best(
                draft_ranks.to_rounds(tree),
                draft.mask,
                [DraftPolicy(max(tree.depths))],
                lookup_options,
                lambda _, policy: draft.make_spec(policy, reading).model_copy(update=update),
                costs=OnePassDraftCosts.from_costs(costs, nodes_by_depth(tree)),
            )

        candidates, times = list[Candidate](), list[float]()
        for tree in draft_ranks.propose_trees():
            is_chain = tree.n_main == len(tree.parents)
            candidates.append(predict(tree, is_chain))
            times.append(candidates[-1].seconds_per_token * (1.0 if is_chain else MIN_SIBLING_GAIN))
        return candidates[times.index(min(times))]


def _restrict_all(
    vocabularies: Sequence[Vocabulary | None], drafted: Vocabulary
) -> list[Vocabulary | None]:
    """Return the tokens of each vocabulary that a draft was trained to draft."""
    known = set(drafted.token_ids())
    restricted = [drafted]
    for vocabulary in vocabularies:
        if vocabulary is not None:
            ids = known.intersection(vocabulary.token_ids())
            restricted.append(Vocabulary.from_ids(ids, min(vocabulary.lowest, drafted.lowest)))
    return list(dict.fromkeys(restricted))
