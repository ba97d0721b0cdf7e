"""Replay a second model on the full model's text, in one parallel pass over each text.

The draft model reads all of the text under its mask, as it does in decoding. Replay is therefore
exact as long as draft tokens are accepted, and no other token counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.drafters.draft_model.shared_tokens import SharedTokens
from skipsearch.engine import can_start_midway, forward, no_grad, run_layers
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.recurrent_batches import RecurrentReplayBatches
from skipsearch.replay.replay import MAX_RANK, Judgement, PromptReplay, Replay
from skipsearch.replay.replay_batches import ReplayBatches, logit_chunks


class DraftModelReplay(Replay):
    """The texts of a replay, on which masks of a draft model are judged.

    `model` is the draft model, so searches vary its mask, bits and vocabulary. Texts and
    vocabularies have the full model's token ids.
    """

    def __init__(self, full: Replay, draft_model: ModelAdapter, tokens: SharedTokens):
        """full: the replay of the full model."""
        self.__dict__.update(full.__dict__)
        self.full, self.model, self.tokens = full, draft_model, tokens
        self.drafting_model = self.vocabulary = None
        kind = RecurrentReplayBatches if draft_model.spec.is_recurrent else ReplayBatches
        # Hidden states of a few positions, for searchers; none stay in memory.
        self.batches = kind(
            draft_model,
            [tokens.to_own(prompt) for prompt in full.prompt_ids],
            [tokens.to_own(text) for text in full.continuations],
            max_kv_bytes=0,
        )

    @property
    def verifying_model(self) -> ModelAdapter:
        return self.full.model

    @property
    def _ends_before_head(self) -> bool:
        """Whether passes return hidden states, so that no more logits than needed are in memory."""
        return can_start_midway(self.model) and not self.model.spec.is_recurrent

    @no_grad
    def judge(
        self,
        mask: SkipMask,
        vocabularies: Sequence[Vocabulary | None],
        max_prompts: int | None = None,
        batch_indices: Sequence[int] | None = None,
        drafting_model: ModelAdapter | None = None,
    ) -> list[list[PromptReplay]]:
        if batch_indices is None:
            batch_indices = self.batches.spread(max_prompts)
        prompts = [p for i in batch_indices for p in self.batches.prompt_indices[i]]
        text_of = [segment.text for segment in self.segments]
        replays: list[list[PromptReplay]] = [[] for _ in vocabularies]
        for _, of_text in groupby(sorted(prompts, key=text_of.__getitem__), text_of.__getitem__):
            for of_prompt in self._judge_text(
                list(of_text), mask, vocabularies, drafting_model or self.drafting_model
            ):
                for of_vocabulary, replay in zip(replays, of_prompt, strict=True):
                    of_vocabulary.append(replay)
        return [sorted(of_one, key=lambda replay: replay.prompt_index) for of_one in replays]

    def _judge_text(
        self,
        prompts: Sequence[int],
        mask: SkipMask,
        vocabularies: Sequence[Vocabulary | None],
        drafting_model: ModelAdapter | None,
    ) -> Iterator[list[PromptReplay]]:
        """Yield the replay of each segment of a text, by vocabulary. prompts: their indices."""
        longest = max(prompts, key=lambda p: self.segments[p].end)
        text = [*self.prompt_ids[longest], *self.continuations[longest][:-1]]
        # [rows, H], or logits [rows, V] if the engine runs whole passes only
        states = self._read(drafting_model or self.model, text, mask)
        for p in prompts:
            first, n = len(self.prompt_ids[p]), len(self.continuations[p]) - 1
            rows = states[first : first + n]
            judged: list[list[Judgement]] = [[] for _ in vocabularies]
            for chunk in logit_chunks(self.verifying_model, len(rows)) or [slice(0, 0)]:
                for of_vocabulary, judgement in zip(
                    judged, self._judge_rows(p, rows[chunk], chunk, vocabularies), strict=True
                ):
                    of_vocabulary.append(judgement)
            yield [self._make_replay(p, n, of_vocabulary) for of_vocabulary in judged]

    def _read(self, model: ModelAdapter, text: Sequence[int], mask: SkipMask) -> Tensor:
        """Return the inputs of the head at each token, [rows, H], or logits, [rows, V].

        There are no rows after the context of the draft model, where it does not draft.
        """
        own, device = self.tokens.to_own(text)[: model.spec.context_length], model.spec.device
        rows = torch.tensor([own], device=device)
        cache, plan = (
            model.new_cache(1, len(own)),
            Planner(len(own), device).plan_chain(0, len(own)),
        )
        if self._ends_before_head:
            return run_layers(model, model.embed(rows, plan.positions), cache, plan, mask)[0]
        return forward(model, rows, cache, plan, None if model.spec.is_recurrent else mask)[0]

    def _judge_rows(
        self, prompt: int, rows: Tensor, chunk: slice, vocabularies: Sequence[Vocabulary | None]
    ) -> Iterator[Judgement]:
        """Yield the judgement of some positions of a segment with each vocabulary."""
        if self._ends_before_head:
            rows = self.model.head(rows[None])[0]
        logits = self.tokens.to_full_logits(rows)
        rounds = torch.arange(chunk.start, chunk.start + len(rows), device=logits.device)
        labels = torch.tensor(self.continuations[prompt][1:], device=logits.device)[rounds]
        probs = self.full.batches.target_probs_of(prompt)
        for masked in self.full.mask_unknown_tokens(logits, prompt, rounds, vocabularies):
            yield self.full.judge_logits(masked, labels, None if probs is None else probs[rounds])

    def _make_replay(self, prompt: int, n: int, judged: Sequence[Judgement]) -> PromptReplay:
        """Return the replay of a segment with `n` positions. Nothing is drafted at the last ones
        if no row judges them.
        """
        acceptance, confidence, ranks = map(torch.cat, zip(*judged, strict=True))
        missing = (0, n - len(acceptance))
        return PromptReplay(
            F.pad(acceptance, missing).cpu().numpy(),
            F.pad(confidence, missing).cpu().numpy(),
            self.token_budgets[prompt],
            prompt,
            F.pad(ranks, missing, value=MAX_RANK).cpu().numpy()
            if self.sampling.is_greedy
            else None,
        )
