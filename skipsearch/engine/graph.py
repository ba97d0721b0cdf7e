"""The graph engine: whole passes over static buffers, recorded once as CUDA graphs and replayed without Python in between.

A pass is recorded for a mask (a draft step) or for none (a verify pass), for a chain or a tree, for a number of rows and of keys, each
rounded up so that few recordings serve all. A drafter that moves its mask would record at each move, which takes longer than the passes
under it: beyond a few masks, one that has not stayed for a while runs layer by layer. What changes from call to call lies in small buffers
that the recording reads: the tokens, where they start and, of a tree, where each one stands and which keys it sees.
On a CPU the same body runs directly: shapes, padding and buffers are then tested where there is no GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine.forward import looped
from skipsearch.mask import SkipMask
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.spec import PassRunner, Scored, Scorer

RECORDED_ROWS = 32        # of a recorded pass; longer ones are prefills and run as they are
LEAST_KEYS = 256      # recordings are made for this many keys, then for twice as many, …
MOST_RECORDINGS = 128  # the least recently used one goes first
RECORDED_MASKS = 4    # of a cache, that are recorded at once
SETTLED = 64          # passes in a row under another one before it is recorded, too
WARM_UP = 2           # runs before a recording, in which kernels are chosen and workspaces made


class GraphAdapter:
    """A fused model whose short passes are recorded."""

    run_layers = None

    def __init__(self, lean: LeanAdapter):
        self.lean, self.tokenizer = lean, lean.tokenizer
        self.passes: PassRunner | None = self
        self.spec = replace(lean.spec, engine="graph")
        self._recordings: OrderedDict[tuple[Any, ...], _Recording] = OrderedDict()
        self._latest: tuple[int, SkipMask | None, int] = (0, None, 0)   # cache and mask of a pass that was not recorded, how many in a row
        self._looking = threading.Lock()
        self.new_cache, self.embed, self.block, self.head = lean.new_cache, lean.embed, lean.block, lean.head
        self.weight_bytes, self.read_bytes = lean.weight_bytes, lean.read_bytes

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor | None:
        """Logits of a pass, or None for one that is not recorded: a batch, a replay, a prefill, one at the end of the cache.

        The next call of the same shape overwrites them.
        """
        recording = self._recording(tokens, cache, plan, mask)
        if recording is None or plan.start is None:
            return None
        logits: Tensor = recording(tokens, plan)[:, :tokens.shape[1]]
        return logits[:, -1:] if last_only else logits

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, confidence: bool) -> Scored | None:
        """A draft step with the scores of its token, in one recording. What is drawn at random is drawn outside of it."""
        recording = self._recording(token, cache, plan, mask, scorer, confidence)
        if recording is None or plan.start is None:
            return None
        scored: Scored = recording(token, plan)
        return Scored(scored.weights.clone(), scored.confidence)  # drafts are gathered while the next call overwrites them

    def run_draft(self, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Scorer, most: int,
                  threshold: float) -> Scored | None:
        return None

    def _recording(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, scorer: Scorer | None = None,
                   confidence: bool = False) -> _Recording | None:
        rows = _next_power(tokens.shape[1])
        known = plan.chain or (plan.visible is not None and plan.key_positions is None)
        fits = rows <= RECORDED_ROWS and plan.start is not None and plan.start + rows <= cache.capacity
        if not known or not plan.start or not fits or len(tokens) != 1 or not cache.lasting:
            return None
        keys = min(max(LEAST_KEYS, _next_power(plan.start + rows)), cache.capacity)
        key = (id(cache), mask, plan.chain, rows, keys, None if scorer is None else (scorer.key, confidence))
        with self._looking:  # a recording is of one cache, so of one request: what is shared between threads is the list of them
            recording = self._recordings.get(key)
            if recording is None or recording.cache is not cache:
                if not self._lasts(cache, mask):
                    return None
                then = None if scorer is None else (lambda logits: scorer.score(logits[:, -1], confidence))
                recording = self._recordings[key] = _Recording(self.lean, cache, mask, plan.chain, rows, keys, then)
                if len(self._recordings) > MOST_RECORDINGS:
                    self._recordings.popitem(last=False)
            self._recordings.move_to_end(key)
        return recording

    def _lasts(self, cache: KVCache, mask: SkipMask | None) -> bool:
        """Whether passes under this mask are worth recording: one of the first few, or one that has stayed for a while."""
        known = {recording.mask for recording in self._recordings.values() if recording.cache is cache} - {None}
        if mask is None or mask in known or len(known) < RECORDED_MASKS:
            return True
        where, which, count = self._latest
        self._latest = (id(cache), mask, count + 1 if (where, which) == (id(cache), mask) else 1)
        return self._latest[2] > SETTLED


class _Recording:
    """One shape of one mask over the buffers of one cache. then: what becomes of the logits, within the recording."""

    def __init__(self, model: LeanAdapter, cache: KVCache, mask: SkipMask | None, chain: bool, rows: int, keys: int,
                 then: Callable[[Tensor], Any] | None = None):
        device = model.spec.device
        self.model, self.cache, self.mask, self.keys, self.then = model, cache, mask, keys, then
        self.tokens = torch.zeros(1, rows, dtype=torch.long, device=device)
        self.start = torch.zeros(1, dtype=torch.long, device=device)
        self.steps, self.slots = torch.arange(rows, device=device)[None], torch.arange(keys, device=device)
        # Of a tree. A row that only fills up sees itself, since one that sees nothing has no distribution to attend by.
        self.places = None if chain else torch.zeros(1, rows, dtype=torch.long, device=device)
        self.visible = None if chain else torch.zeros(1, 1, rows, keys, dtype=torch.bool, device=device)
        self.replay: Callable[[], Any] | None = None

    def __call__(self, tokens: Tensor, plan: PassPlan) -> Any:
        """tokens: [1, T], T ≤ rows; returns logits [1, rows, V], of which the first T count, or what `then` makes of them.

        The next call overwrites them.
        """
        count = tokens.shape[1]
        self.tokens[:, :count].copy_(tokens)
        self.start.fill_(plan.start or 0)
        if self.places is not None and self.visible is not None and plan.visible is not None:
            self.places[:, :count].copy_(plan.positions)
            self.visible.copy_((self.slots == (self.start + self.steps)[0, :, None])[None, None])
            self.visible[:, :, :count, :plan.keys].copy_(plan.visible)
        if self.replay is None:  # the runs of a recording write what this very pass has to write
            self.replay = _recorded(self._body) if self.tokens.is_cuda else self._body
        return self.replay()

    def _body(self) -> Any:
        slots = self.start + self.steps
        context = self.model.spec.context
        positions = slots if self.places is None else self.places
        if context is not None:
            positions = positions.clamp(max=context - 1)  # of rows that only fill up
        visible = (self.slots <= slots[0, :, None])[None, None] if self.visible is None else self.visible
        plan = PassPlan(positions, slots, self.keys, visible, None)
        logits = looped(self.model, self.tokens, self.cache, plan, self.mask)
        return logits if self.then is None else self.then(logits)


def _recorded(body: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `body`; the result replays it and returns the buffer that its result lies in."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            body()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
