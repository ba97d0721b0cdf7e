"""Batches of texts that the full model generated; one pass judges a mask at all positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.engine import no_grad, run_layers
from skipsearch.engine.sampler import GREEDY, SamplingParams, TemperatureSampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.memory import free_memory
from skipsearch.replay.text_kv import KV_MEMORY_FRACTION, TextKV, bytes_of_a_slot

MAX_ROUND_DRAFT = 16  # most draft tokens of a round of a simulation
MAX_BATCH_PROMPTS = 16
# Rows of a pass, padding included. Enough to keep the device busy, few enough for little padding.
MAX_PASS_ROWS = {"cpu": 256, "cuda": 2048}
# A mask is judged on a few batches first, so there are about this many, unless they would have so
# few rows that each row takes longer.
MIN_BATCHES, MIN_PASS_ROWS = 12, 64
# Logits at a time. They fit into a CPU's cache, or into a GPU's memory.
MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
MIN_LOGIT_ROWS = 16  # a head over fewer rows is slower for each


@dataclass(frozen=True)
class ReplayBatch:
    """B texts of similar length, padded on the right to T positions."""

    input_ids: Tensor  # [B, T] generated tokens 0 … G − 2
    labels: Tensor  # [B, T] generated tokens 1 … G − 1
    valid_positions: Tensor  # [N] entries without padding, in the flattened [B · T]
    cache: KVCache
    plan: PassPlan  # of a pass over `input_ids`: each query sees the text before it and itself
    prompt_indices: tuple[int, ...]  # [B]
    n_valid: tuple[int, ...]  # [B] positions without padding
    # [B, T, H] each: the full model's hidden states before each layer, and before the head
    hidden_states: tuple[Tensor, ...]
    # [N] the full model's probability of `labels`; None: greedy text
    target_probs: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of K/V and hidden states."""
        return self.cache.nbytes + sum(h.nbytes for h in self.hidden_states)


class ReplayBatches:
    """The texts with at least two generated tokens, in batches.

    K/V and hidden states stay in memory up to `max_kv_bytes` (None: a quarter of the device's free
    memory). A batch that does not fit is computed again whenever it is read, with bit-identical
    results. While it is read, it needs memory beyond `max_kv_bytes`.
    """

    def __init__(
        self,
        model: ModelAdapter,
        prompt_ids: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        sampling: SamplingParams = GREEDY,
        max_kv_bytes: int | None = None,
        prefix_kv: Sequence[TextKV | None] = (),
    ):
        """Group the texts.

        prefix_kv: for each text, the full model's K/V of at least its prompt, if they are known.
        They are copied instead of computed. (): none are known.
        """
        self._prefix_kv = prefix_kv or (None,) * len(prompt_ids)
        self.model, self.prompt_ids, self.continuations = model, prompt_ids, continuations
        self.sampler = (
            None
            if sampling.is_greedy
            else TemperatureSampler(sampling, torch.Generator(model.spec.device))
        )
        self.prompt_indices = self._group_prompts(
            [max(0, len(generated) - 1) for generated in continuations]
        )
        self._target_probs: dict[tuple[int, ...], Tensor] = {}
        self._resident: dict[tuple[int, ...], ReplayBatch] = {}
        budget = (
            free_memory(model.spec.device) * KV_MEMORY_FRACTION
            if max_kv_bytes is None
            else max_kv_bytes
        )
        slot = bytes_of_a_slot(model)
        for indices in self.prompt_indices:
            budget -= self._estimate_nbytes(indices, slot)
            if budget >= 0:
                self._resident[indices] = self._build(indices)
            elif self.sampler is not None:
                self._build(indices)  # stores its target probabilities

    @property
    def n_resident(self) -> int:
        """Batches whose K/V stay in memory."""
        return len(self._resident)

    def __len__(self) -> int:
        return len(self.prompt_indices)

    def __getitem__(self, i: int) -> ReplayBatch:
        indices = self.prompt_indices[i]
        return self._resident[indices] if indices in self._resident else self._build(indices)

    def __iter__(self) -> Iterator[ReplayBatch]:
        return (self[i] for i in range(len(self)))

    def subset(self, max_prompts: int | None) -> Iterator[ReplayBatch]:
        """Yield batches spread evenly from short to long texts; None: every batch.

        max_prompts: about how many texts they have together.
        """
        return (self[i] for i in self.spread(max_prompts))

    def spread(self, max_prompts: int | None) -> list[int]:
        """Return the indices of the batches of `subset`."""
        texts = sum(map(len, self.prompt_indices))
        count = (
            len(self)
            if max_prompts is None
            else min(len(self), max(1, round(len(self) * max_prompts / texts)))
        )
        return [(2 * i + 1) * len(self) // (2 * count) for i in range(count)]

    def target_probs_of(self, prompt: int) -> Tensor | None:
        """Return the full model's probabilities of a text's labels, [G − 1]; None: greedy text."""
        for indices, probs in self._target_probs.items():
            if prompt in indices:
                sizes = [len(self.continuations[i]) - 1 for i in indices]
                return probs.split(sizes)[indices.index(prompt)]
        return None

    def build_sample(self, n_texts: int, n_positions: int) -> ReplayBatch:
        """Build one batch of the first positions of texts of medium length.

        Searchers observe hidden states on it. A model that cannot batch has one text in it.
        """
        texts = [i for indices in self.prompt_indices for i in indices]
        n_texts = n_texts if self.model.spec.ragged_batches else 1
        start = max(0, (len(texts) - n_texts) // 2)
        begun = copy(self)
        begun.continuations = [text[: n_positions + 1] for text in self.continuations]
        begun._target_probs = {}
        return begun._build(tuple(texts[start : start + n_texts]))

    def _group_prompts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the text indices of each batch. lengths: positions of each text."""
        if not self.model.spec.ragged_batches:
            return [
                (i,)
                for i in sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)
            ]
        share = max(MIN_PASS_ROWS, sum(lengths) // MIN_BATCHES)
        return _group_by_length(lengths, min(max_pass_rows(self.model), share))

    def _estimate_nbytes(self, prompt_indices: tuple[int, ...], slot_bytes: int) -> int:
        """Estimate the bytes of a batch. slot_bytes: bytes of the K/V of one token."""
        spec = self.model.spec
        longest, n = self._shape(prompt_indices)
        return len(prompt_indices) * (
            (longest + n) * slot_bytes
            + n * (spec.n_layers + 1) * spec.hidden_size * spec.dtype.itemsize
        )

    def _shape(self, prompt_indices: tuple[int, ...]) -> tuple[int, int]:
        """Return (slots of the longest text, positions of the longest continuation)."""
        return (
            max(len(self.prompt_ids[i]) + len(self.continuations[i]) - 1 for i in prompt_indices),
            max(len(self.continuations[i]) - 1 for i in prompt_indices),
        )

    @no_grad
    def _build(self, prompt_indices: tuple[int, ...]) -> ReplayBatch:
        """Run the full model over the texts once, and plan the pass that judges a mask."""
        device = self.model.spec.device
        longest, n = self._shape(prompt_indices)
        lengths = tuple(len(self.continuations[i]) - 1 for i in prompt_indices)
        starts = torch.tensor([len(self.prompt_ids[i]) for i in prompt_indices], device=device)
        cache, planner = (
            self.model.new_cache(len(prompt_indices), longest + n),
            Planner(longest + n, device),
        )
        # Padding follows the text of its row, so no query of the text attends to it.
        texts = torch.tensor(
            [
                _pad([*self.prompt_ids[i], *self.continuations[i][:-1]], longest)
                for i in prompt_indices
            ],
            device=device,
        )
        own_slots = longest + torch.arange(n, device=device)  # [T] slots of the queries' own K/V
        positions = starts[:, None] + torch.arange(n, device=device)  # [B, T]
        all_slots = torch.arange(longest + n, device=device)
        earlier = (all_slots < positions[..., None]) & (all_slots < longest)
        visible = (earlier | (all_slots == own_slots[:, None]))[:, None]  # [B, 1, T, longest + n]
        # Without this, positions of padding could exceed the model's context.
        clamped_positions = (
            positions
            if self.model.spec.context_length is None
            else positions.clamp(max=self.model.spec.context_length - 1)
        )
        plan = PassPlan(
            clamped_positions,
            own_slots.expand(len(prompt_indices), n),
            longest + n,
            visible,
            longest,
        )
        generated = torch.tensor(
            [_pad(self.continuations[i], n + 1) for i in prompt_indices], device=device
        )
        is_valid = torch.arange(n, device=device) < torch.tensor(lengths, device=device)[:, None]
        valid_positions, labels = is_valid.flatten().nonzero()[:, 0], generated[:, 1:]
        prefixes = [self._prefix_kv[i] for i in prompt_indices]
        if None in prefixes:
            states = self._run_full_model(
                texts,
                cache,
                planner.plan_chain(0, longest, len(prompt_indices)),
                positions.clamp(max=longest - 1),
            )
        else:
            for row, (i, prefix) in enumerate(zip(prompt_indices, prefixes, strict=True)):
                assert prefix is not None
                prefix.copy_to(cache, row, len(self.prompt_ids[i]))
            # Padding writes to its own slots after the texts, where nothing reads it.
            reads = (all_slots <= positions[..., None])[:, None]
            text_plan = PassPlan(clamped_positions, positions, longest + n, reads, None)
            states = self._run_full_model(
                generated[:, :-1],
                cache,
                text_plan,
                torch.arange(n, device=device).expand_as(positions),
            )
        if self.sampler is not None and prompt_indices not in self._target_probs:
            self._target_probs[prompt_indices] = self._target_probability(
                unpad(states[-1], valid_positions), labels.flatten()[valid_positions]
            )
        return ReplayBatch(
            generated[:, :-1],
            labels,
            valid_positions,
            cache,
            plan,
            prompt_indices,
            lengths,
            states,
            self._target_probs.get(prompt_indices),
        )

    def _run_full_model(
        self, texts: Tensor, cache: KVCache, plan: PassPlan, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the full model over texts [B, longest].

        Returns its hidden states [B, T, H] at positions [B, T], before each layer and after the
        last.
        """
        states = list[Tensor]()

        def keep_rows(layer: int, hidden: Tensor) -> None:
            indices = positions[..., None].expand(-1, -1, hidden.shape[-1])
            states.append(hidden.gather(1, indices.to(hidden.device)))

        run_layers(self.model, self.model.embed(texts, plan.positions), cache, plan, tap=keep_rows)
        return tuple(states)

    def _target_probability(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the full model's probabilities [N] of `labels` [N].

        states: [N, H], the input of its head.
        """
        assert self.sampler is not None
        return torch.cat(
            [
                self.sampler.warp_to_probs(self.model.head(states[chunk][None])[0]).gather(
                    1, labels[chunk, None]
                )[:, 0]
                for chunk in logit_chunks(self.model, len(states))
            ]
        )


def unpad(states: Tensor, valid_positions: Tensor) -> Tensor:
    """Return the hidden states without padding: [B, T, H] -> [N, H]."""
    return states.flatten(0, 1)[valid_positions.to(states.device)]


def max_pass_rows(model: ModelAdapter) -> int:
    """Return the most rows of a pass over several texts, padding included."""
    return MAX_PASS_ROWS.get(model.spec.device.type, MAX_PASS_ROWS["cpu"])


def logit_chunks(model: ModelAdapter, count: int, n_tokens: int | None = None) -> list[slice]:
    """Split `count` rows into slices that the head should process at a time.

    n_tokens: for which the head computes logits; None: all of the model's.
    """
    max_logits = MAX_LOGITS.get(model.spec.device.type, MAX_LOGITS["cpu"])
    max_rows = max(MIN_LOGIT_ROWS, max_logits // (n_tokens or model.spec.vocab_size))
    return [slice(start, start + max_rows) for start in range(0, count, max_rows)]


def _group_by_length(lengths: Sequence[int], max_rows: int) -> list[tuple[int, ...]]:
    """Return the indices of texts with at least one position, in batches of similar length.

    A batch has at most `max_rows` rows, unless one text is longer.
    """
    batches: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__):
        if (
            batches
            and len(batches[-1]) < MAX_BATCH_PROMPTS
            and (len(batches[-1]) + 1) * lengths[i] <= max_rows
        ):
            batches[-1].append(i)
        else:
            batches.append([i])
    return [tuple(batch) for batch in batches]


def _pad(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens, *[0] * (length - len(tokens))]
