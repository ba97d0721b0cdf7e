"""The full model's greedy continuations of many prompts at once: what replay reads, several times faster than prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding.acceptance import BROKEN, greedy_choice
from skipsearch.decoding.stopping import Stopper
from skipsearch.engine import forward, inference
from skipsearch.errors import no_numbers
from skipsearch.models.spec import ModelAdapter

TOGETHER = 32   # prompts of one pass


def continue_together(model: ModelAdapter, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_on_repeat: int | None,
                      progress: Callable[[int, int], None] = lambda done, total: None) -> list[list[int]]:
    """Generated tokens of each prompt, ended as decoding alone would end them: end of sequence, a repeat, the length, the model's context.

    A pass over many rows rounds differently from one over a single row, so two nearly equal logits may come out the other way
    round than in decoding alone; the text stays the full model's. progress(prompts done, of all).
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), TOGETHER):
        chosen = order[at:at + TOGETHER]
        found |= zip(chosen, _batch(model, [prompts[i] for i in chosen], max_new_tokens, end_on_repeat), strict=True)
        progress(len(found), len(order))
    return [found[i] for i in range(len(prompts))]


@inference
def _batch(model: ModelAdapter, prompts: list[Sequence[int]], max_new_tokens: int, end_on_repeat: int | None) -> list[list[int]]:
    spec = model.spec
    rooms = [max_new_tokens if spec.context is None else min(max_new_tokens, spec.context - len(p)) for p in prompts]
    stoppers = [Stopper(room, spec.eos_token_ids, end_on_repeat=end_on_repeat) for room in rooms]
    longest = max(map(len, prompts))
    capacity = max(len(p) + room for p, room in zip(prompts, rooms, strict=True))
    cache, planner = model.new_cache(len(prompts), capacity), Planner(capacity, spec.device)
    padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=spec.device)
    lengths = torch.tensor([[len(p)] for p in prompts], device=spec.device)
    if longest > 1:  # all but each row's last token; padding stands behind a row's text, where nothing of that text looks
        forward(model, padded[:, :-1], cache, planner.chain(0, longest - 1, len(prompts)), last_only=True)
    token, position = padded.gather(1, lengths - 1), lengths - 1   # [B, 1]
    generated: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))   # whose text each row of the pass is
    going = set(rows)
    while True:
        keys = int(position.max()) + 1
        visible = (planner.slots[:, :keys] <= position)[:, None, None]   # [B, 1, 1, keys]
        token = greedy_choice(forward(model, token, cache, PassPlan(position, position, keys, visible, None)))
        for text, chosen in zip(rows, token[:, 0].tolist(), strict=True):
            if text in going:
                if chosen == BROKEN:
                    raise no_numbers()
                generated[text].append(chosen)
                if stoppers[text].push(chosen):
                    going.remove(text)
        if not going:
            return generated
        position = (position + 1).clamp(max=capacity - 1)   # a row that has ended goes on unheard,
        if 2 * len(going) <= len(rows):                     # until half of them have
            left = [row for row, text in enumerate(rows) if text in going]
            rows, token, position, cache = [rows[row] for row in left], token[left], position[left], _only(model, cache, left)


def _only(model: ModelAdapter, cache: KVCache, rows: list[int]) -> KVCache:
    """A cache of these rows of another."""
    fewer = model.new_cache(len(rows), cache.capacity)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if keys is not None and values is not None:
            fewer.keys[layer], fewer.values[layer] = keys[rows], values[rows]
    return fewer
