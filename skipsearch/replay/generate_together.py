"""Generate the full model's continuations of many prompts in batches, as text for replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from skipsearch.replay.text_kv import KV_MEMORY_FRACTION, TextKV, bytes_of_a_slot, copy_text_kv

# Prompts of one pass, at most. On a CPU, a pass over more rows takes as much more time.
PROMPTS_PER_PASS = {"cpu": 16, "cuda": 32}
# Share of the rows of a pass that may be of texts that have ended. To drop a row, the K/V of all
# others is copied; on a CPU that takes less time than a row of a few passes.
MAX_ENDED_SHARE = {"cpu": 0.0, "cuda": 0.5}


@dataclass(frozen=True)
class Continuation:
    """The tokens that the full model generated after a prompt."""

    tokens: list[int]
    kv: TextKV | None = None  # of prompt and tokens; None: not kept
    # Input and output of the last layer at prompt and tokens, [2, n, H]; None: not kept. The last
    # token is missing, since nothing has read it yet.
    states: Tensor | None = None


def prompts_per_pass(model: ModelAdapter) -> int:
    """Return the most prompts that are continued in one pass."""
    return PROMPTS_PER_PASS.get(model.spec.device.type, PROMPTS_PER_PASS["cpu"])


def generate_continuations(
    model: ModelAdapter,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_on_repeat: EndOnRepeat,
    progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    constraint: Constraint | None = None,
    max_kv_bytes: float = 0,
    keep_states: bool = False,
) -> list[Continuation]:
    """Return the continuation of each prompt.

    A text ends as in decoding: by end of sequence, a repeat, the length or the model's context.
    sampling: as for the decoder; prompt i has the seed `seed + i`.
    max_kv_bytes: of the K/V of texts, which are kept if the model's cache is a plain one; the last
    text may go beyond it. keep_states: keep the input and the output of the last layer.
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
    written: dict[int, Continuation] = {}
    while len(written) < len(order):
        group = _first_that_fit(
            model, [(i, len(prompt_ids[i]) + max_tokens[i]) for i in order[len(written) :]]
        )
        stoppers = [
            StopCondition(max_tokens[i], model.spec.eos_token_ids, end_on_repeat=end_on_repeat)
            for i in group
        ]
        matchers = [Request((0,), constraint=constraint).new_matcher(model) for _ in group]
        chooser = _Chooser(model, sampling, [seed + i for i in group], matchers)
        texts = _generate_group(
            model,
            [prompt_ids[i] for i in group],
            stoppers,
            chooser,
            _after(done, total, progress),
            max_kv_bytes,
            keep_states,
        )
        max_kv_bytes -= sum(text.kv.nbytes for text in texts if text.kv is not None)
        written |= zip(group, texts, strict=True)
        done += sum(max_tokens[i] for i in group)
    return [written[i] for i in range(len(prompt_ids))]


def continue_in_turn(
    model: ModelAdapter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_on_repeat: EndOnRepeat,
    progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    constraint: Constraint | None = None,
    max_kv_bytes: float = 0,
    keep_states: bool = False,
) -> list[Continuation]:
    """Generate as `generate_continuations` does, but one prompt at a time, and keep nothing.

    This is for models that cannot batch prompts of different lengths.
    """
    decoder, written = Decoder(model, draft_forced=False), list[Continuation]()
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
        written.append(Continuation(text))
    progress(total, total)
    return written


def _first_that_fit(model: ModelAdapter, slots: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first prompts whose K/V fit into KV_MEMORY_FRACTION of the free memory.

    At least one prompt is returned. slots: for each prompt, (its index, the slots of its text).
    """
    budget = KV_MEMORY_FRACTION * free_memory(model.spec.device) / bytes_of_a_slot(model)
    group, longest = list[int](), 0
    for i, n_slots in slots[: prompts_per_pass(model)]:
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


class _StateTap:
    """A tap that keeps the input and the output of the last layer by text."""

    def __init__(self, n_layers: int, n_texts: int):
        self.layers = (n_layers - 1, n_layers)
        self._latest = dict[int, Tensor]()  # [B, T, H] by layer, of one pass
        self._parts = [list[Tensor]() for _ in range(n_texts)]

    def __call__(self, layer: int, hidden: Tensor) -> None:
        self._latest[layer] = hidden

    def add(self, text: int, row: int, n_tokens: int) -> None:
        """Keep the first tokens of a row of the latest pass as the next ones of a text."""
        states = [self._latest[layer][row, :n_tokens] for layer in self.layers]
        self._parts[text].append(torch.stack(states))

    def join(self, text: int) -> Tensor:
        """Return what was kept of a text, [2, n, H]."""
        return torch.cat(self._parts[text], dim=1)


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
    max_kv_bytes: float,
    keep_states: bool,
) -> list[Continuation]:
    spec = model.spec
    longest = max(map(len, prompt_ids))
    capacity = max(
        len(p) + stopper.max_new_tokens for p, stopper in zip(prompt_ids, stoppers, strict=True)
    )
    cache, planner = model.new_cache(len(prompt_ids), capacity), Planner(capacity, spec.device)
    padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompt_ids], device=spec.device)
    lengths = torch.tensor([[len(p)] for p in prompt_ids], device=spec.device)
    tap = _StateTap(spec.n_layers, len(prompt_ids)) if keep_states else None
    # All tokens but the last of each prompt. Padding follows a text, so no token attends to it.
    if longest > 1:
        forward(
            model,
            padded[:, :-1],
            cache,
            planner.plan_chain(0, longest - 1, len(prompt_ids)),
            last_only=True,
            tap=tap,
        )
        if tap is not None:
            for i, p in enumerate(prompt_ids):
                tap.add(i, i, len(p) - 1)
    token, position = padded.gather(1, lengths - 1), lengths - 1  # [B, 1]
    generated: list[list[int]] = [[] for _ in prompt_ids]
    rows = list(range(len(prompt_ids)))  # text index of each row of the pass
    running, done = set(rows), 0
    kv_by_text: dict[int, TextKV] = {}

    def keep_rows(texts: Sequence[int]) -> None:
        for text in texts if type(cache) is KVCache else ():
            if sum(kv.nbytes for kv in kv_by_text.values()) < max_kv_bytes:
                n_read = len(prompt_ids[text]) + len(generated[text]) - 1
                kv_by_text[text] = copy_text_kv(cache, rows.index(text), n_read)

    max_ended_share = MAX_ENDED_SHARE.get(spec.device.type, MAX_ENDED_SHARE["cpu"])
    while True:
        keys = int(position.max()) + 1
        visible = (planner.list_slots(keys) <= position)[:, None, None]  # [B, 1, 1, keys]
        plan = PassPlan(position, position, keys, visible, None)
        logits = forward(model, token, cache, plan, tap=tap)[:, 0]
        open_rows = [row for row, text in enumerate(rows) if text in running]
        texts = [rows[row] for row in open_rows]
        if tap is not None:
            for text, row in zip(texts, open_rows, strict=True):
                tap.add(text, row, 1)
        tokens = chooser.choose(logits if len(texts) == len(rows) else logits[open_rows], texts)
        for text, token_id in zip(texts, tokens, strict=True):
            generated[text].append(token_id)
            done += 1
            if stoppers[text].push_token(token_id):
                running.remove(text)
                done += stoppers[text].max_new_tokens - len(generated[text])
        progress(done)
        if not running:
            keep_rows(rows)
            return [
                Continuation(text, kv_by_text.get(i), None if tap is None else tap.join(i))
                for i, text in enumerate(generated)
            ]
        # A row whose text has ended reads its last token again, and its logits are ignored, until
        # enough rows have ended to be dropped from the batch.
        token = token.clone()
        token[open_rows, 0] = torch.tensor(tokens, device=spec.device)
        position = (position + 1).clamp(max=capacity - 1)
        n_ended = len(rows) - len(running)
        if n_ended and n_ended >= max_ended_share * len(rows):
            keep_rows([text for text in rows if text not in running])
            remaining = [row for row, text in enumerate(rows) if text in running]
            rows, token, position, cache = (
                [rows[row] for row in remaining],
                token[remaining],
                position[remaining],
                _take_rows(model, cache, remaining),
            )


def _take_rows(model: ModelAdapter, cache: KVCache, rows: list[int]) -> KVCache:
    """Return a cache with only these rows of another, which is emptied layer by layer."""
    taken = model.new_cache(len(rows), cache.capacity)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if keys is not None and values is not None:
            taken.keys[layer], taken.values[layer] = keys[rows], values[rows]
            cache.keys[layer] = cache.values[layer] = None
    return taken
