"""Checks of drafts with siblings: greedy tokens and samples are the full model's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.core.recipe import Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding.trees import accept_tree_sampled
from skipsearch.engine import draws

from .acceptance_checks import Row, Tokens, assert_same_distribution, text_distribution
from .checks import MASKS, Drafting, check_greedy
from .sampling_checks import TABLE_MASK, Warp, check_sampling

BUSHY = (
    Drafting(MASKS[0], 4, siblings=Siblings(below=1.0, most=2)),
    Drafting(MASKS[1], 3, siblings=Siblings(below=0.5, most=4)),
)


def check_trees() -> DecodeStats:
    """Check that greedy text is the full model's own, for trees of one and of several siblings.

    Some siblings must be accepted.
    """
    stats = check_greedy(BUSHY)
    drafted, accepted = stats.by_drafter[0].drafted, stats.accepted
    assert stats.by_drafter[0].siblings > drafted
    assert 0 < accepted < drafted
    return stats


def check_tree_sampling() -> DecodeStats:
    """Check that samples with siblings have the full model's distribution, warped or not."""
    from skipsearch.core.recipe import Recipe
    from skipsearch.drafters.exits import make_exit
    from skipsearch.drafters.skip.spec import Skip

    total = DecodeStats()
    for warp in (Warp(0.7), Warp(1.3, top_p=0.9, top_k=4)):
        recipe = Recipe(
            (Skip.from_mask(TABLE_MASK, 2, make_exit("fixed"), Siblings(below=1.0, most=2)),)
        )
        total += check_sampling(warp, samples=1200, recipe=recipe)
    assert total.by_drafter[0].siblings
    return total


# --- the rule, by enumeration


@dataclass(frozen=True)
class Tree:
    """A drafted tree.

    tokens, and the parent of each, counted from 1. chance: the probability of this tree. q: a row
    for each token.
    """

    tokens: Tokens = ()
    parents: Tokens = ()
    chance: float = 1.0
    q: tuple[Row, ...] = ()


def drawn_below(tree: Tree, node: int, q: Row, count: int) -> Iterator[Tree]:
    """Yield all draws of `count` children, or all that there are, without replacement."""
    mine = [tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == node]
    left = 1 - sum(q[token] for token in mine)
    if len(mine) == count or left < 1e-12:
        yield tree
        return
    for token, mass in enumerate(q):
        if mass and token not in mine:
            grown = Tree(
                (*tree.tokens, token),
                (*tree.parents, node),
                tree.chance * mass / left,
                (*tree.q, q),
            )
            yield from drawn_below(grown, node, q, count)


class Coin:
    """A uniform number that supports only comparisons.

    Each comparison has two outcomes: `script` chooses, and `chance` is the probability of the
    choices.
    """

    def __init__(self, script: list[bool]):
        self.script, self.chance, self.asked, self.share = script, 1.0, 0, 1.0

    def __mul__(self, q: Any) -> Coin:
        self.share = float(q)
        return self

    def __lt__(self, p: Any) -> bool:
        stands = min(1.0, float(p) / self.share) if self.share else 1.0
        choice = self.script[self.asked] if self.asked < len(self.script) else True
        self.asked += 1
        self.chance *= stands if choice else 1 - stands
        return choice


def tree_outcomes(
    tree: Tree, p: Callable[[Tokens], Row], certain: bool = False
) -> dict[Tokens, float]:
    """Return the probability of each result of one call for a tree.

    A result is the accepted tokens and the token after them.
    """
    texts = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        texts.append((*texts[parent], token))
    p_rows = torch.tensor([p(text) for text in texts], dtype=torch.float64)
    q_rows = None if certain else torch.tensor(tree.q, dtype=torch.float64)
    found: dict[Tokens, float] = defaultdict(float)
    scripts: list[list[bool]] = [[]]
    while scripts:
        script, weights = scripts.pop(), list[Tensor]()
        coin = Coin(script)

        def drawn(w: Tensor, *_: Any, seen: list[Tensor] = weights, **__: Any) -> Tensor:
            seen.append(w)
            return w.argmax()[None]

        with (
            patch.object(torch, "rand", lambda *_, c=coin, **__: c),
            patch.object(draws, "draw_tokens", drawn),
        ):
            path, _ = accept_tree_sampled(
                torch.tensor(tree.tokens, dtype=torch.long),
                tree.parents,
                q_rows,
                p_rows,
                torch.Generator(),
            )
        scripts += [
            [*script, *[True] * (i - len(script)), False] for i in range(len(script), coin.asked)
        ]
        if coin.chance > 1e-15:
            [w] = weights
            for token, share in enumerate((w / w.sum()).tolist()):
                if share > 0:
                    found[(*(tree.tokens[node - 1] for node in path), token)] += coin.chance * share
    return found


def filled(
    tree: Tree, q: Callable[[Tokens], Row], kids: Sequence[int], below: int = 1
) -> Iterator[Tree]:
    """Add children to a root, and so many children to each of them. below: the current child."""
    if below > min(len(kids), tree.parents.count(0)):
        yield tree
        return
    for more in drawn_below(tree, below, q((tree.tokens[below - 1],)), kids[below - 1]):
        yield from filled(more, q, kids, below + 1)


def emitted_by_trees(
    q: Callable[[Tokens], Row], p: Callable[[Tokens], Row], kids: Sequence[int]
) -> dict[Tokens, float]:
    """Return the probability of every text of three tokens.

    kids: for each child of the root, the number of its children.
    """
    texts: dict[Tokens, float] = defaultdict(float)
    for first in drawn_below(Tree(), 0, q(()), len(kids)):
        for tree in filled(first, q, kids):
            for text, share in tree_outcomes(tree, p).items():
                completed = {text: tree.chance * share}
                while len(next(iter(completed))) < 3:
                    completed = {
                        (*t, y): mass * w
                        for t, mass in completed.items()
                        for y, w in enumerate(p(t))
                    }
                for t, mass in completed.items():
                    texts[t] += mass
    return {text: mass for text, mass in texts.items() if mass > 1e-12}


def shapes_of_trees(most: int) -> list[tuple[int, ...]]:
    """Return every tree of three tokens, two levels and up to `most` nodes.

    Its form is that of `emitted_by_trees`.
    """
    return [
        kids
        for children in (1, 2, 3)
        for kids in product(range(4), repeat=children)
        if children + sum(kids) <= most
    ]


def check_tree_acceptance(
    rows: Sequence[Row] = ((0.5, 0.25, 0.25), (0.1, 0.2, 0.7), (0.25, 0.75, 0.0), (0.6, 0.1, 0.3)),
    shapes: Sequence[Sequence[int]] = ((1,), (2, 0), (0, 2), (3, 0, 0), (0, 3, 0)),
) -> None:
    """Check the probabilities of the texts of a round with siblings, for any p and q."""

    def p(text: Tokens) -> Row:
        return rows[(len(text) + sum(text)) % len(rows)]

    def q(text: Tokens) -> Row:
        return rows[(1 + 2 * len(text) + sum(text)) % len(rows)]

    wanted = text_distribution(3, 3, p)
    for kids in shapes:
        assert_same_distribution(emitted_by_trees(q, p, kids), wanted)
