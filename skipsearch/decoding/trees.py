"""Which path of a draft tree stands, and which token follows it. For a chain `acceptance.py` says the same with less work.

Node 0 is the pending token; node i ≥ 1 is drafted token i − 1, and hangs below node parents[i − 1]. Row i of the logits judges the children
of node i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skipsearch.decoding.acceptance import BROKEN, greedy_choice, residual
from skipsearch.errors import no_numbers


def accept_tree_greedy(drafted: Tensor, parents: Sequence[int], logits: Tensor) -> tuple[list[int], int]:
    """From the root down, always to the child that the full model would have chosen.

    drafted: [N]; logits: [N + 1, V]. Returns (the nodes that stand, the token that the full model chooses behind the last of them).
    Raises: ModelError where the logits that choose a token on the way are not numbers.
    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy.
    """
    *tokens, = torch.cat([drafted, greedy_choice(logits)]).tolist()   # one read from the device for a round
    proposed, chosen = tokens[:len(parents)], tokens[len(parents):]
    path, node = list[int](), 0
    while True:
        if chosen[node] == BROKEN:
            raise no_numbers()
        child = next((i for i in _children(parents, node) if proposed[i - 1] == chosen[node]), None)
        if child is None:
            return path, chosen[node]
        path.append(node := child)


def accept_tree_sampled(drafted: Tensor, parents: Sequence[int], q: Tensor | None, p: Tensor,
                        generator: torch.Generator) -> tuple[list[int], int]:
    """Recursive rejection: the children of a node are tested in order. Token x stands with probability min(1, r(x) / q(x)), where r starts
    as p. If it falls, r becomes max(r − q, 0) and q loses x, both renormalised. If all fall, the next token is drawn from r.

    So each token is distributed as p, provided that whether a child is there does not depend on its own token or on later ones.
    drafted: [N]; q: [N, V], or None where the draft was certain of each token (a one-hot q); p: [N + 1, V].
    Returns (the nodes that stand, the token that follows the last of them).
    Raises: ModelError where a distribution on the way is not one of numbers.
    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyStochastic; drawn without replacement: Jeon et al. 2024, section 3.
    """
    path, node, tokens = list[int](), 0, drafted.tolist()
    while True:
        left = p[node]
        if bool(left[0].isnan()):   # a softmax of anything but numbers is all NaN
            raise no_numbers()
        below, drawn_from = None, None
        for child in _children(parents, node):
            token = tokens[child - 1]
            if q is not None and drawn_from is None:
                drawn_from = q[child - 1]
            u = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
            if bool(u * (1 if drawn_from is None else drawn_from[token]) < left[token]):
                below = child
                break
            left = residual(left, drawn_from, drafted[child - 1])
            if drawn_from is not None:
                drawn_from = residual(drawn_from, None, drafted[child - 1])   # without the token
        if below is None:
            return path, int(torch.multinomial(left, 1, generator=generator))
        path.append(node := below)


def ends_in_a_rejection(path: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether something was proposed behind the last node that stands."""
    return (path[-1] if path else 0) in parents


def _children(parents: Sequence[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents, 1) if parent == node]
