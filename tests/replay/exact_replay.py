"""Exact replay: a reference for `skipsearch.replay`, which drafts from every position in full.

One batched forward per depth, over many positions at once: a query sees the full model's K/V of the
text before its position, and the draft's own K/V of the tokens drafted there. Rounds are then
simulated under any exit policy and draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats, DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.engine import forward, no_grad
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan
from skipsearch.replay import simulate
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.replay import Replay, greedy_token, token_ranks
from skipsearch.replay.replay_batches import ReplayBatch, max_pass_rows
from skipsearch.replay.rounds import RoundTable


@dataclass(frozen=True)
class ExactDrafts:
    """The drafts of a mask on one prompt, from A positions to depth D.

    Entries beyond the token budget, d ≥ token_budget − a − 1, mean nothing.
    """

    accepted: np.ndarray  # [A, D] token d drafted after generated token a is the full model's
    confidence: np.ndarray  # [A, D] its top probability
    ranks: np.ndarray  # [A, D] tokens preferred to the full model's, at most MAX_RANK
    token_budget: int  # tokens allowed after the first generated one


class ExactReplay:
    """Drafts of up to `depth` tokens from every position of the texts of a replay.

    While a batch is drafted, it needs up to twice its K/V on top of the replay's memory.
    Raises: SearchError for sampled texts and for models with recurrent layers.
    """

    def __init__(self, replay: Replay, depth: int):
        if not replay.sampling.is_greedy:
            raise SearchError(
                "exact replay follows one text token by token and this task samples: replay it "
                "without `exact`"
            )
        if replay.model.spec.is_recurrent:
            raise SearchError(
                "exact replay drafts from many places of a text at once, and the recurrent states "
                f"of {replay.model.spec.id} "
                "stand at one: replay it without `exact`, or race it"
            )
        self.replay, self.model, self.depth = replay, replay.model, depth
        decoder = Decoder(self.model)
        # The texts, continued as if they had not ended.
        self.known_texts: list[list[int]] = []
        for prompt, tokens, room in zip(
            replay.prompt_ids, replay.continuations, replay.token_budgets, strict=True
        ):
            beyond = min(depth - 1, room + 1 - len(tokens)) if len(tokens) > 1 else 0
            more = (
                decoder.generate([*prompt, *tokens], beyond, ignore_eos=True).tokens
                if beyond > 0
                else []
            )
            self.known_texts.append([*tokens, *more])

    @no_grad
    def __call__(
        self, mask: SkipMask, drafting_model: ModelAdapter | None = None
    ) -> list[ExactDrafts]:
        """Return the drafts of each prompt whose continuation has at least two tokens, in order."""
        found: dict[int, ExactDrafts] = {}
        for b in self.replay.batches:
            right, confidence, rank = self._draft_batch(b, mask, drafting_model or self.model)
            for row, (prompt, length) in enumerate(zip(b.prompt_indices, b.n_valid, strict=True)):
                found[prompt] = ExactDrafts(
                    right[row, :length],
                    confidence[row, :length],
                    rank[row, :length],
                    self.replay.token_budgets[prompt],
                )
        return [found[prompt] for prompt in sorted(found)]

    def count_stats(
        self, mask: SkipMask, policy: DraftPolicy, drafting_model: ModelAdapter | None = None
    ) -> DecodeStats:
        """Return what a `Decoder` with this policy counts on these prompts."""
        return count_exact_rounds(self(mask, drafting_model), policy)

    def _draft_batch(
        self, b: ReplayBatch, mask: SkipMask, drafting_model: ModelAdapter
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (accepted, confidence, rank), all [B, T, D]; a few positions at a time."""
        texts, anchors = b.input_ids.shape
        at_once = max(
            1, min(anchors, max_pass_rows(self.model) // texts, b.plan.first_slot // self.depth)
        )  # no more spare slots than text
        cache = self._copy_with_spare_slots(b, at_once * self.depth)
        drafted = torch.full((texts, anchors, self.depth), -1, device=b.input_ids.device)
        confidence = torch.zeros(texts, anchors, self.depth, device=b.input_ids.device)
        rank, known = torch.zeros_like(drafted), self._known_tokens(b)
        for start in range(0, anchors, at_once):
            some = slice(start, min(start + at_once, anchors))
            token = b.input_ids[:, some]
            room = max(self.replay.token_budgets[p] for p in b.prompt_indices) - start - 1
            for d in range(min(self.depth, room)):
                plan = self._make_plan(b, start, token.shape[1], d)
                logits = forward(drafting_model, token, cache, plan, mask)
                token, confidence[:, some, d] = greedy_token(logits)
                drafted[:, some, d] = token
                rank[:, some, d] = token_ranks(known[:, some, d].clamp(min=0), logits)
        return (drafted == known).cpu().numpy(), confidence.cpu().numpy(), rank.cpu().numpy()

    def _known_tokens(self, b: ReplayBatch) -> torch.Tensor:
        """Return the full model's tokens after each position, [B, T, D]; −2: unknown."""
        anchors = b.input_ids.shape[1]
        known = torch.full((len(b.input_ids), anchors + self.depth), -2, device=b.input_ids.device)
        for row, prompt in enumerate(b.prompt_indices):
            following = torch.tensor(self.known_texts[prompt][1:], device=known.device)
            known[row, : len(following)] = following
        return known.unfold(1, self.depth, 1)[:, :anchors]

    def _make_plan(self, b: ReplayBatch, start: int, count: int, draft_depth: int) -> PassPlan:
        """Plan the pass over token d of the drafts from `count` positions.

        Slots after the text hold all tokens of depth 0, then all of depth 1, and so on; a query
        sees those of its own position.
        """
        device, context = b.input_ids.device, self.model.spec.context_length
        begins = torch.tensor(
            [len(self.replay.prompt_ids[p]) for p in b.prompt_indices], device=device
        )
        mine = torch.arange(count, device=device)
        anchors = begins[:, None] + start + mine  # [B, C]: positions of the anchors
        text = torch.arange(b.plan.first_slot, device=device)
        earlier = text < anchors[..., None]  # [B, C, longest]
        own = (
            (mine == mine[:, None]).repeat(1, draft_depth + 1).expand(len(begins), -1, -1)
        )  # [B, C, (d + 1) · C]
        places = torch.cat(
            [text.expand(len(begins), -1), *(anchors + e for e in range(draft_depth + 1))], dim=1
        )
        if context is not None:  # padding, and drafts that nobody would have room for
            places = places.clamp(max=context - 1)
        slot = b.plan.first_slot + draft_depth * count
        slots = torch.arange(slot, slot + count, device=device).expand(len(begins), -1)
        return PassPlan(
            places[:, -count:].contiguous(),
            slots,
            slot + count,
            torch.cat([earlier, own], dim=-1)[:, None],
            slot,
            key_positions=places,
        )

    def _copy_with_spare_slots(self, b: ReplayBatch, spare_slots: int) -> KVCache:
        """Copy the texts' K/V into a cache with `spare_slots` further slots."""
        grown = self.model.new_cache(b.cache.batch_size, b.plan.first_slot + spare_slots)
        for layer, (keys, values) in enumerate(zip(b.cache.keys, b.cache.values, strict=True)):
            if keys is not None and values is not None:
                new_keys, new_values = grown.get_buffers(layer, keys, values)
                new_keys[:, :, : b.plan.first_slot] = keys[:, :, : b.plan.first_slot]
                new_values[:, :, : b.plan.first_slot] = values[:, :, : b.plan.first_slot]
        return grown


def rounds_from_exact_drafts(drafts: Sequence[ExactDrafts]) -> RoundTable:
    """Lay out the drafts as rounds."""
    right = np.concatenate([d.accepted.cumprod(axis=1).sum(axis=1) for d in drafts])
    rank = np.pad(
        np.concatenate([d.ranks for d in drafts]), ((0, 0), (0, 1))
    )  # unknown after the deepest token
    lengths = np.array([len(d.accepted) for d in drafts])
    ends = np.cumsum(lengths)
    room = np.concatenate([d.token_budget - 1 - np.arange(len(d.accepted)) for d in drafts])
    return RoundTable(
        right,
        rank[np.arange(len(right)), right],
        np.concatenate([d.confidence for d in drafts]),
        room,
        np.repeat(ends, lengths) - np.arange(len(right)),
        ends - lengths,
        lengths,
        looks_past_end=True,
    )


def count_exact_rounds(
    drafts: Sequence[ExactDrafts],
    policy: DraftPolicy,
    lookup_proposals: Sequence[LookupProposals] = (),
    drafter_costs: Sequence[DrafterCost | None] = (),
) -> DecodeStats:
    """Count rounds over all prompts in turn.

    Raises: SearchError for a draft length that the drafts do not reach.
    """
    rounds = rounds_from_exact_drafts(drafts)
    if policy.draft_length > rounds.longest_draft:
        raise SearchError(
            f"draft length {policy.draft_length} was asked for and drafts were replayed to depth "
            f"{rounds.longest_draft}: "
            "replay them deeper"
        )
    return simulate.simulate_rounds(rounds, policy, lookup_proposals, drafter_costs)[0]
