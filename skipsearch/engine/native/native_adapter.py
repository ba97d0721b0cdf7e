"""The native engine: one call of C++ for a whole pass, over repacked weights of a fused model.

It computes what `models.fused` computes, but the order of every sum is fixed. The inputs of an
output are added chunk by chunk, and the keys that a row attends to block by block. The order does
not depend on the number of rows, threads or keys. A row therefore has the same bits in a pass over
one token and in a pass over many.
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.model_struct import build_model_struct
from skipsearch.models.adapter import DraftScorer, DraftScores, DrawSettings, PassRunner
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.loading.quantize import KV_ENDINGS, split_kv_cache_dtype

MAX_CACHED_MASKS = 1024  # whose bytes are cached


class PanelRows(Protocol):
    """Rows of the head for some tokens, in panels. `PanelHeadRows` implements it."""

    count: int

    @property
    def struct(self) -> structs.MatrixStruct:
        """The rows as a matrix."""

    @property
    def token_ids(self) -> Tensor:
        """The token of each row, [count]."""

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the row of each token."""


class NativeAdapter:
    """A fused model whose matrices are `PanelLinear`s, run by the native library."""

    batch_invariant = True  # a row's bits do not depend on the other rows of its pass

    def __init__(self, fused_model: FusedAdapter, library: NativeLibrary):
        """Build the model's struct for the kernels. fused_model: as `repack_weights` leaves it."""
        self.fused_model, self.tokenizer, self.library = fused_model, fused_model.tokenizer, library
        self.spec = replace(fused_model.spec, engine="native")
        self.pass_runner: PassRunner | None = self
        self.new_cache = fused_model.new_cache
        self.embed = fused_model.embed
        self.weight_bytes = fused_model.weight_bytes
        self.read_bytes = fused_model.read_bytes
        self._layer_types = list(fused_model.rotary_tables)
        self._rotary_tables = self._make_rotary_tables()
        self._kv_pointers: WeakKeyDictionary[KVCache, KVPointers] = WeakKeyDictionary()
        self.model_struct, self._keepalive = build_model_struct(fused_model, self._layer_types)
        self._skip_bytes_by_mask: dict[SkipMask, Any] = {}
        self._head_rows: PanelRows | None = None

    def with_head_rows(self, head_rows: PanelRows) -> NativeAdapter:
        """Return a model whose head has these rows only. It shares everything else.

        Its logits are [..., head_rows.count]. Tokens that it chooses are token ids.
        """
        model = copy.copy(self)
        model.pass_runner, model._head_rows = model, head_rows
        return model

    @property
    def n_logits(self) -> int:
        """The number of tokens that the head scores."""
        return self.spec.vocab_size if self._head_rows is None else self._head_rows.count

    def use_activations(self, activations: str) -> None:
        """Set how the inputs of matrices in blocks are rounded. activations: one of ACTIVATIONS."""
        self.model_struct.activations = structs.ACTIVATION_CODES[activations]

    def use_kv_cache_dtype(self, kv_cache_dtype: str) -> None:
        """Set how K/V are stored from now on, and name it in the spec.

        kv_cache_dtype: one of KV_CACHE_DTYPES.
        """
        self.model_struct.kv_format = structs.KV_CODES[kv_cache_dtype]
        base, _ = split_kv_cache_dtype(self.spec.quantization)
        name = f"{base}{KV_ENDINGS[kv_cache_dtype]}"
        self.spec = replace(self.spec, quantization=name)
        self.fused_model.spec = replace(self.fused_model.spec, quantization=name)

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        return self.fused_model.attention_spans

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor:
        """Run a pass in one call, as `engine.forward` does."""
        return self.run_layers(tokens, cache, plan, mask, 0, self.spec.n_layers, True, last_only)

    def run_draft_step(
        self,
        token: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask,
        scorer: DraftScorer,
        with_confidence: bool,
    ) -> DraftScores | None:
        """Run a greedy draft step in one call that returns the token; no logits are written."""
        if not scorer.is_greedy or scorer.n_choices > 1 or self.fused_model.logit_steps:
            return None
        choice = torch.empty(len(token), 1, dtype=torch.long)
        confidence = torch.empty(len(token)) if with_confidence else None
        args = self.build_pass_args(token, cache, plan, 0, self.spec.n_layers, mask)
        args.choice = choice.data_ptr()
        args.last_only = 1
        args.confidence = None if confidence is None else confidence.data_ptr()
        self.library.call("run_pass", self.model_struct, args)
        return DraftScores(choice=choice, confidence=confidence)

    def run_draft_chain(
        self,
        tokens: Tensor,
        cache: KVCache,
        planner: Planner,
        mask: SkipMask,
        scorer: DraftScorer,
        max_tokens: int,
        threshold: float,
    ) -> DraftScores | None:
        """Run draft steps in one call, if the kernels can read the embedding.

        Siblings of a greedy draft are chosen afterwards from the logits of all steps. A sampled
        draft with siblings is left to single steps.
        """
        n_rows = tokens.shape[1]
        n_slots = cache.length + n_rows - 1 + max_tokens
        if len(tokens) > 1 or n_slots > planner.capacity:
            return None
        plan = planner.plan_chain(cache.length, n_rows)
        if not self.can_run_chain(plan, scorer):
            return None
        self.reserve(cache, n_slots)
        args = self.build_pass_args(tokens, cache, plan, 0, self.spec.n_layers, mask)
        return self.run_chain(args, scorer, max_tokens, threshold)

    def can_run_chain(self, plan: PassPlan, scorer: DraftScorer) -> bool:
        """Return whether `run_chain` can draft after a pass with this plan."""
        return bool(
            (scorer.is_greedy or scorer.draw_settings is not None)
            and self.model_struct.embed_scale
            and not self.fused_model.logit_steps
            and plan.is_chain  # not a planner that gives a mask of slots
        )

    def run_chain(
        self, args: structs.PassArgs, scorer: DraftScorer, max_tokens: int, threshold: float
    ) -> DraftScores:
        """Run draft steps in one call; return their scores as `engine.draft_chain` does.

        args: of the first pass. The cache has slots for all steps.
        """
        choice = torch.empty(max_tokens, 1, dtype=torch.long)
        confidence = torch.empty(max_tokens)
        args.choice, args.confidence = choice.data_ptr(), confidence.data_ptr()
        args.last_only = 1
        if scorer.draw_settings is not None:
            return self._run_sampled_chain(
                args, scorer.draw_settings, choice, confidence, threshold
            )
        n_siblings = min(scorer.n_choices, self.n_logits) - 1
        logits = (
            torch.empty(max_tokens, self.n_logits, dtype=self.spec.dtype) if n_siblings else None
        )
        args.logits = _ptr(logits)
        n_steps = self.library.run_draft_chain(self.model_struct, args, max_tokens, threshold)
        choice, confidence = choice[:n_steps], confidence[:n_steps]
        if logits is not None:
            rows = choice if self._head_rows is None else self._head_rows.rows_of(choice)
            siblings = logits[:n_steps].scatter(1, rows, float("-inf")).topk(n_siblings).indices
            if self._head_rows is not None:
                siblings = self._head_rows.token_ids[siblings]
            choice = torch.cat([choice, siblings], dim=1)
        return DraftScores(choice=choice, confidence=confidence)

    def _run_sampled_chain(
        self,
        args: structs.PassArgs,
        settings: DrawSettings,
        choice: Tensor,
        confidence: Tensor,
        threshold: float,
    ) -> DraftScores:
        """Run sampled draft steps in one call, as `run_chain` does.

        choice [N, 1], confidence [N]: `args` points to them already.
        """
        max_tokens, dtype = len(choice), self.spec.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits = torch.empty(self.n_logits, dtype=dtype)
        probs = torch.empty(max_tokens, self.n_logits, dtype=wide)
        state = settings.generator.get_state() if threshold > 0 else None
        uniforms = torch.rand(max_tokens, generator=settings.generator, dtype=torch.float64)
        sampling = structs.SamplingStruct(
            settings.temperature,
            settings.top_p,
            settings.top_k,
            uniforms.data_ptr(),
            probs.data_ptr(),
        )
        args.logits = logits.data_ptr()
        args.sampling = ctypes.pointer(sampling)
        n_steps = self.library.run_draft_chain(self.model_struct, args, max_tokens, threshold)
        if n_steps < max_tokens and state is not None:
            # A seed gives the tokens that it gives in single steps: put unused numbers back.
            settings.generator.set_state(state)
            torch.rand(n_steps, generator=settings.generator, dtype=torch.float64)
        probs = probs[:n_steps]
        if self._head_rows is not None:
            rows, probs = probs, probs.new_zeros(n_steps, self.spec.vocab_size)
            probs[:, self._head_rows.token_ids] = rows
        return DraftScores(choice[:n_steps], probs, confidence[:n_steps])

    def run_layers(
        self,
        tokens_or_hidden: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | bytes | None,
        first_layer: int,
        end_layer: int,
        with_head: bool = False,
        last_only: bool = False,
    ) -> Tensor:
        """Run layers `first_layer` … `end_layer` − 1 in one call.

        The kernels round hidden states to their dtype after every sub-layer. A pass in several
        calls therefore has the bits of a pass in one call.
        """
        batch, rows = tokens_or_hidden.shape[:2]
        out = torch.empty(
            batch,
            1 if last_only else rows,
            self.n_logits if with_head else self.spec.hidden_size,
            dtype=self.spec.dtype,
        )
        if not rows:  # the kernels need at least one row
            return out
        args = self.build_pass_args(tokens_or_hidden, cache, plan, first_layer, end_layer, mask)
        if with_head:
            args.logits, args.last_only = out.data_ptr(), last_only
        else:
            args.hidden_out = out.data_ptr()
        self.library.call("run_pass", self.model_struct, args)
        return self._finish_logits(out) if with_head else out

    def block(
        self,
        i: int,
        h: Tensor,
        cache: KVCache,
        plan: PassPlan,
        *,
        attn: bool = True,
        mlp: bool = True,
    ) -> Tensor:
        skip = bytearray(2 * len(self.fused_model.layers))
        skip[2 * i], skip[2 * i + 1] = not attn, not mlp
        return self.run_layers(h, cache, plan, bytes(skip), i, i + 1)

    def head(self, h: Tensor) -> Tensor:
        h, rows = h.contiguous(), h.numel() // self.spec.hidden_size
        logits = torch.empty(*h.shape[:-1], self.n_logits, dtype=self.spec.dtype)
        args = structs.PassArgs(
            hidden=h.data_ptr(),
            logits=logits.data_ptr(),
            batch=1,
            rows=rows,
            threads=torch.get_num_threads(),
        )
        self._set_head(args)
        self.library.call("run_pass", self.model_struct, args)
        return self._finish_logits(logits)

    def _set_head(self, args: structs.PassArgs) -> None:
        if self._head_rows is not None:
            args.head = ctypes.pointer(self._head_rows.struct)
            args.head_tokens = self._head_rows.token_ids.data_ptr()

    def _finish_logits(self, logits: Tensor) -> Tensor:
        for logit_step in self.fused_model.logit_steps:
            logits = logit_step(logits)
        return logits

    def build_pass_args(
        self,
        tokens_or_hidden: Tensor,
        cache: KVCache,
        plan: PassPlan,
        first_layer: int,
        end_layer: int,
        mask: SkipMask | bytes | None,
        mixed_states: Tensor | None = None,
    ) -> structs.PassArgs:
        """Return the arguments of a pass over tokens [B, T] or hidden states [B, T, H].

        They point into `cache`, and own all other memory that they point to. mixed_states: hidden
        states [B, T, H] that a draft head mixes with the tokens' embeddings; None: there is no mix.
        """
        self.reserve(cache, plan.n_keys)
        skip, kv = self._skip_bytes(mask), self._kv_pointers.get(cache)
        if kv is None or kv.generation != cache.generation:
            kv = self._make_kv_pointers(cache, first_layer, end_layer, skip)
        rotary = self._rotary_tables
        if not all(
            map(
                is_,
                rotary.sources,
                [
                    self.fused_model.rotary_tables[layer_type].cos_sin[0]
                    for layer_type in self._layer_types
                ],
            )
        ):
            rotary = self._rotary_tables = self._make_rotary_tables()
        tokens_or_hidden = tokens_or_hidden.contiguous()
        tokens: Tensor | None = None
        hidden: Tensor | None = tokens_or_hidden
        if not tokens_or_hidden.is_floating_point():
            if self.model_struct.embed_scale:
                tokens = tokens_or_hidden
                hidden = None if mixed_states is None else mixed_states.contiguous()
            else:
                hidden = self.embed(tokens_or_hidden)
        positions = _row_contiguous(plan.positions)
        key_positions = _row_contiguous(plan.key_positions)
        slots = positions if plan.slots is plan.positions else _row_contiguous(plan.slots)
        visible = None if plan.is_chain else _row_contiguous(plan.mask)
        args = structs.PassArgs(
            tokens=_ptr(tokens),
            hidden=_ptr(hidden),
            batch=tokens_or_hidden.shape[0],
            rows=tokens_or_hidden.shape[1],
            first_layer=first_layer,
            end_layer=end_layer,
            skip=None if skip is None else ctypes.addressof(skip),
            positions=_ptr(positions),
            positions_batch_stride=_batch_stride(positions),
            slots=_ptr(slots),
            slots_batch_stride=_batch_stride(slots),
            visible=_ptr(visible),
            visible_batch_stride=_batch_stride(visible),
            visible_row_stride=0 if visible is None else visible.stride(-2),
            key_positions=_ptr(key_positions),
            key_positions_batch_stride=_batch_stride(key_positions),
            n_keys=plan.n_keys,
            capacity=cache.capacity,
            k=kv.keys_ptr,
            v=kv.values_ptr,
            rotary_tables=ctypes.addressof(rotary.structs),
            threads=torch.get_num_threads(),
        )
        args.keepalive = [
            tokens_or_hidden,
            hidden,
            positions,
            slots,
            key_positions,
            visible,
            skip,
            kv,
            rotary,
        ]
        self._set_head(args)
        return args

    def reserve(self, cache: KVCache, slots: int) -> None:
        """Reserve `slots` slots of the cache for passes, and extend the rotary tables as far."""
        self.fused_model.prepare(slots)
        cache.reserve(slots)

    def _make_kv_pointers(
        self, cache: KVCache, first_layer: int, end_layer: int, skip: Any
    ) -> KVPointers:
        """Return the addresses of a cache's K/V buffers. Buffers of layers that run are created.

        skip: as `_skip_bytes` returns it.
        """
        for i in range(first_layer, end_layer):
            if not (skip and skip[2 * i]):
                attention = self.fused_model.layers[i][0]
                empty = self._make_kv_rows(attention.kv_heads, attention.head_dim)
                cache.get_buffers(i, empty, empty)
        kv = KVPointers(cache)
        # Cache the pointers if none of the buffers will be replaced in this generation.
        if all(keys is not None and keys.shape[2] == cache.capacity for keys in cache.keys):
            self._kv_pointers[cache] = kv
        return kv

    def _make_kv_rows(self, kv_heads: int, head_dim: int) -> Tensor:
        """Return [1, kv_heads, 0, …], no rows in the format in which kernels store K/V."""
        if self.model_struct.kv_format == structs.KV_CODES["int8"]:
            scale_bytes = -(-head_dim // structs.KV_GROUP) * torch.float32.itemsize
            return torch.empty(1, kv_heads, 0, head_dim + scale_bytes, dtype=torch.int8)
        return torch.empty(1, kv_heads, 0, head_dim, dtype=self.spec.dtype)

    def _make_rotary_tables(self) -> RotaryTables:
        """Return cos and sin of all positions, in float32 or a wider dtype."""
        dtype = torch.promote_types(self.spec.dtype, torch.float32)
        sources, keepalive = list[Tensor](), list[Tensor]()
        tables = (structs.RotaryTableStruct * len(self._layer_types))()
        for table, layer_type in zip(tables, self._layer_types, strict=True):
            cos_sin = self.fused_model.rotary_tables[layer_type].cos_sin
            cos, sin = (x.to(dtype).contiguous() for x in cos_sin)
            table.cos, table.sin = cos.data_ptr(), sin.data_ptr()
            table.width, table.length = cos.shape[-1], cos.shape[1]
            sources.append(cos_sin[0])
            keepalive += [cos, sin]
        return RotaryTables(sources, keepalive, tables)

    def _skip_bytes(self, mask: SkipMask | bytes | None) -> Any:
        """Return [2 · layers] bytes, attention and MLP of each layer, 1 for a skipped one."""
        if not isinstance(mask, SkipMask):
            return None if mask is None else (ctypes.c_uint8 * len(mask)).from_buffer_copy(mask)
        skip = self._skip_bytes_by_mask.get(mask)
        if skip is None:
            if len(self._skip_bytes_by_mask) >= MAX_CACHED_MASKS:
                self._skip_bytes_by_mask = {}
            skip = (ctypes.c_uint8 * (2 * len(self.fused_model.layers)))()
            for i in mask.sublayers:
                skip[i] = 1
            self._skip_bytes_by_mask[mask] = skip
        return skip


class RotaryTables(NamedTuple):
    """The cos and sin tables for the kernels."""

    sources: list[Tensor]  # cosines that they were made from
    keepalive: list[Tensor]  # what the structs point to
    structs: Any  # an array of RotaryTableStruct


class KVPointers:
    """The addresses of a cache's K/V buffers, valid for one generation number of the cache.

    It has no reference to the tensors, so a cache that shrinks releases their memory.
    """

    def __init__(self, cache: KVCache):
        self.generation = cache.generation
        self._pointer_arrays = [
            (ctypes.c_void_p * len(side))(
                *(0 if buffer is None else buffer.data_ptr() for buffer in side)
            )
            for side in (cache.keys, cache.values)
        ]
        self.keys_ptr, self.values_ptr = map(ctypes.addressof, self._pointer_arrays)


def _row_contiguous(table: Tensor | None) -> Tensor | None:
    """Return […, N] with the elements of a row next to each other in memory."""
    return (
        table
        if table is None or table.stride(-1) == 1 or table.shape[-1] == 1
        else table.contiguous()
    )


def _ptr(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _batch_stride(tensor: Tensor | None) -> int:
    """Return the number of elements from one text to the next; 0 if all texts share a row."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
