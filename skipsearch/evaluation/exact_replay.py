"""Exact replay: what a mask's draft does from every position at which a round could start, to full depth, on tokens of its own.

One batched forward a depth over many anchors at once: an anchor's query sees the full model's K/V of the text before the anchor and the
draft's own of the tokens that it drafted there. Real rounds are then walked on paper, under any exit policy and draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skipsearch.cache import KVCache, PassPlan
from skipsearch.decoding import Decoder
from skipsearch.engine import forward, inference
from skipsearch.errors import SearchError
from skipsearch.evaluation import simulate
from skipsearch.evaluation.continuations import Batch, most_rows
from skipsearch.evaluation.lookups import Copied
from skipsearch.evaluation.replay import Replay, most_likely, rank_of
from skipsearch.evaluation.rounds import Rounds
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.stats import DecodeStats, Price


@dataclass(frozen=True)
class Drafts:
    """A mask on one prompt. right [A, D]: token d that the draft proposes from generated token a on is the one that the full model has
    at that place; confidence [A, D]: its top probability; rank [A, D]: how many tokens it prefers there to the full model's, at most
    MOST_RANK. room: tokens that were allowed behind the first generated one; what there was no room to draft, d ≥ room − a − 1, means
    nothing."""

    right: np.ndarray
    confidence: np.ndarray
    rank: np.ndarray
    room: int


class ExactReplay:
    """Drafts of up to `depth` tokens from every position of the texts that `replay` holds. While a batch is drafted on, up to twice its K/V
    come on top of what `replay` keeps.

    Raises: SearchError for sampled texts, of which no two decoders draw the same, and for models with recurrent layers.
    """

    def __init__(self, replay: Replay, depth: int):
        if not replay.sampling.greedy:
            raise SearchError("exact replay follows one text token by token and this task samples: replay it without `exact`")
        if replay.model.spec.recurrent:
            raise SearchError(f"exact replay drafts from many places of a text at once, and the recurrent states of {replay.model.spec.id} "
                              "stand at one: replay it without `exact`, or race it")
        self.replay, self.model, self.depth = replay, replay.model, depth
        decoder = Decoder(self.model)
        self.known: list[list[int]] = []   # the texts, and what the full model would have written had they not ended
        for prompt, tokens, room in zip(replay.prompts, replay.tokens, replay.rooms, strict=True):
            beyond = min(depth - 1, room + 1 - len(tokens)) if len(tokens) > 1 else 0
            more = decoder.generate([*prompt, *tokens], beyond, ignore_eos=True).tokens if beyond > 0 else []
            self.known.append([*tokens, *more])

    @inference
    def __call__(self, mask: SkipMask, draft: ModelAdapter | None = None) -> list[Drafts]:
        """One `Drafts` for each prompt whose continuation has two tokens or more, in the order of the prompts. draft: as in `Replay`."""
        found: dict[int, Drafts] = {}
        for b in self.replay.batches:
            right, confidence, rank = self._batch(b, mask, draft or self.model)
            for row, (prompt, length) in enumerate(zip(b.prompts, b.lengths, strict=True)):
                found[prompt] = Drafts(right[row, :length], confidence[row, :length], rank[row, :length],
                                       self.replay.rooms[prompt])
        return [found[prompt] for prompt in sorted(found)]

    def stats(self, mask: SkipMask, policy: DraftPolicy, draft: ModelAdapter | None = None) -> DecodeStats:
        """What one `Decoder` with this policy counts on these prompts."""
        return walk(self(mask, draft), policy)

    def _batch(self, b: Batch, mask: SkipMask, draft: ModelAdapter) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(right, confidence, rank), all [B, T, D], a few anchors of every row at a time."""
        texts, anchors = b.fed.shape
        at_once = max(1, min(anchors, most_rows(self.model) // texts, b.longest // self.depth))  # no more spare slots than text
        cache = self._grown(b, at_once * self.depth)
        drafted = torch.full((texts, anchors, self.depth), -1, device=b.fed.device)
        confidence = torch.zeros(texts, anchors, self.depth, device=b.fed.device)
        rank, known = torch.zeros_like(drafted), self._known(b)
        for start in range(0, anchors, at_once):
            some = slice(start, min(start + at_once, anchors))
            token = b.fed[:, some]
            room = max(self.replay.rooms[p] for p in b.prompts) - start - 1
            for d in range(min(self.depth, room)):
                plan = self._plan(b, start, token.shape[1], d)
                logits = forward(draft, token, cache, plan, mask)
                token, confidence[:, some, d] = most_likely(logits)
                drafted[:, some, d] = token
                rank[:, some, d] = rank_of(known[:, some, d].clamp(min=0), logits)
        return (drafted == known).cpu().numpy(), confidence.cpu().numpy(), rank.cpu().numpy()

    def _known(self, b: Batch) -> torch.Tensor:
        """[B, T, D]: the full model's tokens behind each anchor; −2, which nobody drafts, where they are not known."""
        anchors = b.fed.shape[1]
        known = torch.full((len(b.fed), anchors + self.depth), -2, device=b.fed.device)
        for row, prompt in enumerate(b.prompts):
            following = torch.tensor(self.known[prompt][1:], device=known.device)
            known[row, :len(following)] = following
        return known.unfold(1, self.depth, 1)[:, :anchors]

    def _plan(self, b: Batch, start: int, count: int, d: int) -> PassPlan:
        """The pass that feeds token d of the drafts from `count` anchors on. Slots behind the text: all anchors' tokens of depth 0, then
        all of depth 1, …; an anchor is shown its own."""
        device, context = b.fed.device, self.model.spec.context
        begins = torch.tensor([len(self.replay.prompts[p]) for p in b.prompts], device=device)
        mine = torch.arange(count, device=device)
        anchors = begins[:, None] + start + mine                                      # [B, C]: positions of the anchors
        text = torch.arange(b.longest, device=device)
        earlier = text < anchors[..., None]                                           # [B, C, longest]
        own = (mine == mine[:, None]).repeat(1, d + 1).expand(len(begins), -1, -1)    # [B, C, (d + 1) · C]
        places = torch.cat([text.expand(len(begins), -1), *(anchors + e for e in range(d + 1))], dim=1)
        if context is not None:  # padding, and drafts that nobody would have room for
            places = places.clamp(max=context - 1)
        slot = b.longest + d * count
        slots = torch.arange(slot, slot + count, device=device).expand(len(begins), -1)
        return PassPlan(places[:, -count:].contiguous(), slots, slot + count, torch.cat([earlier, own], dim=-1)[:, None], slot,
                        key_positions=places)

    def _grown(self, b: Batch, spare: int) -> KVCache:
        """A copy of the texts' K/V with `spare` slots behind them."""
        grown = self.model.new_cache(b.cache.batch, b.longest + spare)
        for layer, (keys, values) in enumerate(zip(b.cache.keys, b.cache.values, strict=True)):
            if keys is not None and values is not None:
                new_keys, new_values = grown.buffers(layer, keys, values)
                new_keys[:, :, :b.longest] = keys[:, :, :b.longest]
                new_values[:, :, :b.longest] = values[:, :, :b.longest]
        return grown


def rounds_of(drafts: Sequence[Drafts]) -> Rounds:
    """The same as places where rounds can start, for code that walks them."""
    right = np.concatenate([d.right.cumprod(axis=1).sum(axis=1) for d in drafts])
    rank = np.pad(np.concatenate([d.rank for d in drafts]), ((0, 0), (0, 1)))   # behind the deepest token nothing is known
    lengths = np.array([len(d.right) for d in drafts])
    ends = np.cumsum(lengths)
    room = np.concatenate([d.room - 1 - np.arange(len(d.right)) for d in drafts])
    return Rounds(right, rank[np.arange(len(right)), right], np.concatenate([d.confidence for d in drafts]), room,
                  np.repeat(ends, lengths) - np.arange(len(right)), ends - lengths, lengths, exact=True)


def walk(drafts: Sequence[Drafts], policy: DraftPolicy, before: Sequence[Copied] = (), prices: Sequence[Price | None] = ()) -> DecodeStats:
    """Counts of real rounds over all prompts in turn: tokens, rounds, drafted, accepted, rejecting ones.

    Raises: SearchError for a draft length that the drafts do not reach.
    """
    rounds = rounds_of(drafts)
    if policy.draft_length > rounds.longest:
        raise SearchError(f"draft length {policy.draft_length} was asked for and drafts were replayed to depth {rounds.longest}: "
                          "replay them deeper")
    return simulate.walk(rounds, policy, before, prices)[0]
