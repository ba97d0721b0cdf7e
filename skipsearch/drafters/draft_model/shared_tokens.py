"""Tokens that a draft model shares with the full model, and their ids in both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skipsearch.core.reading import Vocabulary
from skipsearch.drafters.base import Draft
from skipsearch.engine.sampler import TokenSampler
from skipsearch.errors import MaskError, ModelError
from skipsearch.models.adapter import DraftScores, ModelAdapter


@dataclass(frozen=True)
class SharedTokens:
    """The ids 0 … `count` − 1 of a draft model are the same tokens as those of the full model.

    Later ids are tokens that one of both models lacks, or unused rows of its embedding.
    """

    count: int
    own_size: int  # ids of the draft model
    full_size: int  # ids of the full model
    # [count], the full model's id of each token of the draft model, and the reverse for the host.
    # None: the same ids.
    full_ids: Tensor | None = None
    own_ids: tuple[int, ...] | None = None

    def to_own(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft model's ids of a text. It reads a token that it lacks as its token 0."""
        if self.own_ids is None and self.count == self.full_size:
            return list(tokens)
        ids = range(self.count) if self.own_ids is None else self.own_ids
        return [ids[token] if token < self.count else 0 for token in tokens]

    def to_own_vocabulary(self, vocabulary: Vocabulary | None) -> Vocabulary | None:
        """Return the same tokens by the draft model's ids; None if they are nearly all.

        Raises: MaskError for a token outside the full model's vocabulary.
        """
        if vocabulary is None:
            return None
        tokens = vocabulary.token_ids()
        if tokens and tokens[-1] >= self.full_size:
            raise MaskError(
                f"token {tokens[-1]} is outside a vocabulary of {self.full_size:,}; was this "
                "vocabulary made for another model?"
            )
        own = self.to_own([token for token in tokens if token < self.count])
        # Engines add a few of the lowest ids, which must be shared, too.
        is_nearly_all = len(own) > self.count - _MOST_ADDED
        return None if is_nearly_all else Vocabulary.from_ids(own)

    def restrict(self, sampler: TokenSampler) -> TokenSampler:
        """Return a sampler that never chooses a token that the full model lacks."""
        return sampler if self.count == self.own_size else _FirstTokensSampler(sampler, self.count)

    def to_full_logits(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] by the full model's ids; -inf for tokens that the draft lacks."""
        if self.full_ids is None and logits.shape[-1] == self.full_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.full_size), float("-inf"))
        full[..., slice(self.count) if self.full_ids is None else self.full_ids] = logits[
            ..., : self.count
        ]
        return full

    def to_full(self, draft: Draft) -> Draft:
        """Return a draft of the draft model with the full model's ids."""
        tokens, probs = draft.tokens, draft.probs
        if self.full_ids is not None:
            tokens = self.full_ids[tokens]
        if probs is not None and (self.full_ids is not None or probs.shape[1] != self.full_size):
            own_probs, probs = probs, probs.new_zeros(len(probs), self.full_size)
            ids = slice(self.count) if self.full_ids is None else self.full_ids
            probs[:, ids] = own_probs[:, : self.count]
        return replace(draft, tokens=tokens, probs=probs)


_MOST_ADDED = 64  # rows that an engine may add to a part of the head, so that it has whole panels


def match_tokens(draft_model: ModelAdapter, model: ModelAdapter) -> SharedTokens:
    """Compare two vocabularies token by token.

    Both have the same tokens, in any order. One may have more at its end. Without a tokenizer to
    compare, both have as many ids.
    Raises: ModelError that names the first different token, with both ids.
    """
    own_size, full_size = draft_model.spec.vocab_size, model.spec.vocab_size
    names = f"{draft_model.spec.id} cannot draft for {model.spec.id}"
    own, full = _list_names(draft_model), _list_names(model)
    if own is None or full is None:
        if own_size != full_size:
            raise ModelError(
                f"{names}: one of both has no tokenizer to compare, and their vocabularies have "
                f"{own_size:,} and {full_size:,} tokens; take a draft model with as many"
            )
        return SharedTokens(full_size, own_size, full_size)
    count = min(len(own), len(full))
    differing = next((i for i in range(count) if own[i] != full[i]), None)
    if differing is None:
        return SharedTokens(min(own_size, full_size), own_size, full_size)
    own_places = {name: i for i, name in enumerate(own[:count])}
    full_places = {name: i for i, name in enumerate(full[:count])}
    if own_places.keys() != full_places.keys() or len(own_places) != count:
        missing = next((i for i in range(count) if full[i] not in own_places), differing)
        own_id = next((i for i, name in enumerate(own) if name == full[missing]), None)
        raise ModelError(
            f"{names}: the token {full[missing]!r} has the id {missing} in {model.spec.id} and "
            f"{'no id' if own_id is None else f'the id {own_id}'} in {draft_model.spec.id}; take a "
            "draft model with the same tokens, such as a smaller one of the same family"
        )
    return SharedTokens(
        count,
        own_size,
        full_size,
        torch.tensor([full_places[name] for name in own[:count]], device=model.spec.device),
        tuple(own_places[name] for name in full[:count]),
    )


def _list_names(model: ModelAdapter) -> list[Any] | None:
    """Return the name of each token id, up to the last that has one, with None for unused ids.

    None: nothing names the model's tokens.
    """
    if not hasattr(model.tokenizer, "get_vocab"):
        return None
    ids: dict[str, int] = model.tokenizer.get_vocab()
    names: list[Any] = [None] * model.spec.vocab_size
    for name, token in ids.items():
        if token < len(names):
            names[token] = name
    while names and names[-1] is None:
        names.pop()
    return names


class _FirstTokensSampler:
    """A sampler that chooses among the first `count` tokens alone."""

    is_greedy = False  # no engine may choose among all tokens by itself
    draw_settings = None

    def __init__(self, sampler: TokenSampler, count: int):
        self.sampler, self.count = sampler, count

    @property
    def key(self) -> Hashable:
        return self.sampler.key, self.count

    @property
    def n_choices(self) -> int:
        return self.sampler.n_choices

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        return self.sampler.score(logits[..., : self.count], with_confidence)

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        return self.sampler.draw(scores)

    def top(self, n_choices: int) -> TokenSampler:
        return _FirstTokensSampler(self.sampler.top(n_choices), self.count)
