"""Generate the full model's continuations of many prompts in batches, as text for replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skipsearch.constraints import Matcher
from skipsearch.core.constraint import Constraint
from skipsearch.decoding import Decoder, Request, mask_logits
from skipsearch.decoding.acceptance import NOT_FINITE, accept_sampled, choose_greedy
from skipsearch.decoding.repetition import EndOnRepeat
from skipsearch.decoding.stopping import StopCondition
from skipsearch.engine import forward, no_grad
from skipsearch.engine.sampler import GREEDY, SamplingParams, TemperatureSampler
from skipsearch.errors import non_finite_logits
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.memory import free_memory
from skipsearch.replay.replay_batches import KV_MEMORY_FRACTION, bytes_of_a_slot

PROMPTS_PER_PASS = 32  # prompts of one pass, at most


def generate_continuations(
    model: ModelAdapter,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_on_repeat: EndOnRepeat,
    progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    constraint: Constraint | None = None,
) -> list[list[int]]:
    """Return the generated tokens of each prompt.

    A text ends as in decoding: by end of sequence, a repeat, the length or the model's context.
    sampling: as for the decoder; prompt i has the seed `seed + i`.
    progress(tokens done, tokens that may be generated): if a text ends early, the rest of its
    tokens count as done.

    A pass over many prompts rounds differently from a pass over a single one. If two logits are
    nearly equal, the text may therefore differ from the text that decoding this prompt alone gives.
    Both are texts of the full model. On a batch-invariant engine (native), they are equal.
    """
    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    max_tokens = [
        max_new_tokens
        if model.spec.context_length is None
        else min(max_new_tokens, model.spec.context_length - len(p))
        for p in prompt_ids
    ]
    total, done = sum(max_tokens), 0
    tokens: dict[int, list[int]] = {}
    while len(tokens) < len(order):
        group = _first_that_fit(
            model, [(i, len(prompt_ids[i]) + max_tokens[i]) for i in order[len(tokens) :]]
        )
        stoppers = [
            StopCondition(max_tokens[i], model.spec.eos_token_ids, end_on_repeat=end_on_repeat)
            for i in group
        ]
        matchers = [Request((0,), constraint=constraint).new_matcher(model) for _ in group]
        chooser = _Chooser(model, sampling, [seed + i for i in group], matchers)
        texts = _generate_group(
            model, [prompt_ids[i] for i in group], stoppers, chooser, _after(done, total, progress)
        )
        tokens |= zip(group, texts, strict=True)
        done += sum(max_tokens[i] for i in group)
    return [tokens[i] for i in range(len(prompt_ids))]


def continue_in_turn(
    model: ModelAdapter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_on_repeat: EndOnRepeat,
    progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    constraint: Constraint | None = None,
) -> list[list[int]]:
    """Generate as `generate_continuations` does, but one prompt at a time.

    This is for models that cannot batch prompts of different lengths.
    """
    decoder, tokens = Decoder(model, draft_forced=False), list[list[int]]()
    total = len(prompts) * max_new_tokens
    for i, prompt in enumerate(prompts):
        text = list[int]()
        for chunk in decoder.stream(
            prompt,
            max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed + i,
            end_on_repeat=end_on_repeat,
            constraint=constraint,
        ):
            text += chunk.tokens
            progress(i * max_new_tokens + len(text), total)
        tokens.append(text)
    progress(total, total)
    return tokens


def _first_that_fit(model: ModelAdapter, slots: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first prompts whose K/V fit into KV_MEMORY_FRACTION of the free memory.

    At least one prompt is returned. slots: for each prompt, (its index, the slots of its text).
    """
    budget = KV_MEMORY_FRACTION * free_memory(model.spec.device) / bytes_of_a_slot(model)
    group, longest = list[int](), 0
    for i, n_slots in slots[:PROMPTS_PER_PASS]:
        longest = max(longest, n_slots)
        if group and (len(group) + 1) * longest > budget:
            break
        group.append(i)
    return group


class _Chooser:
    """A chooser that picks each text's next token, greedily or by sampling with the text's seed.

    matchers: the state of each text's constraint; None: it has none.
    """

    def __init__(
        self,
        model: ModelAdapter,
        sampling: SamplingParams,
        seeds: Sequence[int],
        matchers: Sequence[Matcher | None],
    ):
        self.matchers = matchers
        self.generators = (
            []
            if sampling.is_greedy
            else [torch.Generator(model.spec.device).manual_seed(seed) for seed in seeds]
        )
        self.sampler = TemperatureSampler(sampling, self.generators[0]) if self.generators else None

    def choose(self, logits: Tensor, texts: Sequence[int]) -> list[int]:
        """Return the next token of each text.

        logits: [N, V]. texts: the index of the text of each row. Raises: ModelError if the logits
        are not numbers.
        """
        matchers = [self.matchers[text] for text in texts]
        masks = np.ones((len(texts), logits.shape[1]), dtype=bool)
        for mask, matcher in zip(masks, matchers, strict=True):
            if matcher is not None:
                matcher.fill_mask(mask)
        if any(matchers):
            logits = mask_logits(logits, masks)
        tokens = self._choose_legal(logits, texts)
        for matcher, token in zip(matchers, tokens, strict=True):
            if matcher is not None:
                matcher.advance([token])
        return tokens

    def _choose_legal(self, logits: Tensor, texts: Sequence[int]) -> list[int]:
        if self.sampler is None:
            tokens: list[int] = choose_greedy(logits).tolist()
            if NOT_FINITE in tokens:
                raise non_finite_logits()
            return tokens
        probs, no_draft = self.sampler.warp_to_probs(logits), logits.new_empty(0, dtype=torch.long)
        return [
            accept_sampled(no_draft, None, probs[row : row + 1], self.generators[text])[1]
            for row, text in enumerate(texts)
        ]


def _after(before: int, total: int, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return the progress callback of a batch that starts after `before` tokens."""
    return lambda done: progress(before + done, total)


@no_grad
def _generate_group(
    model: ModelAdapter,
    prompt_ids: Sequence[Sequence[int]],
    stoppers: Sequence[StopCondition],
    chooser: _Chooser,
    progress: Callable[[int], None],
) -> list[list[int]]:
    spec = model.spec
    longest = max(map(len, prompt_ids))
    capacity = max(
        len(p) + stopper.max_new_tokens for p, stopper in zip(prompt_ids, stoppers, strict=True)
    )
    cache, planner = model.new_cache(len(prompt_ids), capacity), Planner(capacity, spec.device)
    padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompt_ids], device=spec.device)
    lengths = torch.tensor([[len(p)] for p in prompt_ids], device=spec.device)
    # All tokens but the last of each prompt. Padding follows a text, so no token attends to it.
    if longest > 1:
        forward(
            model,
            padded[:, :-1],
            cache,
            planner.plan_chain(0, longest - 1, len(prompt_ids)),
            last_only=True,
        )
    token, position = padded.gather(1, lengths - 1), lengths - 1  # [B, 1]
    generated: list[list[int]] = [[] for _ in prompt_ids]
    rows = list(range(len(prompt_ids)))  # text index of each row of the pass
    running, done = set(rows), 0
    while True:
        keys = int(position.max()) + 1
        visible = (planner.list_slots(keys) <= position)[:, None, None]  # [B, 1, 1, keys]
        logits = forward(model, token, cache, PassPlan(position, position, keys, visible, None))[
            :, 0
        ]
        open_rows = [row for row, text in enumerate(rows) if text in running]
        texts = [rows[row] for row in open_rows]
        tokens = chooser.choose(logits if len(texts) == len(rows) else logits[open_rows], texts)
        for text, token_id in zip(texts, tokens, strict=True):
            generated[text].append(token_id)
            done += 1
            if stoppers[text].push_token(token_id):
                running.remove(text)
                done += stoppers[text].max_new_tokens - len(generated[text])
        progress(done)
        if not running:
            return generated
        # A row whose text has ended reads its last token again, and its logits are ignored. If at
        # least half of the rows have ended, they are dropped from the batch.
        token = token.clone()
        token[open_rows, 0] = torch.tensor(tokens, device=spec.device)
        position = (position + 1).clamp(max=capacity - 1)
        if 2 * len(running) <= len(rows):
            remaining = [row for row, text in enumerate(rows) if text in running]
            rows, token, position, cache = (
                [rows[row] for row in remaining],
                token[remaining],
                position[remaining],
                _copy_rows(model, cache, remaining),
            )


def _copy_rows(model: ModelAdapter, cache: KVCache, rows: list[int]) -> KVCache:
    """Return a copy of a cache that has only these rows."""
    copy = model.new_cache(len(rows), cache.capacity)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if keys is not None and values is not None:
            copy.keys[layer], copy.values[layer] = keys[rows], values[rows]
    return copy
