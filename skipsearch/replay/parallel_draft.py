"""Replay S3D, which drafts all tokens in one pass. The replay is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skipsearch.core.reading import Vocabulary
from skipsearch.drafters.s3d.spec import DraftTree
from skipsearch.drafters.s3d.weights import MultiTokenDraft
from skipsearch.engine import forward, no_grad, run_layers
from skipsearch.errors import SearchError
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.replay import MAX_RANK, Replay, token_ranks
from skipsearch.replay.rounds import MAX_ROUND_DRAFT, RoundTable

MAX_TREE_NODES = 16


@dataclass(frozen=True)
class DraftRanks:
    """The ranks of the right tokens in draft passes from A positions of N prompts."""

    # [A, rows] rank of the full model's token in row k of the draft pass: the number of tokens with
    # a higher logit, at most MAX_RANK. MAX_RANK after the end of the text.
    ranks: np.ndarray
    prompt_indices: tuple[int, ...]  # [N]
    n_positions: Sequence[int]  # [N] positions of each prompt
    token_budgets: Sequence[int]  # [N] as in `PromptReplay`

    def to_rounds(self, tree: DraftTree) -> RoundTable:
        """Lay out rounds that draft this tree, as far as the token budget allows."""
        accepted_len = np.zeros(len(self.ranks), dtype=int)
        reached = accepted_len.copy()  # [A] deepest node on the path of the text
        for node, (parent, rank, depth) in enumerate(
            zip(tree.parents, tree.ranks, tree.depths, strict=True), 1
        ):
            is_reached = (reached == parent) & (self.ranks[:, depth - 1] == rank)
            reached, accepted_len = (
                np.where(is_reached, node, reached),
                np.where(is_reached, depth, accepted_len),
            )
        zeros = np.zeros(len(accepted_len), dtype=int)
        return RoundTable.lay_out(
            accepted_len,
            zeros,
            np.ones((len(accepted_len), MAX_ROUND_DRAFT)),
            self.prompt_indices,
            self.n_positions,
            self.token_budgets,
        )

    def propose_trees(self) -> list[DraftTree]:
        """Return chains of every length, and trees of every size up to MAX_TREE_NODES.

        Each tree has one node more than the tree before it: the node that is accepted most often.
        Source: Sequoia (Chen et al. 2024), where acceptance by rank is measured, too.
        """
        rows = self.ranks.shape[1]
        chains = [DraftTree(parents=tuple(range(n)), ranks=(0,) * n) for n in range(1, rows + 1)]
        positions = np.arange(len(self.ranks))
        open_: dict[tuple[int, ...], np.ndarray] = {
            (0,): positions[self.ranks[:, 0] == 0]
        }  # path of ranks from the root -> positions whose text follows it
        paths, grown = list[tuple[int, ...]](), list[DraftTree]()
        while open_ and len(paths) < MAX_TREE_NODES:
            path = max(open_, key=lambda path: len(open_[path]))
            reaching, depth = open_.pop(path), len(path)
            if not len(reaching):
                break
            paths.append(path)
            if depth < rows:
                open_[*path, 0] = reaching[self.ranks[reaching, depth] == 0]
            if path[-1] + 1 < MAX_RANK:
                siblings = self._positions_on_path(path[:-1])
                open_[*path[:-1], path[-1] + 1] = siblings[
                    self.ranks[siblings, depth - 1] == path[-1] + 1
                ]
            grown.append(build_tree(paths))
        return [*chains, *(tree for tree in grown if tree not in chains)]

    def _positions_on_path(self, path: Sequence[int]) -> np.ndarray:
        """Return the positions whose text follows the whole path of ranks."""
        on_path = np.ones(len(self.ranks), dtype=bool)
        for depth, rank in enumerate(path):
            on_path &= self.ranks[:, depth] == rank
        return np.flatnonzero(on_path)


def build_tree(paths: Sequence[tuple[int, ...]]) -> DraftTree:
    """Build a tree from its nodes, each given by the path of ranks from the root to it.

    The nodes of the main chain come first, then the others by depth and rank.
    """
    order = sorted(paths, key=lambda path: (any(path), len(path), path))
    number = {(): 0} | {path: node for node, path in enumerate(order, 1)}
    return DraftTree(
        parents=tuple(number[path[:-1]] for path in order), ranks=tuple(path[-1] for path in order)
    )


def nodes_by_depth(tree: DraftTree) -> tuple[int, ...]:
    """Return the cumulative number of nodes of a tree down to depth 1, 2, …"""
    return tuple(
        sum(depth <= most for depth in tree.depths) for most in range(1, max(tree.depths) + 1)
    )


@no_grad
def replay_parallel_draft(
    replay: Replay, draft: MultiTokenDraft, vocabularies: Sequence[Vocabulary | None] = (None,)
) -> list[DraftRanks]:
    """Run the draft from every position of every text; return its ranks with each vocabulary.

    Raises: SearchError for sampled texts.
    """
    if not replay.sampling.is_greedy:
        raise SearchError(
            "s3d is replayed on greedy text and this task samples: race it, or tune without s3d "
            "modules"
        )
    prompts = tuple(i for i, text in enumerate(replay.continuations) if len(text) > 1)
    ranks = [_rank_drafts(replay, draft, i, vocabularies) for i in prompts]
    return [
        DraftRanks(
            np.concatenate(of_vocabulary),
            prompts,
            [len(replay.continuations[i]) - 1 for i in prompts],
            [replay.token_budgets[i] for i in prompts],
        )
        for of_vocabulary in zip(*ranks, strict=True)
    ]


def _rank_drafts(
    replay: Replay,
    draft: MultiTokenDraft,
    prompt_index: int,
    vocabularies: Sequence[Vocabulary | None],
) -> list[np.ndarray]:
    """Return the ranks [positions, rows] of the draft passes that start at each token but the last,
    with each vocabulary.

    A single pass over the text computes all of them.
    """
    model, device, rows = replay.model, replay.model.spec.device, draft.max_tokens
    prompt, text = replay.prompt_ids[prompt_index], replay.continuations[prompt_index]
    tokens, n_positions = [*prompt, *text], len(text) - 1
    planner = Planner(len(tokens) + n_positions * rows, device)
    cache = model.new_cache(1, planner.capacity)
    forward(
        model,
        torch.tensor([tokens], device=device),
        cache,
        planner.plan_chain(0, len(tokens)),
        last_only=True,
    )
    group = torch.arange(n_positions, device=device).repeat_interleave(rows)
    starts = len(prompt) + group[None]
    positions = starts + torch.arange(rows, device=device).repeat(n_positions)
    if model.spec.context_length is not None:  # a draft may exceed the context
        positions = positions.clamp(max=model.spec.context_length - 1)
    plan = planner.plan_replay(len(tokens), positions, starts, group)
    known = model.embed(torch.tensor([text[:-1]], device=device), starts[:, ::rows])[0]
    h = torch.cat(
        [known[:, None], draft.mask_embeddings.to(known).expand(n_positions, -1, -1)], dim=1
    ).flatten(0, 1)[None]
    states = run_layers(draft.model, h, cache, plan, draft.mask)
    following = torch.tensor([*text[1:], *[0] * rows], device=device).unfold(0, rows, 1)[
        :n_positions
    ]  # [positions, rows]
    ended = (
        torch.arange(n_positions, device=device)[:, None] + torch.arange(rows, device=device)
        >= n_positions
    )
    by_vocabulary = replay.mask_unknown_tokens(
        draft.model.head(states)[0], prompt_index, group, vocabularies
    )
    return [
        token_ranks(following.flatten(), logits)
        .view(n_positions, rows)
        .masked_fill(ended, MAX_RANK)
        .cpu()
        .numpy()
        for logits in by_vocabulary
    ]
