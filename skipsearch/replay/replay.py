"""Replay a mask's draft on the full model's own text, in one parallel pass over all positions.

The full model's continuation is generated once, and its K/V stay in the cache. A mask is then
judged by one pass over all generated positions. Each query attends to the full model's K/V at
earlier positions, and to the draft's K/V at its own position. This is exact for the first token of
a round. For later tokens it is an approximation: a real draft attends to its own K/V of the round
(`tests/replay/exact_replay.py` does so). The draft's K/V are written to spare slots after the text,
and each query attends to one of them.

If a task samples, the text is a sample, too, and the tokens that a draft would have drawn are
unknown. But if a round emits token y, the probability that the draft drew y and y was accepted is
min(p(y), q(y)) / p(y) = min(1, q(y) / p(y)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.constraint import Constraint
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.decoding.repetition import EndOnRepeat, find_loop_start
from skipsearch.engine import no_grad, run_layers
from skipsearch.engine.reduced_model import can_restrict_head, make_reduced_model
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.head_rows import HeadRows
from skipsearch.models.kv_cache import Planner
from skipsearch.models.memory import free_memory
from skipsearch.replay.recurrent_batches import RecurrentReplayBatches
from skipsearch.replay.reference_text import (
    MIN_TEXTS,
    TextSettings,
    TextStore,
    write_reference_text,
)
from skipsearch.replay.replay_batches import ReplayBatch, ReplayBatches, logit_chunks, unpad
from skipsearch.replay.segments import MAX_POSITIONS, cut_segments
from skipsearch.replay.text_kv import KV_MEMORY_FRACTION, TextKV, compute_text_kv

RECURRENT_NOTE = (
    "; masks are judged at each position from the recurrent states that it had there, and drafts "
    "are chains without siblings"
)
MAX_RANK = 5  # the largest number of siblings, plus one
NEVER = 2**31 - 1  # no text is so long

Judgement = tuple[Tensor, Tensor, Tensor]  # acceptance, confidence and rank, [N] each


@dataclass(frozen=True)
class PromptReplay:
    """The result of replaying a mask on one prompt with G generated tokens.

    Entry j belongs to the draft pass that reads generated token j and proposes token j + 1.
    """

    # [G − 1] bool: the draft predicts the full model's next token. If the text was sampled, float
    # in 0 … 1: the probability that this token was drafted and accepted.
    acceptance: np.ndarray
    confidence: np.ndarray  # [G − 1] the draft's top probability, as an exit policy reads it
    token_budget: int  # tokens allowed after the first one; the text may have fewer
    prompt_index: int = 0
    # [G − 1] rank of the full model's token in the draft, at most MAX_RANK; None: sampled text
    ranks: np.ndarray | None = None


class Replay:
    """The full model's continuations of prompts, on which any mask can be judged.

    Long texts are cut into segments (`replay/segments.py`). `prompt_ids`, `continuations` and
    `token_budgets` are those of the segments: what comes before a segment is its prompt.

    texts: the whole continuations, of the first prompts.
    drafting_model: the model that drafts, unless a call names another; None: the verifying model.
    vocabulary: the tokens that drafts can propose; None: all.
    """

    drafting_model: ModelAdapter | None = None
    vocabulary: Vocabulary | None = None

    def __init__(
        self,
        model: ModelAdapter,
        prompt_ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        end_on_repeat: EndOnRepeat,
        progress: Callable[[int, int], None] = lambda done, total: None,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        max_kv_bytes: int | None = None,
        constraint: Constraint | None = None,
        store: TextStore | None = None,
        limit_s: float | None = None,
        max_positions: int = MAX_POSITIONS,
        min_texts: int = MIN_TEXTS,
    ):
        """Let the model continue the prompts.

        sampling: the task's sampling parameters; prompt i is continued with seed + i.
        max_kv_bytes: memory for the K/V of the segments; None: a quarter of the free memory. K/V
        that do not fit are computed again for every mask. The K/V of the whole texts, from which
        those of the segments are copied, may take half as much again.
        constraint: the shape of the texts. A draft token that it forbids differs from the text.
        progress(tokens done, tokens that may be generated). store, limit_s, min_texts: as
        for `write_reference_text`. max_positions: of all segments together.
        Raises: SearchError if every continuation ends after one token, so that nothing can be
        replayed.
        """
        self.model, self.sampling, self.max_positions = model, sampling, max_positions
        settings = TextSettings(max_new_tokens, end_on_repeat, sampling, seed, constraint)
        kv_budget = (
            free_memory(model.spec.device) * KV_MEMORY_FRACTION
            if max_kv_bytes is None
            else max_kv_bytes
        )
        written = write_reference_text(
            model, prompt_ids, settings, progress, store, limit_s, kv_budget / 2, min_texts
        )
        context = model.spec.context_length
        prompts = prompt_ids[: len(written)]
        budgets = [
            (max_new_tokens if context is None else min(max_new_tokens, context - len(p))) - 1
            for p in prompts
        ]
        self.texts = [text.tokens for text in written]
        n_loops = self._cut_loops(budgets) if end_on_repeat == "loop" else 0
        if not any(len(generated) > 1 for generated in self.texts):
            n = len(prompts)
            raise SearchError(
                "the model ends every calibration prompt with its first token, so there is nothing "
                "to draft: take another task"
                if not n_loops
                else f"the model repeats itself from the first token on after {n_loops} of {n} "
                "calibration prompts and ends the others with it, and a loop does not count, so "
                "there is nothing to draft: take another task, or --chat if these are requests to "
                "a chat model"
            )
        self._last_hidden = dict[int, Tensor]()  # of texts, [1, T, H]
        self.segments = cut_segments([max(0, len(text) - 1) for text in self.texts], max_positions)
        self.prompt_ids = [
            [*prompts[s.text], *self.texts[s.text][: s.first]] for s in self.segments
        ]
        self.continuations = [self.texts[s.text][s.first : s.end + 1] for s in self.segments]
        self.token_budgets = [budgets[s.text] - s.first for s in self.segments]
        text_kv = [text.kv for text in written]
        self._compute_missing_kv(prompts, text_kv, kv_budget / 2)
        kind = RecurrentReplayBatches if model.spec.is_recurrent else ReplayBatches
        self.batches = kind(
            model,
            self.prompt_ids,
            self.continuations,
            sampling,
            max_kv_bytes,
            [text_kv[s.text] for s in self.segments],
        )
        self._text_counts: Tensor | None = None  # [V], made when it is needed
        self._restricted = dict[tuple[object, ...], tuple[ModelAdapter, HeadRows | None]]()

    @property
    def verifying_model(self) -> ModelAdapter:
        """The model that wrote the texts."""
        return self.model

    def _cut_loops(self, token_budgets: list[int]) -> int:
        """Cut each text before its loop, where its measured generation ends, too.

        token_budgets: of the texts; those of cut texts change. Returns the number of texts that
        loop from their first token on.
        """
        n_from_start = 0
        for i, text in enumerate(self.texts):
            n_before = find_loop_start(text)
            if n_before is not None:
                self.texts[i] = text[: max(1, n_before)]
                token_budgets[i] = len(self.texts[i]) - 1
                n_from_start += n_before < 2
        return n_from_start

    def _compute_missing_kv(
        self, prompts: Sequence[Sequence[int]], text_kv: list[TextKV | None], max_bytes: float
    ) -> None:
        """Compute the K/V before the last segment of each stored text, as far as memory allows.

        Otherwise, each segment and each sample of positions would read its text from the beginning.
        text_kv: gets them.
        """
        n_tokens = {s.text: s.first for s in sorted(self.segments, key=lambda s: s.first)}
        max_bytes -= sum(kv.nbytes for kv in text_kv if kv is not None)
        for i, n in n_tokens.items():
            if text_kv[i] is None and max_bytes > 0:
                text_kv[i] = kv = compute_text_kv(self.model, [*prompts[i], *self.texts[i][:n]])
                max_bytes -= 0 if kv is None else kv.nbytes

    def with_draft(
        self, drafting_model: ModelAdapter | None, vocabulary: Vocabulary | None
    ) -> Replay:
        """Return a replay of the same texts for drafts of another model or vocabulary."""
        replay = copy(self)
        replay.drafting_model, replay.vocabulary = drafting_model, vocabulary
        return replay

    def __call__(
        self,
        mask: SkipMask,
        max_prompts: int | None = None,
        batch_indices: Sequence[int] | None = None,
        drafting_model: ModelAdapter | None = None,
    ) -> list[PromptReplay]:
        """Judge a mask on each prompt whose continuation has at least two tokens.

        max_prompts: judge about this many prompts. batch_indices: judge these batches. None: all.
        drafting_model: the model that drafts, if its weights differ from the verifying model's.
        """
        drafting_model = drafting_model or self.drafting_model
        return self.judge(mask, [self.vocabulary], max_prompts, batch_indices, drafting_model)[0]

    @no_grad
    def judge(
        self,
        mask: SkipMask,
        vocabularies: Sequence[Vocabulary | None],
        max_prompts: int | None = None,
        batch_indices: Sequence[int] | None = None,
        drafting_model: ModelAdapter | None = None,
    ) -> list[list[PromptReplay]]:
        """Judge a mask with each vocabulary, from the same passes. Arguments are as for a call."""
        # Below this layer the draft equals the full model. Layers whose K/V others read run again.
        changed = min(mask.sublayers, default=2 * mask.n_layers) // 2
        first = 0 if drafting_model is not None else min([changed, *self.model.spec.lending_layers])
        prompts: list[tuple[int, int]] = []  # (prompt index, positions)
        # (acceptance, confidence, rank) by vocabulary and batch
        judged: list[list[Judgement]] = [[] for _ in vocabularies]
        for b in (
            self.batches.subset(max_prompts)
            if batch_indices is None
            else (self.batches[i] for i in batch_indices)
        ):
            states = run_layers(
                drafting_model or self.model, b.hidden_states[first], b.cache, b.plan, mask, first
            )
            of_batch = self._judge_batch(
                b, unpad(states, b.valid_positions), drafting_model or self.model, vocabularies
            )
            for by_batch, judgement in zip(judged, of_batch, strict=True):
                by_batch.append(judgement)
            prompts += zip(b.prompt_indices, b.n_valid, strict=True)
        return [self._split_prompts(prompts, by_batch) for by_batch in judged]

    def _split_prompts(
        self, prompts: Sequence[tuple[int, int]], judged: Sequence[Judgement]
    ) -> list[PromptReplay]:
        """Return the replay of each prompt, in order. prompts: (index, positions) of each."""
        ends = np.cumsum([length for _, length in prompts])[:-1]
        by_prompt = zip(
            prompts,
            *(
                np.split(torch.cat(parts).cpu().numpy(), ends)
                for parts in zip(*judged, strict=True)
            ),
            strict=True,
        )
        replays = {
            prompt: PromptReplay(
                acceptance,
                confidence,
                self.token_budgets[prompt],
                prompt,
                ranks if self.sampling.is_greedy else None,
            )
            for (prompt, _), acceptance, confidence, ranks in by_prompt
        }
        return [replays[prompt] for prompt in sorted(replays)]

    def mean_context(self) -> int:
        """Return the mean number of tokens before a position."""
        contexts = [
            len(prompt) + offset
            for prompt, text in zip(self.prompt_ids, self.continuations, strict=True)
            for offset in range(len(text))
        ]
        return round(sum(contexts) / len(contexts))

    def measure_acceptance(
        self,
        mask: SkipMask,
        max_prompts: int | None = None,
        drafting_model: ModelAdapter | None = None,
    ) -> float:
        """Return α of the mask, the mean acceptance over positions."""
        return float(
            np.concatenate(
                [r.acceptance for r in self(mask, max_prompts, drafting_model=drafting_model)]
            ).mean()
        )

    def _judge_batch(
        self,
        b: ReplayBatch,
        states: Tensor,
        drafting_model: ModelAdapter,
        vocabularies: Sequence[Vocabulary | None],
    ) -> list[Judgement]:
        """Judge the batch's positions with each vocabulary.

        states: [N, H], the input of the head.
        """
        labels = b.labels.flatten()[b.valid_positions]
        n_columns = b.labels.shape[1]
        restricted, rows = self.restrict_head(drafting_model, vocabularies)
        first_uses = [
            None if v is None else self._first_uses(b.prompt_indices, v) for v in vocabularies
        ]
        if rows is not None:
            labels = rows.rows_of(labels)
            first_uses = [None if f is None else f[:, rows.token_ids] for f in first_uses]
        judged: list[list[Judgement]] = [[] for _ in vocabularies]
        n_tokens = None if rows is None else rows.count
        for chunk in logit_chunks(self.model, len(states), n_tokens):
            logits = restricted.head(states[chunk][None])[0]
            positions = b.valid_positions[chunk].to(logits.device)
            for of_vocabulary, first_use in zip(judged, first_uses, strict=True):
                masked = logits
                if first_use is not None:
                    of_prompts = first_use[positions // n_columns]
                    masked = _hide_later_tokens(logits, of_prompts, positions % n_columns)
                target_probs = None if b.target_probs is None else b.target_probs[chunk]
                of_vocabulary.append(self.judge_logits(masked, labels[chunk], target_probs))
        return [
            (torch.cat(acceptance), torch.cat(confidence), torch.cat(rank))
            for acceptance, confidence, rank in (zip(*parts, strict=True) for parts in judged)
        ]

    def restrict_head(
        self, model: ModelAdapter, vocabularies: Sequence[Vocabulary | None]
    ) -> tuple[ModelAdapter, HeadRows | None]:
        """Return (model for the logits, its rows): of the tokens that any draft here may propose.

        At other tokens all logits would be masked. Rows None: the model has all rows.
        """
        known = [vocabulary for vocabulary in vocabularies if vocabulary is not None]
        if len(known) < len(vocabularies) or not can_restrict_head(model):
            return model, None
        key = (model, *known)
        if key not in self._restricted:
            largest = max(known, key=lambda vocabulary: len(vocabulary.token_ids()))
            reduced = make_reduced_model(model, Reading(vocabulary=largest))
            assert reduced.new_head is not None
            rows = reduced.new_head()
            of_vocabularies = (vocabulary.token_ids() for vocabulary in known)
            for tokens in (*of_vocabularies, *self.prompt_ids, *self.continuations):
                rows.add(tokens)
            self._restricted[key] = reduced.restrict(rows), rows
        return self._restricted[key]

    def judge_logits(
        self, logits: Tensor, labels: Tensor, target_probs: Tensor | None
    ) -> Judgement:
        """Return (acceptance, confidence, rank) of a draft's logits [N, V].

        labels: [N], the columns of the next tokens. target_probs: [N], the full model's
        probabilities of them, if the text was sampled.
        """
        if target_probs is None or self.batches.sampler is None:
            token, top = greedy_token(logits)
            return token == labels, top, token_ranks(labels, logits)
        q = self.batches.sampler.warp_to_probs(logits)
        acceptance = accept_probability(q.gather(1, labels[:, None])[:, 0], target_probs)
        return acceptance, q.amax(dim=-1), labels

    @no_grad
    def read_last_hidden(self, prompt_index: int) -> Tensor:
        """Return the output of the last layer at a prompt and its text but the last token.

        [1, T, H]. It is computed once for a text, which its segments share.
        """
        text = self.segments[prompt_index].text
        if text not in self._last_hidden:
            of_text = [i for i, segment in enumerate(self.segments) if segment.text == text]
            longest = max(of_text, key=lambda i: self.segments[i].end)
            ids = [[*self.prompt_ids[longest], *self.continuations[longest][:-1]]]
            tokens = torch.tensor(ids, device=self.model.spec.device)
            n_tokens = tokens.shape[1]
            plan = Planner(n_tokens, tokens.device).plan_chain(0, n_tokens)
            self._last_hidden[text] = run_layers(
                self.model,
                self.model.embed(tokens, plan.positions),
                self.model.new_cache(1, n_tokens),
                plan,
            )
        n_read = len(self.prompt_ids[prompt_index]) + len(self.continuations[prompt_index]) - 1
        return self._last_hidden[text][:, :n_read]

    def mask_unknown_tokens(
        self,
        logits: Tensor,
        prompt_index: int,
        rounds: Tensor,
        vocabularies: Sequence[Vocabulary | None],
        tokens: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield logits [N, V] for each vocabulary, without those of tokens that it does not have.

        rounds: [N], the generated token after which the draft of each row begins. The tokens of a
        prompt and of the text up to there count as known. tokens: those of the logits, [V]; None:
        all of the model's.
        """
        for vocabulary in vocabularies:
            if vocabulary is None:
                yield logits
            else:
                first_use = self._first_uses([prompt_index], vocabulary)[0]
                if tokens is not None:
                    first_use = first_use[tokens]
                yield _hide_later_tokens(logits, first_use, rounds)

    def _first_uses(self, prompt_indices: Sequence[int], vocabulary: Vocabulary) -> Tensor:
        """Return from which generated token on each token can be drafted, [prompts, V].

        0: from the first one on. A token of the vocabulary that only this prompt's continuation has
        counts as unknown until it occurs, because another prompt would not bring it.
        """
        device, vocab_size = self.model.spec.device, self.model.spec.vocab_size
        shared = torch.full((vocab_size,), NEVER, dtype=torch.int32, device=device)
        shared[list(vocabulary.token_ids())] = 0
        first_uses = shared.repeat(len(prompt_indices), 1)
        for first_use, p in zip(first_uses, prompt_indices, strict=True):
            segment = self.segments[p]
            text = self.texts[segment.text][segment.first :]
            # Reversed, so that the first occurrence of a token is written last.
            own = dict(zip(reversed(text), reversed(range(len(text))), strict=True))
            ids = torch.tensor(list(own), device=device)
            only_here = ids[self._n_texts_with(ids) == 1]
            first_use[only_here[only_here >= vocabulary.lowest]] = NEVER
            steps = torch.tensor(list(own.values()), dtype=torch.int32, device=device)
            first_use[ids] = torch.minimum(first_use[ids], steps)
            first_use[torch.tensor(self.prompt_ids[p], device=device)] = 0
        return first_uses

    def _n_texts_with(self, token_ids: Tensor) -> Tensor:
        """Return the number of continuations that have each token, [n]."""
        if self._text_counts is None:
            counts = torch.zeros(self.model.spec.vocab_size, dtype=torch.int32)
            for text in self.texts:
                counts[list(set(text))] += 1
            self._text_counts = counts.to(token_ids.device)
        return self._text_counts[token_ids]


def _hide_later_tokens(logits: Tensor, first_use: Tensor, rounds: Tensor) -> Tensor:
    """Return logits [N, V] without those of tokens that are known only after a row's round.

    first_use: [V] or [N, V], as from `_first_uses`. rounds: [N].
    """
    return logits.masked_fill(first_use > rounds[:, None], float("-inf"))


def accept_probability(q: Tensor, p: Tensor) -> Tensor:
    """Return min(1, q / p): the probability that an emitted token was drafted and accepted.

    q, p: [N], the probabilities of the token under draft and full model. The mean over tokens drawn
    from p is Σ min(p, q), the α of Leviathan et al. 2023 (theorem 3.5). p can be 0 only by
    rounding, because the pass over many tokens rounds differently from the decoding that drew them.
    """
    return (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)


def token_ranks(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return the rank of each token: how many others have a higher logit, at most MAX_RANK.

    tokens: [...]. logits: [..., V]. Returns [...].
    """
    own = logits.gather(-1, tokens[..., None])
    ranks = (logits > own).sum(dim=-1).clamp(max=MAX_RANK)
    return ranks.masked_fill(own[..., 0] == float("-inf"), MAX_RANK)  # it cannot be drafted


def greedy_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a draft's greedy tokens [...] and their probabilities [...], from logits [..., V]."""
    top = logits.max(dim=-1)
    # The sum of the exponentials alone: a softmax over a large vocabulary would write all of them.
    return top.indices, (top.values.float() - logits.float().logsumexp(dim=-1)).exp()
