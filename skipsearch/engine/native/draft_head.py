"""Draft heads on the engine native: mix of states and embeddings, layer and head in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.draft_copy import round_matrices
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.panels import PanelLinear, PanelPacker
from skipsearch.models.adapter import DraftScorer, DraftScores, ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


@dataclass(frozen=True)
class NativeInputMix:
    """The input of a draft head's layer, as `InputMix` of `drafters.mtp` describes it.

    projection: [H, 2H] in panels. embedding_norm, hidden_norm: [H], float32 or a wider dtype.
    """

    projection: PanelLinear
    embedding_norm: Tensor
    hidden_norm: Tensor
    eps: float

    @classmethod
    def pack(
        cls, model: NativeAdapter, projection: Tensor, norms: tuple[Tensor, Tensor], eps: float
    ) -> NativeInputMix:
        """Store a mix for the kernels. norms: of embeddings and of hidden states."""
        dtype = model.spec.dtype
        wide = torch.promote_types(dtype, torch.float32)
        # Norms are rounded to the model's dtype, as other engines read them.
        embedding_norm, hidden_norm = (norm.to(dtype).to(wide).contiguous() for norm in norms)
        packer = PanelPacker(model.library, dtype)
        return cls(packer.pack_dense(projection, None), embedding_norm, hidden_norm, eps)

    def make_struct(self) -> structs.InputMixStruct:
        """Return the struct for the kernels. It is valid while this object lives."""
        norms = (
            structs.NormStruct(norm.data_ptr(), self.eps, len(norm))
            for norm in (self.embedding_norm, self.hidden_norm)
        )
        return structs.InputMixStruct(*norms, self.projection.struct)


class NativeHeadRunner:
    """Runs the layer of a draft head, which is the last layer of `adapter`."""

    def __init__(self, adapter: NativeAdapter, mix: NativeInputMix):
        self.adapter, self.mix = adapter, mix
        self._struct = mix.make_struct()
        self._layer = len(adapter.fused_model.layers) - 1

    def rounded(self, bits: int) -> NativeHeadRunner:
        """Return the head with matrices of `bits` bits. Raises: MemoryError."""
        packer = PanelPacker(self.adapter.library, self.adapter.spec.dtype)
        [projection] = packer.round_all([(self.mix.projection, bits)], 1)
        mix = NativeInputMix(
            projection, self.mix.embedding_norm, self.mix.hidden_norm, self.mix.eps
        )
        return NativeHeadRunner(round_matrices(self.adapter, bits, self._layer), mix)

    def run(self, hidden: Tensor, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """Run the layer. hidden: [B, T, H]. tokens: [B, T]. Returns its output, [B, T, H]."""
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        args = self._build_args(hidden, tokens, cache, plan)
        args.hidden_out = out.data_ptr()
        self.adapter.library.call("run_pass", self.adapter.model_struct, args)
        return out

    def run_chain(
        self,
        adapter: ModelAdapter,
        hidden: Tensor,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        scorer: DraftScorer,
        max_tokens: int,
        threshold: float,
    ) -> DraftScores | None:
        """Run the rows of committed tokens, and then draft steps, in one call.

        adapter: that of this head, or the same with fewer rows of the head. hidden: [1, R, H].
        tokens: [1, R], each after its hidden state. Other arguments and the result are as for
        `engine.draft_chain`.
        """
        assert isinstance(adapter, NativeAdapter)
        if not adapter.can_run_chain(plan, scorer):
            return None
        states = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        adapter.reserve(cache, plan.n_keys + max_tokens - 1)
        args = self._build_args(hidden, tokens, cache, plan, adapter)
        args.hidden_out = states.data_ptr()
        return adapter.run_chain(args, scorer, max_tokens, threshold)

    def _build_args(
        self,
        hidden: Tensor,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        adapter: NativeAdapter | None = None,
    ) -> structs.PassArgs:
        end = self._layer + 1
        args = (adapter or self.adapter).build_pass_args(
            tokens, cache, plan, self._layer, end, None, mixed_states=hidden
        )
        args.mix = ctypes.pointer(self._struct)
        return args
