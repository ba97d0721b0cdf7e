"""Find the best recipe with a trained draft: its vocabulary, policy, siblings or tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from skipsearch.core.cost_model import Costs, OnePassDraftCosts
from skipsearch.core.reading import READ_ALL, Reading, Vocabulary
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.s3d.spec import DraftTree
from skipsearch.replay.parallel_draft import DraftRanks, nodes_by_depth
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import RoundTable
from skipsearch.replay.sweep import coarse_policies, fine_policies
from skipsearch.replay.trained_replay import TrainedDraft, Vocabularies
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
        # By module: (rounds or ranks, vocabulary) of each replay.
        self._replays: dict[ModuleRef | None, list[tuple[Any, Vocabulary | None]]] = {}
        self._head_costs: dict[Reading, FormatCosts] | None = None
        self._timed_costs: dict[tuple[ModuleRef | None, Vocabulary | None], Costs] = {}

    def best(self, draft: TrainedDraft, after_lookup: bool, siblings: bool = True) -> Candidate:
        """Return the best recipe with a trained draft. siblings: try siblings, too."""
        lookup_options = self.objective.list_lookups(after_lookup)
        if draft.rank_drafts is not None:
            return min(
                (
                    self._best_parallel_draft(draft, ranks, vocabulary, lookup_options)
                    for ranks, vocabulary in self._replay_trained(draft, draft.rank_drafts)
                ),
                key=lambda candidate: candidate.seconds_per_token,
            )
        best: tuple[Candidate, RoundTable, Vocabulary | None] | None = None
        for rounds, vocabulary in self._replay_trained(draft, draft.replay_rounds):
            costs = draft.adjust_costs(self._price_vocabulary(vocabulary))
            coarse = self.objective.predict_best(
                rounds,
                draft.mask,
                coarse_policies(self.objective.max_draft),
                lookup_options,
                lambda _, policy: draft.make_spec(policy, None),
                costs=costs,
            )
            if best is None or coarse.seconds_per_token < best[0].seconds_per_token:
                best = coarse, rounds, vocabulary
        assert best is not None
        coarse, rounds, vocabulary = best
        costs = draft.adjust_costs(self._price_vocabulary(vocabulary))
        if draft.needs_timing:
            costs = self._time_steps(draft, vocabulary, costs)
        return self.objective.predict_best(
            rounds,
            draft.mask,
            fine_policies(self.objective.max_draft),
            [lookups_of(coarse.recipe)],
            lambda _, policy: draft.make_spec(policy, vocabulary),
            siblings and draft.allows_siblings,
            costs,
        )

    def _replay_trained(
        self, draft: TrainedDraft, replay: Callable[[Replay, Vocabularies], list[T]]
    ) -> list[tuple[T, Vocabulary | None]]:
        """Return the replay of a trained draft with each vocabulary that it may have."""
        if draft.ref not in self._replays:
            vocabularies: list[Vocabulary | None] = [draft.vocabulary]
            if draft.vocabulary is None:
                vocabularies = list(list_vocabularies(self.replay.model, self.replay.continuations))
            replayed = replay(self.replay, vocabularies)
            self._replays[draft.ref] = list(zip(replayed, vocabularies, strict=True))
        return self._replays[draft.ref]

    def _time_steps(
        self, draft: TrainedDraft, vocabulary: Vocabulary | None, costs: Costs
    ) -> Costs:
        """Return the costs with timed draft steps."""
        key = draft.ref, vocabulary
        if key not in self._timed_costs:
            self._timed_costs[key] = time_draft_steps(draft, vocabulary, self.replay, costs)
        return self._timed_costs[key]

    def _price_vocabulary(self, vocabulary: Vocabulary | None) -> Costs:
        """Return the costs of drafts of the stored weights that have this vocabulary."""
        if vocabulary is None:
            return self.costs
        model = self.replay.model
        if self._head_costs is None:
            context = self.replay.context_lengths()[1]
            self._head_costs = measure_format_costs(model, context, [READ_ALL])
        reading = Reading(vocabulary=vocabulary)
        return price_reading(self.costs, self._head_costs, reading, model.spec.vocab_size)

    def _best_parallel_draft(
        self,
        draft: TrainedDraft,
        draft_ranks: DraftRanks,
        vocabulary: Vocabulary | None,
        lookup_options: Sequence[tuple[Lookup, ...]],
    ) -> Candidate:
        """Return the best recipe among chains of every length and trees.

        A tree is chosen only if it is faster than the best chain by the factor MIN_SIBLING_GAIN.
        """
        costs = self._price_vocabulary(vocabulary)

        def predict(tree: DraftTree, is_chain: bool) -> Candidate:
            update = {"tree": None if is_chain else tree}
            return self.objective.predict_best(
                draft_ranks.to_rounds(tree),
                draft.mask,
                [DraftPolicy(max(tree.depths))],
                lookup_options,
                lambda _, policy: draft.make_spec(policy, vocabulary).model_copy(update=update),
                costs=OnePassDraftCosts.from_costs(costs, nodes_by_depth(tree)),
            )

        candidates, times = list[Candidate](), list[float]()
        for tree in draft_ranks.propose_trees():
            is_chain = tree.n_main == len(tree.parents)
            candidates.append(predict(tree, is_chain))
            times.append(candidates[-1].seconds_per_token * (1.0 if is_chain else MIN_SIBLING_GAIN))
        return candidates[times.index(min(times))]
