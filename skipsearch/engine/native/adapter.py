"""The native engine: one call of C++ for a whole pass, over the weights of a fused model, laid out again for it.

What it computes is what `models.lean` says, sum by sum in one order: an output's inputs chunk by chunk, a row's keys block by block,
whatever the number of rows, threads and keys. So a row has the same bits in a pass of one token and in one of many.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine.native import abi
from skipsearch.engine.native.described import act_of, described, scale_of
from skipsearch.engine.native.eights import eights_room, in_eights
from skipsearch.engine.native.library import Library
from skipsearch.engine.native.panels import Panels, Room, TiedEmbedding, in_panels, room_for
from skipsearch.mask import SkipMask
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.linear import Linear
from skipsearch.models.quantize import NATIVE
from skipsearch.models.spec import PassRunner, Scored, Scorer

GREEDY = ("greedy", 1)           # the key of a scorer that wants the most likely token alone
MOST_MASKS = 1024                # whose bytes are remembered


class NativeAdapter:
    """A fused model whose matrices are `Panels`, driven by the native library."""

    steady = True                # a row's bits do not depend on the pass that it is in

    def __init__(self, lean: LeanAdapter, library: Library):
        """lean: as `in_its_layout` leaves it."""
        self.lean, self.tokenizer, self.library = lean, lean.tokenizer, library
        self.spec = replace(lean.spec, engine="native")
        self.passes: PassRunner | None = self
        self.new_cache, self.embed, self.weight_bytes, self.read_bytes = lean.new_cache, lean.embed, lean.weight_bytes, lean.read_bytes
        self._kinds = list(lean.tables)
        self._turns = self._new_turns()
        self._buffers: WeakKeyDictionary[KVCache, _Buffers] = WeakKeyDictionary()
        self._model, self._held = described(lean, self._kinds)
        self._skips: dict[SkipMask, Any] = {}

    @property
    def spans(self) -> list[tuple[int | None, int | None]]:
        return self.lean.spans

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor:
        """As `engine.forward`, in one call."""
        return self.run_layers(tokens, cache, plan, mask, 0, self.spec.n_layers, True, last_only)

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, confidence: bool) -> Scored | None:
        """A draft step that is greedy ends in the token itself, and its logits are written nowhere."""
        if scorer.key != GREEDY or self.lean.after:
            return None
        choice = torch.empty(len(token), 1, dtype=torch.long)
        sure = torch.empty(len(token)) if confidence else None
        step = self._pass(token, cache, plan, 0, self.spec.n_layers, mask)
        step.choice, step.last_only, step.confidence = choice.data_ptr(), 1, None if sure is None else sure.data_ptr()
        self.library.whole_pass(self._model, step)
        return Scored(choice, sure)

    def run_draft(self, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Scorer, most: int,
                  threshold: float) -> Scored | None:
        """Greedy drafts alone, where the embedding is known. Siblings are found in the logits of all steps at once."""
        key: Any = scorer.key
        greedy, known = isinstance(key, tuple) and key[0] == GREEDY[0], self._model.embed_scale and not self.lean.after
        if not greedy or not known or len(token) > 1 or cache.length + most > cache.capacity:
            return None
        plan = planner.chain(cache.length, 1)
        if not plan.chain:   # a planner that says slot by slot what a pass may see
            return None
        choice, sure, siblings = torch.empty(most, 1, dtype=torch.long), torch.empty(most), min(key[1], self.spec.vocab) - 1
        logits = torch.empty(most, self.spec.vocab, dtype=self.spec.dtype) if siblings else None
        step = self._pass(token, cache, plan, 0, self.spec.n_layers, mask)
        step.choice, step.confidence, step.logits, step.last_only = choice.data_ptr(), sure.data_ptr(), _at(logits), 1
        count = self.library.draft(self._model, step, most, threshold)
        choice, sure = choice[:count], sure[:count]
        if logits is not None:
            others = logits[:count].scatter(1, choice, float("-inf")).topk(siblings).indices
            choice = torch.cat([choice, others], dim=1)
        return Scored(choice, sure)

    def run_layers(self, given: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | bytes | None, first: int, last: int,
                   logits: bool = False, last_only: bool = False) -> Tensor:
        """In one call. The kernels round the state to its dtype behind every sub-layer, so a pass in parts has the bits of a whole one."""
        batch, rows = given.shape[:2]
        out = torch.empty(batch, 1 if last_only else rows, self.spec.vocab if logits else self.spec.hidden, dtype=self.spec.dtype)
        if not rows:   # the kernels take one row at least
            return out
        step = self._pass(given, cache, plan, first, last, mask)
        if logits:
            step.logits, step.last_only = out.data_ptr(), last_only
        else:
            step.hidden_out = out.data_ptr()
        self.library.whole_pass(self._model, step)
        return self._after(out) if logits else out

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        skip = bytearray(2 * len(self.lean.layers))
        skip[2 * i], skip[2 * i + 1] = not attn, not mlp
        return self.run_layers(h, cache, plan, bytes(skip), i, i + 1)

    def head(self, h: Tensor) -> Tensor:
        h, rows = h.contiguous(), h.numel() // self.spec.hidden
        logits = torch.empty(*h.shape[:-1], self.spec.vocab, dtype=self.spec.dtype)
        step = abi.Pass(hidden=h.data_ptr(), logits=logits.data_ptr(), batch=1, rows=rows, threads=torch.get_num_threads())
        self.library.whole_pass(self._model, step)
        return self._after(logits)

    def _after(self, logits: Tensor) -> Tensor:
        for piece in self.lean.after:
            logits = piece(logits)
        return logits

    def _pass(self, given: Tensor, cache: KVCache, plan: PassPlan, first: int, last: int, skipped: SkipMask | bytes | None) -> abi.Pass:
        """given: tokens [B, T], or hidden states [B, T, H]. What is returned points into `cache`, and holds all else that it points to."""
        skip, buffers = self._skip(skipped), self._buffers.get(cache)
        if buffers is None or not buffers.those_of(cache):
            buffers = self._new_buffers(cache, first, last, skip)
        turns = self._turns
        if not all(map(is_, turns.of, [self.lean.tables[kind].table[0] for kind in self._kinds])):
            turns = self._turns = self._new_turns()
        given = given.contiguous()
        hidden = given if given.is_floating_point() else None if self._model.embed_scale else self.embed(given)
        positions, key_positions = _rows(plan.positions), _rows(plan.key_positions)
        slots = positions if plan.slots is plan.positions else _rows(plan.slots)
        visible = None if plan.chain else _rows(plan.visible)
        step = abi.Pass(
            tokens=None if hidden is not None else given.data_ptr(), hidden=_at(hidden), batch=given.shape[0], rows=given.shape[1],
            first=first, last=last, skip=None if skip is None else ctypes.addressof(skip),
            positions=_at(positions), positions_step=_step(positions), slots=_at(slots), slots_step=_step(slots),
            visible=_at(visible), visible_step=_step(visible), visible_row=0 if visible is None else visible.stride(-2),
            key_positions=_at(key_positions), key_positions_step=_step(key_positions), keys=plan.keys, capacity=cache.capacity,
            k=buffers.at_keys, v=buffers.at_values, tables=ctypes.addressof(turns.tables), threads=torch.get_num_threads())
        step.held = [given, hidden, positions, slots, key_positions, visible, skip, buffers, turns]
        return step

    def _new_buffers(self, cache: KVCache, first: int, last: int, skip: Any) -> _Buffers:
        """Makes what the layers first … last − 1 have none of yet."""
        for i in range(first, last):
            if cache.keys[i] is None and not (skip and skip[2 * i]):
                part = self.lean.layers[i][0]
                like = torch.empty(1, part.kv_heads, 0, part.head_dim, dtype=self.spec.dtype)
                cache.buffers(i, like, like)
        buffers = _Buffers(cache)
        if all(keys is not None for keys in buffers.keys):
            self._buffers[cache] = buffers
        return buffers

    def _new_turns(self) -> _Turns:
        """Angles of all positions, in float32 or better: families keep them in their own dtype or not."""
        wide, of, held = torch.promote_types(self.spec.dtype, torch.float32), list[Tensor](), list[Tensor]()
        tables = (abi.Table * len(self._kinds))()
        for table, kind in zip(tables, self._kinds, strict=True):
            angles = self.lean.tables[kind].table
            cos, sin = (x.to(wide).contiguous() for x in angles)
            table.cos, table.sin, table.width, table.length = cos.data_ptr(), sin.data_ptr(), cos.shape[-1], cos.shape[1]
            of, held = [*of, angles[0]], [*held, cos, sin]
        return _Turns(of, held, tables)

    def _skip(self, skipped: SkipMask | bytes | None) -> Any:
        """[2 · layers] bytes, attention and MLP in turn, 1 where one is left out."""
        if not isinstance(skipped, SkipMask):
            return None if skipped is None else (ctypes.c_uint8 * len(skipped)).from_buffer_copy(skipped)
        found = self._skips.get(skipped)
        if found is None:
            if len(self._skips) >= MOST_MASKS:
                self._skips = {}
            found = (ctypes.c_uint8 * (2 * len(self.lean.layers)))()
            for i in skipped.sublayers:
                found[i] = 1
            self._skips[skipped] = found
        return found


def why_not(lean: LeanAdapter) -> str | None:
    """What keeps a fused model from the native kernels, as half a sentence; None if nothing does."""
    if lean.spec.device.type != "cpu":
        return f"it is for CPUs and {lean.spec.id} is on {lean.spec.device}"
    if lean.spec.dtype_name not in abi.DTYPES:
        return f"it computes in {', '.join(abi.DTYPES)} and {lean.spec.id} is in {lean.spec.dtype_name}"
    odd = next((mlp.act for _, mlp in lean.layers if act_of(mlp) is None), None)
    return None if odd is None else f"it has no activation {getattr(odd, '__name__', None) or type(odd).__name__}"


def in_its_layout(lean: LeanAdapter, library: Library, eight_bits: bool = False) -> NativeAdapter:
    """The native model, whose weights `lean` shares from now on: each matrix is laid out again and the old one is released at once.

    lean: a model of which `why_not` has nothing to say. eight_bits: its matrices become int8, as `eights` has it, and a tied embedding with
    the head; the model is then another one, and its spec says so. An embedding of its own stays as it is: few of its rows are read.
    """
    matrices = [(matrix, halves) for attention, mlp in lean.layers
                for matrix, halves in ((attention.qkv, 1), (attention.out, 1), (mlp.gate_up, 2), (mlp.down, 1))] + [(lean.unembed, 1)]
    room = Room(sum(eights_room(matrix.shape, halves) if eight_bits else room_for(matrix.shape, halves, lean.spec.dtype)
                    for matrix, halves in matrices))
    del matrices

    def moved(matrix: Linear, halves: int = 1) -> Panels:
        return (in_eights if eight_bits else in_panels)(matrix.dense(), matrix.bias, halves, library, room)

    for i, (attention, mlp) in enumerate(lean.layers):
        attention = replace(attention, qkv=moved(attention.qkv), out=moved(attention.out))
        lean.layers[i] = attention, mlp   # so that no more than one matrix is there twice
        lean.layers[i] = attention, replace(mlp, gate_up=moved(mlp.gate_up, 2), down=moved(mlp.down))
    table: Any = lean._embedding
    tied = isinstance(table, nn.Embedding) and table.weight.data_ptr() == _address(lean.unembed)
    lean.unembed = head = moved(lean.unembed)
    if tied:
        lean._embedding = TiedEmbedding(head, scale_of(table))
    if eight_bits:
        lean.spec = replace(lean.spec, quantization=NATIVE)
    return NativeAdapter(lean, library)


def _address(matrix: Linear) -> int:
    return 0 if matrix.weight.is_mkldnn else matrix.weight.data_ptr()


class _Turns(NamedTuple):
    """Tables of angles for the kernels. of: the cosines that they were made of; held: what they point to."""

    of: list[Tensor]
    held: list[Tensor]
    tables: Any


class _Buffers:
    """Where the keys and values of a cache lie. What was found out in an earlier pass costs less than asking every tensor again."""

    def __init__(self, cache: KVCache):
        self.keys, self.values = list(cache.keys), list(cache.values)
        self._at = [(ctypes.c_void_p * len(side))(*(0 if buffer is None else buffer.data_ptr() for buffer in side))
                    for side in (self.keys, self.values)]
        self.at_keys, self.at_values = map(ctypes.addressof, self._at)

    def those_of(self, cache: KVCache) -> bool:
        """Whether the cache still has the very tensors."""
        return all(map(is_, self.keys, cache.keys)) and all(map(is_, self.values, cache.values))


def _rows(table: Tensor | None) -> Tensor | None:
    """[…, N] with neighbours in memory."""
    return table if table is None or table.stride(-1) == 1 or table.shape[-1] == 1 else table.contiguous()


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(tensor: Tensor | None) -> int:
    """From one text to the next; 0 where they share it."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
