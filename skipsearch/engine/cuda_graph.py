"""The graph engine: whole passes, captured once as CUDA graphs and replayed without Python.

A capture is for one mask (a draft step) or none (a verify pass), for a chain or a tree, and for a
number of rows and keys. Both numbers are rounded up, so that few captures serve all passes. If a
drafter changes its mask often, a capture at each change would take longer than the passes. After
the first few masks, a mask that changed recently therefore runs layer by layer.

The inputs that change from call to call are in small buffers that the graph reads: the tokens,
their first slot and, for a tree, the position of each token and the keys that it attends to. A
captured pass writes to the buffers of one cache, so it belongs to that cache and is released with
it.

On a CPU, the same code runs directly and writes its logits to one buffer, as a replay does, so
shapes, padding and buffers are tested without a GPU.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine.forward import run_layers
from skipsearch.models.adapter import DraftScorer, DraftScores, PassRunner
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan

MAX_CAPTURED_ROWS = 32  # of a captured pass; longer ones are prefills and run layer by layer
MIN_KEYS = 256  # passes are captured for this many keys, then for twice as many, …
MAX_CAPTURES = 128  # over all caches; the least recently used is dropped first
MAX_CAPTURED_MASKS = 4  # of a cache at a time
STABLE_AFTER = 64  # passes in a row under an additional mask before it is captured
WARM_UP_RUNS = 2  # runs before a capture, in which kernels are chosen and workspaces allocated

_CAPTURING = threading.Lock()  # held during a capture: a process makes one capture at a time


def graph_model(fused_model: FusedAdapter) -> GraphAdapter:
    """Return the model on the engine graph, after a check against `fused_model`.

    Raises: ModelError if the two compute different logits; torch.OutOfMemoryError.
    """
    from skipsearch.models.stored_checks import check_engine  # which imports transformers

    check_engine(
        replace(fused_model.spec, engine="graph"),
        lambda: fused_model,
        lambda: GraphAdapter(fused_model),
    )
    return GraphAdapter(fused_model)  # a new one, without the captures of the check


class GraphAdapter(PassRunner):
    """A fused model whose short passes are captured."""

    # Whether captured passes include the head.
    captures_head = True

    def __init__(self, fused_model: FusedAdapter):
        self.fused_model, self.tokenizer = fused_model, fused_model.tokenizer
        self.pass_runner: PassRunner | None = self
        self.spec = replace(fused_model.spec, engine="graph")
        self._caches: WeakKeyDictionary[KVCache, _CacheCaptures] = WeakKeyDictionary()
        self._uses = count()  # counter of uses of captured passes, for the eviction
        self._captures_lock = threading.Lock()
        self.new_cache = fused_model.new_cache
        self.embed = fused_model.embed
        self.block = fused_model.block
        self.head: Callable[[Tensor], Tensor] = fused_model.head
        self.weight_bytes, self.read_bytes = fused_model.weight_bytes, fused_model.read_bytes

    def with_head(self, head: Callable[[Tensor], Tensor]) -> GraphAdapter:
        """Return the model with another head, which is not captured: its rows may grow.

        head: [..., H] -> logits [..., rows]. Both models share the captures of their layers.
        """
        variant = copy.copy(self)
        variant.pass_runner, variant.head, variant.captures_head = variant, head, False
        return variant

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        return self.fused_model.attention_spans

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor | None:
        """Run a captured pass; return its logits, which the next call of the same shape overwrites.

        Returns None for passes that are not captured: batches, replays, prefills, and passes at the
        end of the cache.
        """
        captured = self._find_capture(tokens, cache, plan, mask)
        if captured is None or plan.first_slot is None:
            return None
        result: Tensor = captured(tokens, cache, plan)[:, : tokens.shape[1]]
        result = result[:, -1:] if last_only else result
        return result if self.captures_head else self.head(result)

    def run_draft_step(
        self,
        token: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask,
        scorer: DraftScorer,
        with_confidence: bool,
    ) -> DraftScores | None:
        """Run a draft step and its scorer as one captured pass, without random draws.

        Returns None if the head is not captured.
        """
        if not self.captures_head:
            return None
        captured = self._find_capture(token, cache, plan, mask, scorer, with_confidence)
        if captured is None or plan.first_slot is None:
            return None
        scores: DraftScores = captured(token, cache, plan)
        # Clone: the next call overwrites the scores, but a draft keeps them.
        return DraftScores(
            None if scores.choice is None else scores.choice.clone(),
            None if scores.probs is None else scores.probs.clone(),
            scores.confidence,
        )

    def _find_capture(
        self,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | None,
        scorer: DraftScorer | None = None,
        with_confidence: bool = False,
    ) -> _CapturedPass | None:
        rows = _round_up_to_power_of_two(tokens.shape[1])
        has_mask = plan.is_chain or (plan.mask is not None and plan.key_positions is None)
        fits = (
            rows <= MAX_CAPTURED_ROWS
            and plan.first_slot is not None
            and plan.first_slot + rows <= cache.capacity
        )
        if (
            not has_mask
            or not plan.first_slot
            or not fits
            or len(tokens) != 1
            or not cache.stable_buffers
        ):
            return None
        keys = min(max(MIN_KEYS, _round_up_to_power_of_two(plan.first_slot + rows)), cache.capacity)
        key = (
            mask,
            plan.is_chain,
            rows,
            keys,
            self.captures_head,
            None if scorer is None else (scorer.key, with_confidence),
        )
        # A cache runs one request at a time, but all threads share the table of caches.
        with self._captures_lock:
            captures = self._caches.get(cache)
            # Captures of an earlier generation refer to buffers that were replaced.
            if captures is None or captures.generation != cache.generation:
                captures = self._caches[cache] = _CacheCaptures(cache.generation)
            captured = captures.passes.get(key)
            if captured is None:
                if not captures.is_worth_capturing(mask):
                    return None
                self._evict_if_full()
                epilogue = (
                    None
                    if scorer is None
                    else (lambda logits: scorer.score(logits[:, -1], with_confidence))
                )
                captured = captures.passes[key] = _CapturedPass(
                    self.fused_model, mask, plan.is_chain, rows, keys, self.captures_head, epilogue
                )
            captured.used = next(self._uses)
        return captured

    def _evict_if_full(self) -> None:
        """Drop the least recently used captured pass if there are MAX_CAPTURES of them."""
        by_use = [
            (captured.used, captures.passes, key)
            for captures in self._caches.values()
            for key, captured in captures.passes.items()
        ]
        if len(by_use) >= MAX_CAPTURES:
            _, passes, key = min(by_use, key=itemgetter(0))
            del passes[key]


@dataclass
class _CacheCaptures:
    """The captured passes of one cache.

    They are valid until the cache's buffers are replaced, which changes its generation number.
    """

    generation: int
    # By mask, chain or tree, rows, keys, head and scorer.
    passes: dict[tuple[Any, ...], _CapturedPass] = field(default_factory=dict)
    latest_mask: SkipMask | None = None  # of the latest pass that was not captured
    n_in_a_row: int = 0  # passes in a row under that mask

    def is_worth_capturing(self, mask: SkipMask | None) -> bool:
        """Return whether to capture passes under a mask.

        True for the full model, the first few masks, and a mask that has not changed for some
        passes.
        """
        captured_masks = {captured.mask for captured in self.passes.values()} - {None}
        if mask is None or mask in captured_masks or len(captured_masks) < MAX_CAPTURED_MASKS:
            return True
        self.n_in_a_row = self.n_in_a_row + 1 if mask == self.latest_mask else 1
        self.latest_mask = mask
        return self.n_in_a_row > STABLE_AFTER


class _CapturedPass:
    """A pass of one shape and one mask over the buffers of one cache.

    It has no reference to the cache, because the adapter's table maps the cache to its passes.
    """

    def __init__(
        self,
        model: FusedAdapter,
        mask: SkipMask | None,
        is_chain: bool,
        rows: int,
        keys: int,
        with_head: bool,
        epilogue: Callable[[Tensor], Any] | None = None,
    ):
        """Allocate the inputs.

        with_head: False: the pass returns the input of the head. epilogue: a function of the logits
        that is captured, too; None: the pass returns the logits.
        """
        device = model.spec.device
        self.model, self.mask, self.keys = model, mask, keys
        self.with_head, self.epilogue = with_head, epilogue
        self.used = 0  # number of its latest use
        self.tokens = torch.zeros(1, rows, dtype=torch.long, device=device)
        self.start = torch.zeros(1, dtype=torch.long, device=device)
        self.offsets = torch.arange(rows, device=device)[None]
        self.slots = torch.arange(keys, device=device)
        # For trees. A padding row attends to itself: the softmax of a row without keys is
        # undefined.
        self.positions = None if is_chain else torch.zeros(1, rows, dtype=torch.long, device=device)
        self.mask_buffer = (
            None if is_chain else torch.zeros(1, 1, rows, keys, dtype=torch.bool, device=device)
        )
        self.replay: Callable[[], Any] | None = None
        self.cpu_result: Tensor | None = None

    def __call__(self, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Any:
        """Run the pass; return the value of `epilogue`, or logits [1, rows, V].

        Without a head, returns its input, [1, rows, H]. Only the first T rows are valid. The next
        call overwrites the result.

        tokens: [1, T], T ≤ rows.
        cache: the one that the pass is captured for.
        """
        n_tokens = tokens.shape[1]
        self.tokens[:, :n_tokens].copy_(tokens)
        self.start.fill_(plan.first_slot or 0)
        if self.positions is not None and self.mask_buffer is not None and plan.mask is not None:
            self.positions[:, :n_tokens].copy_(plan.positions)
            self.mask_buffer.copy_(
                (self.slots == (self.start + self.offsets)[0, :, None])[None, None]
            )
            self.mask_buffer[:, :, :n_tokens, : plan.n_keys].copy_(plan.mask)
        if not self.tokens.is_cuda:
            result = self._run_body(cache)
            if self.epilogue is not None:
                return result
            self.cpu_result = result if self.cpu_result is None else self.cpu_result.copy_(result)
            return self.cpu_result
        if self.replay is None:  # the warm-up runs write the K/V of the current pass
            self.replay = _capture(lambda: self._run_body(cache))
        return self.replay()

    def _run_body(self, cache: KVCache) -> Any:
        slots = self.start + self.offsets
        context = self.model.spec.context_length
        positions = slots if self.positions is None else self.positions
        if context is not None:
            positions = positions.clamp(max=context - 1)  # of padding rows
        visible = (
            (self.slots <= slots[0, :, None])[None, None]
            if self.mask_buffer is None
            else self.mask_buffer
        )
        plan = PassPlan(positions, slots, self.keys, visible, None)
        embedded = self.model.embed(self.tokens, plan.positions)
        hidden = run_layers(self.model, embedded, cache, plan, self.mask)
        if not self.with_head:
            return hidden
        logits = self.model.head(hidden)
        return logits if self.epilogue is None else self.epilogue(logits)


def _capture(body: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `body`; return a function that replays it and returns the buffer of its result.

    The function does not reference `body`. The capture mode is "thread_local", because other
    threads may run passes and allocate memory during the capture. In CUDA's default mode, their
    calls and the capture would fail.
    """
    with _CAPTURING:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = body()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _round_up_to_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
