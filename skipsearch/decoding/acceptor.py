"""Accept the draft tokens of one request: greedy or sampled, with processors or a constraint.

A constraint makes the masked model the model whose tokens are emitted: a logit of a token that is
not legal after the tokens before it is -inf. This is the model of which drafting is lossless. It is
not the distribution of the model's texts given that they are valid, for which no token-by-token
mask exists (arXiv 2605.07698).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skipsearch.constraints import Matcher
from skipsearch.core.sequences import common_prefix_length
from skipsearch.decoding.acceptance import accept_greedy, accept_sampled
from skipsearch.decoding.processed import ConstraintProcessor, ProcessedAcceptance, mask_logits
from skipsearch.decoding.stopping import StopCondition
from skipsearch.decoding.trees import accept_tree_greedy, accept_tree_sampled
from skipsearch.drafters import DecodeContext, Draft, DraftSession, PartialPass
from skipsearch.engine.sampler import TemperatureSampler, TokenSampler

FORCED_KIND = "forced"  # the name of what drafts forced tokens, in statistics and traces
MAX_FORCED = 32  # forced tokens of a round; almost all are accepted


class Acceptor:
    """The acceptance of one request.

    processed: None if the request has no processors. constraint: None if it has no constraint; its
    matcher is the state after all emitted tokens.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        generator: torch.Generator,
        stop_condition: StopCondition,
        processed: ProcessedAcceptance | None = None,
        constraint: ConstraintProcessor | None = None,
    ):
        self.sampler, self.generator, self.stop_condition = sampler, generator, stop_condition
        self.processed, self.constraint = processed, constraint

    def cut(self, draft: Draft) -> Draft | None:
        """Remove the draft tokens that the constraint forbids, before they cost a row.

        Returns None if none is left. A chain is cut at its first illegal token. Sampling then
        requires that q is the distribution of the legal tokens alone, because only legal tokens
        reach the acceptance. A sampled tree is not cut: its illegal tokens have p = 0.
        """
        if self.constraint is None:
            return draft
        matcher = self.constraint.matcher
        tokens = draft.tokens.tolist()
        if draft.parents is not None:
            return draft if draft.probs is not None else _drop_illegal(draft, tokens, matcher)
        n_legal = matcher.count_legal(tokens)
        if not n_legal:
            return None
        q = None if draft.probs is None else draft.probs[:n_legal]
        if q is not None:
            masks = make_masks(matcher, tokens[: n_legal - 1], None, q.shape[1])
            q = torch.where(torch.from_numpy(masks).to(q.device), q, 0)
            q = q / q.sum(dim=-1, keepdim=True)
        partial_pass = draft.partial_pass
        if partial_pass is not None:  # its rows: the pending token and all draft tokens but one
            partial_pass = PartialPass(partial_pass.hidden[:, :n_legal], partial_pass.next_layer)
        return Draft(draft.tokens[:n_legal], q, draft.copied_from, partial_pass=partial_pass)

    def accept(self, draft_tokens: Tensor, q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """Return (number of accepted tokens of a chain, the token after them).

        draft_tokens: [N]. q: [N, V], or None if each q is one-hot. logits: [N + 1, V].
        """
        if self.processed is not None:
            accepted = self.processed.accept(
                draft_tokens, q, logits, self.generator, self.stop_condition.push_token
            )
            if self.constraint is not None:
                self.constraint.catch_up(self.processed.ids)
            return accepted
        tokens = [] if self.constraint is None else draft_tokens.tolist()
        logits = self._mask(logits, tokens, None)
        n_accepted, token = accept_chain(self.sampler, draft_tokens, q, logits)
        self._advance([*tokens[:n_accepted], token])
        return n_accepted, token

    def accept_tree(
        self, draft_tokens: Tensor, draft: Draft, logits: Tensor
    ) -> tuple[list[int], int]:
        """Return (accepted nodes, counted from 1; the token after them)."""
        assert draft.parents is not None
        tokens = [] if self.constraint is None else draft_tokens.tolist()
        logits = self._mask(logits, tokens, draft.parents)
        if isinstance(self.sampler, TemperatureSampler):
            p = self.sampler.warp_to_probs(logits)
            nodes, token = accept_tree_sampled(
                draft_tokens, draft.parents, draft.probs, p, self.generator
            )
        else:
            nodes, token = accept_tree_greedy(draft_tokens, draft.parents, logits)
        if self.constraint is not None:
            self._advance([*(tokens[node - 1] for node in nodes), token])
        return nodes, token

    def _mask(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int] | None) -> Tensor:
        """Rule out what the constraint forbids after each row's own prefix."""
        if self.constraint is None:
            return logits
        masks = make_masks(self.constraint.matcher, tokens, parents, logits.shape[-1])
        return mask_logits(logits, masks)

    def _advance(self, tokens: Sequence[int]) -> None:
        if self.constraint is not None:
            self.constraint.advance(tokens)


def accept_chain(
    sampler: TokenSampler, draft_tokens: Tensor, q: Tensor | None, logits: Tensor
) -> tuple[int, int]:
    """Return (number of accepted tokens of a chain, the token after them).

    sampler: that of the request, greedy or not. Other arguments are as for `Acceptor.accept`.
    """
    if isinstance(sampler, TemperatureSampler):
        p = sampler.warp_to_probs(logits)
        return accept_sampled(draft_tokens, q, p, sampler.generator)
    return accept_greedy(draft_tokens, logits)


def make_masks(
    matcher: Matcher, tokens: Sequence[int], parents: Sequence[int] | None, vocab_size: int
) -> np.ndarray:
    """Return which tokens are legal after each row, bool [N + 1, V].

    Row 0 follows the emitted tokens, row i draft token i, in a chain or a tree with `parents` as in
    `Draft.parents`. A row that no legal text reaches allows all tokens. The matcher's state does
    not change.
    """
    masks = np.ones((len(tokens) + 1, vocab_size), dtype=bool)
    paths: list[list[int]] = [[]]
    for i, token in enumerate(tokens):
        paths.append([*paths[i if parents is None else parents[i]], token])
    read: list[int] = []  # what the matcher has read of a path: a chain is read once
    for mask, path in zip(masks, paths, strict=True):
        n_shared = common_prefix_length(read, path)
        matcher.roll_back(len(read) - n_shared)
        rest = path[n_shared:]
        is_legal = matcher.count_legal(rest) == len(rest)
        read = path if is_legal else path[:n_shared]
        if is_legal:
            matcher.advance(rest)
            if not matcher.has_ended:
                matcher.fill_mask(mask)
    matcher.roll_back(len(read))
    return masks


def _drop_illegal(draft: Draft, tokens: Sequence[int], matcher: Matcher) -> Draft | None:
    """Return a tree without the nodes that the constraint forbids; None if none is left."""
    assert draft.parents is not None
    assert draft.n_main is not None
    paths: list[list[int]] = [[]]
    legal_nodes, numbers = list[int](), {0: 0}  # indices; old and new numbers
    for i, (token, parent) in enumerate(zip(tokens, draft.parents, strict=True)):
        paths.append([*paths[parent], token])
        if parent in numbers and matcher.count_legal(paths[-1]) == len(paths[-1]):
            legal_nodes.append(i)
            numbers[i + 1] = len(legal_nodes)
    if not legal_nodes:
        return None
    parents = tuple(numbers[draft.parents[i]] for i in legal_nodes)
    n_main = sum(i < draft.n_main for i in legal_nodes)
    chosen = draft.tokens[torch.tensor(legal_nodes, device=draft.tokens.device)]
    if n_main == len(legal_nodes):  # a chain
        return Draft(chosen, copied_from=draft.copied_from)
    nodes = tuple(i + 1 for i in legal_nodes)
    return Draft(
        chosen, copied_from=draft.copied_from, parents=parents, n_main=n_main, own_nodes=nodes
    )


class ForcedSession(DraftSession):
    """Drafts the tokens about which the constraint leaves no choice.

    The text is forced and its tokens are not, so the tokens are verified like any others. The first
    drafter of the recipe that can continue them does so, in the same round.
    Source: fast-forward tokens of Guidance; SGLang's jump-forward decoding (arXiv 2312.07104).
    """

    def __init__(self, matcher: Matcher, sessions: Sequence[tuple[int, DraftSession]]):
        """sessions: (draft length, session) of each drafter of the recipe."""
        self.matcher, self.sessions = matcher, sessions

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        forced = self.matcher.forced_tokens()[:max_tokens]
        if not forced:
            return None
        tokens = ctx.pending.new_tensor(forced)
        for draft_length, session in self.sessions:
            n_tokens = min(draft_length, max_tokens - len(forced))
            more = session.continue_draft(ctx, forced, n_tokens) if n_tokens > 0 else None
            if more is not None:
                return Draft(torch.cat([tokens, more.tokens]), _prepend_one_hot(tokens, more.probs))
        return Draft(tokens)


def _prepend_one_hot(tokens: Tensor, probs: Tensor | None) -> Tensor | None:
    """Return the distributions of `tokens` and of the draft tokens after them; None: one-hot."""
    if probs is None:
        return None
    one_hot = torch.nn.functional.one_hot(tokens, probs.shape[1]).to(probs.dtype)
    return torch.cat([one_hot, probs])
