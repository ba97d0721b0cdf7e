"""Replay a draft head from every position of the texts, step by step as rounds draft.

A step of every round is one pass. Its rows attend to the keys that decoding has in that step
(`plan_depth`), so the replay is exact for each step that an accepted draft makes. After a wrong
token, a round would read that token, and replay reads the text's instead. This affects confidences
of rejected tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from skipsearch.core.reading import Vocabulary
from skipsearch.drafters.mtp.weights import DraftHead, plan_depth
from skipsearch.engine import no_grad
from skipsearch.engine.sampler import TemperatureSampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.head_rows import HeadRows
from skipsearch.replay.replay import Replay, accept_probability, greedy_token, token_ranks
from skipsearch.replay.rounds import MAX_ROUND_DRAFT, RoundTable

_SEED = 0


@no_grad
def replay_draft_head(
    replay: Replay, head: DraftHead, vocabularies: Sequence[Vocabulary | None] = (None,)
) -> list[RoundTable]:
    """Return the rounds of a draft head with each vocabulary, from the same passes.

    A vocabulary is the tokens that the head can draft; None: all.
    """
    randoms = [np.random.default_rng(_SEED) for _ in vocabularies]
    indices = tuple(i for i, text in enumerate(replay.continuations) if len(text) > 1)
    adapter, rows = replay.restrict_head(head.adapter, vocabularies)
    by_prompt = [
        _replay_prompt(replay, head, adapter, rows, i, vocabularies, randoms) for i in indices
    ]
    return [_make_table(replay, indices, parts) for parts in zip(*by_prompt, strict=True)]


def _make_table(
    replay: Replay, indices: tuple[int, ...], parts: Sequence[tuple[np.ndarray, ...]]
) -> RoundTable:
    """Return the rounds of prompts. parts: of each, as `_replay_prompt` returns them."""
    accepted_len, rank_at_mismatch, confidence = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    return RoundTable.lay_out(
        accepted_len,
        rank_at_mismatch,
        confidence,
        indices,
        [len(part[0]) for part in parts],
        [replay.token_budgets[i] for i in indices],
    )


def _replay_prompt(
    replay: Replay,
    head: DraftHead,
    adapter: ModelAdapter,
    head_rows: HeadRows | None,
    prompt_index: int,
    vocabularies: Sequence[Vocabulary | None],
    randoms: Sequence[np.random.Generator],
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (accepted length [A], rank at the first mismatch [A], confidence [A, steps]) by
    vocabulary.

    adapter, head_rows: from `_restrict_head`. randoms: one generator for each vocabulary.
    """
    model, device = head.model, head.model.spec.device
    prompt, text = list(replay.prompt_ids[prompt_index]), replay.continuations[prompt_index]
    n_rounds = len(text) - 1
    tokens = torch.tensor([[*prompt, *text[:-1]]], device=device)
    n_rows, first = tokens.shape[1] - 1, len(prompt) - 1  # the first row that drafts
    states = replay.read_last_hidden(prompt_index)
    target_probs = None
    if not replay.sampling.is_greedy:
        sampler = TemperatureSampler(replay.sampling, torch.Generator(device))
        target_probs = sampler.warp_to_probs(model.head(states[:, len(prompt) :])[0])
    states = head.read_states(states)
    n_steps = min(MAX_ROUND_DRAFT, n_rounds)
    hidden, cache = states[:, :-1], head.new_cache(n_rows + n_steps * n_rounds)
    shape = len(vocabularies), n_rounds, MAX_ROUND_DRAFT
    right, ranks = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=int)
    confidence = np.ones(shape)
    for depth in range(n_steps):
        start = first + depth if depth else 0
        plan = plan_depth(n_rows, depth, device, first)
        hidden = head.run(hidden, tokens[:, start + 1 :], cache, plan)
        if depth == 0:
            hidden = hidden[:, first:]
        # Of the rounds 0 … n_rounds − depth − 1.
        logits = head.compute_logits(adapter, hidden)[0]
        rounds = torch.arange(len(logits), device=device)
        labels = torch.tensor(text[1 + depth :], device=device)
        known, columns = slice(0, len(labels)), labels
        if head_rows is not None:
            columns = head_rows.rows_of(labels)
        by_vocabulary = replay.mask_unknown_tokens(
            logits,
            prompt_index,
            rounds,
            vocabularies,
            None if head_rows is None else head_rows.token_ids,
        )
        for v, masked in enumerate(by_vocabulary):
            if target_probs is None:
                token, top = greedy_token(masked)
                right[v, known, depth] = (token == columns).cpu().numpy()
                ranks[v, known, depth] = token_ranks(columns, masked).cpu().numpy()
            else:
                q = sampler.warp_to_probs(masked)
                p, top = target_probs[depth:].gather(1, labels[:, None])[:, 0], q.amax(dim=-1)
                accept = accept_probability(q.gather(1, columns[:, None])[:, 0], p).cpu().numpy()
                right[v, known, depth] = randoms[v].random(len(labels)) < accept
            confidence[v, known, depth] = top.float().cpu().numpy()
        hidden = hidden[:, :-1]
    accepted_len = right.cumprod(axis=2).sum(axis=2)
    at_mismatch = np.pad(ranks, ((0, 0), (0, 0), (0, 1)))
    rows = np.arange(n_rounds)
    return [
        (accepted, at[rows, accepted], sure)
        for accepted, at, sure in zip(accepted_len, at_mismatch, confidence, strict=True)
    ]
