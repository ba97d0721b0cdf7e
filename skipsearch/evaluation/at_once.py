"""Drafts that have all tokens from one pass (S3D), as replay judges them: exactly, since they follow from the committed text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from skipsearch.cache import Planner
from skipsearch.drafters.s3d import Tree
from skipsearch.engine import forward, inference, onward
from skipsearch.errors import SearchError
from skipsearch.evaluation.replay import MOST_RANK, Replay, rank_of
from skipsearch.evaluation.rounds import LONGEST, Rounds
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.s3d import Simultaneous

MOST_NODES = 16   # of a tree


@dataclass(frozen=True)
class Choices:
    """What a draft pass from each of A anchors says. rank: [A, rows], how many tokens row k prefers there to the full model's, at most
    MOST_RANK, which also stands where the text has ended; the rest as in `Rounds`."""

    rank: np.ndarray
    room: np.ndarray
    left: np.ndarray
    first: np.ndarray
    lengths: np.ndarray
    prompts: tuple[int, ...]

    def rounds(self, tree: Tree) -> Rounds:
        """A round verifies as much of the tree as there is room for."""
        right = np.zeros(len(self.rank), dtype=int)
        at = right.copy()   # the node that an anchor's text has come to
        for node, (parent, rank, depth) in enumerate(zip(tree.parents, tree.ranks, tree.depths, strict=True), 1):
            stands = (at == parent) & (self.rank[:, depth - 1] == rank)
            at, right = np.where(stands, node, at), np.where(stands, depth, right)
        nothing = np.zeros(len(right), dtype=int)
        return Rounds(right, nothing, np.ones((len(right), LONGEST)), self.room, self.left, self.first, self.lengths, prompts=self.prompts)

    def by_depth(self) -> list[float]:
        """α of each row: how often its first choice is right where those of all rows before it are."""
        right = (self.rank == 0).cumprod(axis=1)
        stands = np.concatenate([np.ones((len(right), 1)), right], axis=1).sum(axis=0)
        return [float(after / before) if before else 0.0 for before, after in pairwise(stands)]

    def trees(self) -> list[Tree]:
        """Chains of every length, and trees of every size up to MOST_NODES, each with one node more than the one before: the one that most
        of the anchors' texts come to. Source: Sequoia (Chen et al. 2024), where acceptance by rank is measured too."""
        rows = self.rank.shape[1]
        chains = [Tree(parents=tuple(range(n)), ranks=(0,) * n) for n in range(1, rows + 1)]
        anchors = np.arange(len(self.rank))
        open_: dict[tuple[int, ...], np.ndarray] = {(0,): anchors[self.rank[:, 0] == 0]}   # by ranks from the root: whose text comes there
        paths, grown = list[tuple[int, ...]](), list[Tree]()
        while open_ and len(paths) < MOST_NODES:
            path = max(open_, key=lambda path: len(open_[path]))
            here, depth = open_.pop(path), len(path)
            if not len(here):
                break
            paths.append(path)
            if depth < rows:
                open_[*path, 0] = here[self.rank[here, depth] == 0]
            if path[-1] + 1 < MOST_RANK:
                beside = self._at(path[:-1])
                open_[*path[:-1], path[-1] + 1] = beside[self.rank[beside, depth - 1] == path[-1] + 1]
            grown.append(tree_of(paths))
        return [*chains, *(tree for tree in grown if tree not in chains)]

    def _at(self, path: Sequence[int]) -> np.ndarray:
        """Anchors whose text comes to the end of a path of ranks."""
        stands = np.ones(len(self.rank), dtype=bool)
        for depth, rank in enumerate(path):
            stands &= self.rank[:, depth] == rank
        return np.flatnonzero(stands)


def tree_of(paths: Sequence[tuple[int, ...]]) -> Tree:
    """From the ranks on the way to each node: the trunk first, then by depth and rank."""
    order = sorted(paths, key=lambda path: (any(path), len(path), path))
    number = {(): 0} | {path: node for node, path in enumerate(order, 1)}
    return Tree(parents=tuple(number[path[:-1]] for path in order), ranks=tuple(path[-1] for path in order))


def nodes_to_depth(tree: Tree) -> tuple[int, ...]:
    """How many nodes it has down to depth 1, 2, …"""
    return tuple(sum(depth <= most for depth in tree.depths) for most in range(1, max(tree.depths) + 1))


@inference
def choices(replay: Replay, draft: Simultaneous) -> Choices:
    """Raises: SearchError for sampled texts."""
    if not replay.sampling.greedy:
        raise SearchError("s3d is replayed on greedy text and this task samples: race it, or tune without s3d modules")
    rank, room, left, lengths, numbers = list[np.ndarray](), list[int](), list[int](), list[int](), list[int]()
    for number, (prompt, text) in enumerate(zip(replay.prompts, replay.tokens, strict=True)):
        count = len(text) - 1
        if count < 1:
            continue
        rank.append(_ranks(replay.model, draft, prompt, text))
        room += [replay.rooms[number] - 1 - at for at in range(count)]
        left += [count - at for at in range(count)]
        lengths.append(count)
        numbers.append(number)
    ends = np.cumsum(lengths)
    return Choices(np.concatenate(rank), np.array(room), np.array(left), ends - lengths, np.array(lengths), tuple(numbers))


def _ranks(model: ModelAdapter, draft: Simultaneous, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """[anchors, rows] of one pass from each token of a text but the last, all of these passes as one."""
    device, rows = model.spec.device, draft.most
    whole, anchors = [*prompt, *text], len(text) - 1
    planner = Planner(len(whole) + anchors * rows, device)
    cache = model.new_cache(1, planner.capacity)
    forward(model, torch.tensor([whole], device=device), cache, planner.chain(0, len(whole)), last_only=True)
    group = torch.arange(anchors, device=device).repeat_interleave(rows)
    stands = len(prompt) + group[None]
    places = stands + torch.arange(rows, device=device).repeat(anchors)
    if model.spec.context is not None:   # of drafts that nobody has room for
        places = places.clamp(max=model.spec.context - 1)
    plan = planner.anchored(len(whole), places, stands, group)
    known = model.embed(torch.tensor([text[:-1]], device=device), stands[:, ::rows])[0]
    h = torch.cat([known[:, None], draft.unknown.to(known).expand(anchors, -1, -1)], dim=1).flatten(0, 1)[None]
    states = onward(draft.model, h, cache, plan, draft.mask)
    following = torch.tensor([*text[1:], *[0] * rows], device=device).unfold(0, rows, 1)[:anchors]          # [anchors, rows]
    ended = torch.arange(anchors, device=device)[:, None] + torch.arange(rows, device=device) >= anchors
    rank = rank_of(following.flatten(), draft.model.head(states)[0]).view(anchors, rows)
    found: np.ndarray = torch.where(ended, MOST_RANK, rank).cpu().numpy()
    return found
