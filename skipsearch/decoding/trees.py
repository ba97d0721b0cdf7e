"""Accept a path of a draft tree, and choose the token after it.

For a chain, `acceptance.py` gives the same result with less work. Node 0 is the pending token. If i
≥ 1, node i is draft token i − 1, a child of node parents[i − 1]. Row i of the logits decides which
child of node i is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skipsearch.decoding.acceptance import NOT_FINITE, choose_greedy, residual
from skipsearch.engine import draws
from skipsearch.errors import non_finite_logits


def accept_tree_greedy(
    draft_tokens: Tensor, parents: Sequence[int], logits: Tensor
) -> tuple[list[int], int]:
    """Accept the longest path from the root on which each node is the full model's choice.

    draft_tokens: [N]; logits: [N + 1, V]. Returns (accepted nodes, the full model's choice after
    the last of them). Raises: ModelError if the logits of a token of this path are not finite.
    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy."""
    # Copy from the device once per round.
    tokens = torch.cat([draft_tokens, choose_greedy(logits)]).tolist()
    proposed, chosen = tokens[: len(parents)], tokens[len(parents) :]
    path, node = list[int](), 0
    while True:
        if chosen[node] == NOT_FINITE:
            raise non_finite_logits()
        child = next(
            (i for i in _list_children(parents, node) if proposed[i - 1] == chosen[node]), None
        )
        if child is None:
            return path, chosen[node]
        path.append(node := child)


def accept_tree_sampled(
    draft_tokens: Tensor,
    parents: Sequence[int],
    q: Tensor | None,
    p: Tensor,
    generator: torch.Generator,
) -> tuple[list[int], int]:
    """Accept a path by recursive rejection sampling, so that each token is distributed as p.

    The children of a node are tested in order. Token x is accepted with probability min(1, r(x) /
    q(x)). At first, r is p. If x is rejected, r becomes max(r − q, 0), and x is removed from q;
    both are renormalised. If all children are rejected, the next token is drawn from r. Tokens are
    distributed as p if the draft decides whether a node has one more child before it draws this
    child's token.

    draft_tokens: [N]; q: [N, V], or None if each q is one-hot; p: [N + 1, V]. Returns (accepted
    nodes, the token after the last of them). Raises: ModelError if a distribution of this path is
    NaN. Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyStochastic; drawn without
    replacement: Jeon et al. 2024, section 3.
    """
    path, node, tokens = list[int](), 0, draft_tokens.tolist()
    while True:
        target = p[node]
        if bool(target[0].isnan()):  # a softmax of logits that are not finite is NaN everywhere
            raise non_finite_logits()
        accepted_child, drawn_from = None, None
        for child in _list_children(parents, node):
            token = tokens[child - 1]
            if q is not None and drawn_from is None:
                drawn_from = q[child - 1]
            u = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
            if bool(u * (1 if drawn_from is None else drawn_from[token]) < target[token]):
                accepted_child = child
                break
            target = residual(target, drawn_from, draft_tokens[child - 1])
            if drawn_from is not None:
                # Siblings are drawn without replacement.
                drawn_from = residual(drawn_from, None, draft_tokens[child - 1])
        if accepted_child is None:
            return path, int(draws.draw_tokens(target, generator))
        path.append(node := accepted_child)


def was_rejected(accepted_nodes: Sequence[int], parents: Sequence[int]) -> bool:
    """Return whether a draft token was rejected: the last accepted node has children."""
    return (accepted_nodes[-1] if accepted_nodes else 0) in parents


def _list_children(parents: Sequence[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents, 1) if parent == node]
