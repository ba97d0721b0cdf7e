"""Texts that the full model wrote, laid out so that one pass judges a mask at all of their positions; their K/V as far as memory goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding.sampling import Sampling, SamplingPicker
from skipsearch.engine import inference, onward
from skipsearch.models.place import host_memory
from skipsearch.models.spec import ModelAdapter

MOST_PROMPTS = 16  # of a batch
# Rows of a pass, padding included: enough to keep the device busy, and little of it is padding.
BATCH_ROWS = {"cpu": 256, "cuda": 2048}
# Rows of logits at a time: a CPU's cache holds them, a GPU's memory those of a large vocabulary.
MOST_LOGITS = {"cpu": 128, "cuda": 512}
SHARE_OF_MEMORY = 0.25  # for K/V by default: activations and logits of a pass, a decoder's own cache and other processes want some too
GREEDY = Sampling()


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded on the right. fed: generated tokens 0 … G − 2, following: 1 … G − 1, both [B, T].

    prompts: which prompt each row is of; lengths: entries of each row that count; rows [N]: these entries in the flattened [B · T].
    longest: slots of the cache that hold text. plan: a pass over `fed` in which each query sees the text before it and itself.
    states: [B, T, H] of the full model at these positions, as they go into each layer and, last, into the head.
    chance: [N], what the full model gave `following` before it was drawn; None where nothing was drawn.
    """

    fed: Tensor
    following: Tensor
    rows: Tensor
    cache: KVCache
    plan: PassPlan
    longest: int
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    states: tuple[Tensor, ...]
    chance: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Of K/V and states."""
        return self.cache.bytes + sum(h.nbytes for h in self.states)


class Batches:
    """Every text of two generated tokens or more, in batches. prompts, tokens: of each text, token ids.

    K/V and states are kept within `kv_bytes`, a quarter of what the device has free if None. Those of a batch that does not fit are made
    again whenever it is asked for, with the same bits, and come on top meanwhile. kept: batches that stay.
    """

    def __init__(self, model: ModelAdapter, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]],
                 sampling: Sampling = GREEDY, kv_bytes: int | None = None):
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self.picker = None if sampling.greedy else SamplingPicker(sampling, torch.Generator(model.spec.device))
        self.chosen = self._choose([max(0, len(generated) - 1) for generated in tokens])
        self._chances: dict[tuple[int, ...], Tensor] = {}
        self._kept: dict[tuple[int, ...], Batch] = {}
        budget = _free_memory(model.spec.device) * SHARE_OF_MEMORY if kv_bytes is None else kv_bytes
        slot = _bytes_of_a_slot(model)
        for chosen in self.chosen:
            budget -= self._bytes(chosen, slot)
            if budget >= 0:
                self._kept[chosen] = self._made(chosen)
            elif self.picker is not None:
                self._made(chosen)  # for the chances

    @property
    def kept(self) -> int:
        return len(self._kept)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> Batch:
        chosen = self.chosen[i]
        return self._kept[chosen] if chosen in self._kept else self._made(chosen)

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def about(self, most_prompts: int | None) -> Iterator[Batch]:
        """Batches of about so many texts in all, of every length; all of them if None."""
        texts = sum(map(len, self.chosen))
        count = len(self) if most_prompts is None else min(len(self), max(1, round(len(self) * most_prompts / texts)))
        return (self[(2 * i + 1) * len(self) // (2 * count)] for i in range(count))

    def sample(self, most_prompts: int = MOST_PROMPTS) -> Batch:
        """So many texts of middling length in one batch, made for this call: for code that looks at hidden states and not at masks."""
        texts = [i for chosen in self.chosen for i in chosen]
        most_prompts = most_prompts if self.model.spec.together else 1
        start = max(0, (len(texts) - most_prompts) // 2)
        return self._made(tuple(texts[start:start + most_prompts]))

    def _choose(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """The texts of each batch. lengths: positions to judge, of each text."""
        if not self.model.spec.together:
            return [(i,) for i in sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)]
        return _alike(lengths, most_rows(self.model))

    def _bytes(self, chosen: tuple[int, ...], slot: int) -> int:
        """Of a batch's K/V and states. slot: bytes of the K/V of one token."""
        spec = self.model.spec
        longest, n = self._shape(chosen)
        return len(chosen) * ((longest + n) * slot + n * (spec.n_layers + 1) * spec.hidden * spec.dtype.itemsize)

    def _shape(self, chosen: tuple[int, ...]) -> tuple[int, int]:
        """(slots of the longest text, positions of the longest continuation) of a batch."""
        return (max(len(self.prompts[i]) + len(self.tokens[i]) - 1 for i in chosen), max(len(self.tokens[i]) - 1 for i in chosen))

    @inference
    def _made(self, chosen: tuple[int, ...]) -> Batch:
        """Run the full model over prompts and continuations once, and lay out the pass that every mask will make over them."""
        device = self.model.spec.device
        longest, n = self._shape(chosen)
        lengths = tuple(len(self.tokens[i]) - 1 for i in chosen)
        starts = torch.tensor([len(self.prompts[i]) for i in chosen], device=device)
        cache, planner = self.model.new_cache(len(chosen), longest + n), Planner(longest + n, device)
        # Padding stands behind the text of a row, where no causal query of that text can see it.
        texts = torch.tensor([_padded([*self.prompts[i], *self.tokens[i][:-1]], longest) for i in chosen], device=device)
        own = longest + torch.arange(n, device=device)                # [T] slots of the queries' own K/V
        positions = starts[:, None] + torch.arange(n, device=device)  # [B, T]
        every = torch.arange(longest + n, device=device)
        earlier = (every < positions[..., None]) & (every < longest)
        visible = (earlier | (every == own[:, None]))[:, None]        # [B, 1, T, longest + n]
        # Past the end of a row there is padding, whose positions may run over what the model was made for.
        places = positions if self.model.spec.context is None else positions.clamp(max=self.model.spec.context - 1)
        plan = PassPlan(places, own.expand(len(chosen), n), longest + n, visible, longest)
        generated = torch.tensor([_padded(self.tokens[i], n + 1) for i in chosen], device=device)
        real = torch.arange(n, device=device) < torch.tensor(lengths, device=device)[:, None]
        rows, following = real.flatten().nonzero()[:, 0], generated[:, 1:]
        states = self._run(texts, cache, planner.chain(0, longest, len(chosen)), positions.clamp(max=longest - 1))
        if self.picker is not None and chosen not in self._chances:
            self._chances[chosen] = self._probability(real_rows(states[-1], rows), following.flatten()[rows])
        return Batch(generated[:, :-1], following, rows, cache, plan, longest, chosen, lengths, states, self._chances.get(chosen))

    def _run(self, texts: Tensor, cache: KVCache, plan: PassPlan, positions: Tensor) -> tuple[Tensor, ...]:
        """A pass of the full model over texts [B, longest]: its states at positions [B, T], before each layer and after the last."""
        at = positions[..., None].expand(-1, -1, self.model.spec.hidden)
        states = list[Tensor]()
        onward(self.model, self.model.embed(texts, plan.positions), cache, plan,
               tap=lambda i, h: states.append(h.gather(1, at.to(h.device))))
        return tuple(states)

    def _probability(self, states: Tensor, following: Tensor) -> Tensor:
        """[N]: the chance that the full model drew `following` [N], from what goes into its head, [N, H]."""
        assert self.picker is not None
        return torch.cat([self.picker.probs(self.model.head(states[some][None])[0]).gather(1, following[some, None])[:, 0]
                          for some in pieces(self.model, len(states))])


def real_rows(states: Tensor, rows: Tensor) -> Tensor:
    """[B, T, H] -> [N, H]: neither head nor sampling is for padding."""
    return states.flatten(0, 1)[rows.to(states.device)]


def most_rows(model: ModelAdapter) -> int:
    """Of a pass over several texts."""
    return BATCH_ROWS.get(model.spec.device.type, BATCH_ROWS["cpu"])


def pieces(model: ModelAdapter, count: int) -> list[slice]:
    """Of `count` rows, as many as the head should see at a time."""
    most = MOST_LOGITS.get(model.spec.device.type, MOST_LOGITS["cpu"])
    return [slice(at, at + most) for at in range(0, count, most)]


def _alike(lengths: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Indices of the texts that have a position to judge, in batches of similar length: of at most so many rows, unless one text is longer.
    """
    batches: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__):
        if batches and len(batches[-1]) < MOST_PROMPTS and (len(batches[-1]) + 1) * lengths[i] <= most:
            batches[-1].append(i)
        else:
            batches.append([i])
    return [tuple(batch) for batch in batches]


def _padded(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens, *[0] * (length - len(tokens))]


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()


@inference
def _bytes_of_a_slot(model: ModelAdapter) -> int:
    cache, device = model.new_cache(1, 1), model.spec.device
    plan = Planner(1, device).chain(0, 1)
    onward(model, model.embed(torch.zeros(1, 1, dtype=torch.long, device=device), plan.positions), cache, plan)
    return cache.bytes
