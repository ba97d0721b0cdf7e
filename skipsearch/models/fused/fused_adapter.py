"""The fast path for Llama-shaped models: fused weight matrices, and few kernels per sub-layer.

Fusing consumes a Hugging Face model. The matrices of each layer are packed and the old ones freed
at once, so that at most one layer is in memory twice. A model that a caller still references is
therefore fused only on request.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.models.adapter import ModelSpec, PassRunner
from skipsearch.models.experts import Experts, experts_first_order
from skipsearch.models.families.decompose import LayerKind, ModelParts, SubLayer, decompose_model
from skipsearch.models.families.table import Family
from skipsearch.models.fused.attention import Attention, PassInputs
from skipsearch.models.fused.causal_masks import CausalMaskCache
from skipsearch.models.fused.linear import (
    Linear,
    PlainLinear,
    StoredFusedLinear,
    free_weights_,
    fuse_linears,
    pack_linear,
)
from skipsearch.models.fused.mlp import (
    MLP,
    Activation,
    ClampedSwiGLU,
    GatedActivation,
    Routing,
    SharedExpert,
    gelu_tanh,
)
from skipsearch.models.fused.norms import RMSNorm, rms_norm_from
from skipsearch.models.fused.rope import RotaryTable, double_angles, half_order_rows, no_rotation
from skipsearch.models.kv_cache import KVCache, PassPlan, round_slots
from skipsearch.models.stored_linear import StoredEmbedding, StoredExperts, StoredLinear

FUSABLE = frozenset(
    {
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_oss",
        "granite",
        "granitemoe",
        "llama",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
    }
)
SubLayerT = TypeVar("SubLayerT", Attention, MLP)
NO_ROPE = "unturned"  # layer type of layers without RoPE
MAX_QUERY_FACTORS = 1 << 16


def why_not_fusable(config: Any, quantization: str | None, n_devices: int) -> str | None:
    """Return why a model cannot be fused, as a phrase; None if it can."""
    text = config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if config.model_type not in FUSABLE:
        names = ", ".join(sorted(FUSABLE))
        return f"{config.model_type} models are not of its shape (they are: {names})"
    if quantization is not None:
        return f"its weights are quantised ({quantization})"
    if n_devices > 1:
        return "it is spread over several GPUs"
    if any(
        isinstance(part, dict) and part.get("rope_type") == "dynamic"
        for part in (rope, *rope.values())
    ):
        return "its rotary angles change with the length of the text"
    if getattr(text, "clip_qkv", None) is not None:
        return "it clips queries, keys and values"
    if rope.get("llama_4_scaling_beta"):
        period = rope.get("original_max_position_embeddings") or 0
        if text.max_position_embeddings > MAX_QUERY_FACTORS * period:
            return "the factor of its queries changes too often"
    return None


class LatestFusedPass(threading.local):
    """The inputs of the latest pass of a thread. Several threads may share a model."""

    inputs: PassInputs | None = None


@dataclass(frozen=True)
class FusedFrom:
    """What a fused model keeps of the modules of transformers that it was made from."""

    config: Any
    family: Family
    rotary: Any  # the module of rotary angles; None: there is none


class FusedAdapter:
    """A `ModelAdapter` over fused weights."""

    pass_runner: PassRunner | None = None
    read_origin: Callable[[], FusedFrom] | None = None  # None: it was not made from modules

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Callable[[Tensor], Tensor],
        layers: list[tuple[Attention, MLP]],
        rotary_tables: dict[str | None, RotaryTable],
        norm: RMSNorm,
        unembed: Linear,
        logit_steps: list[Callable[[Tensor], Tensor]],
        tokenizer: Any = None,
    ):
        self.spec = spec
        self.tokenizer = tokenizer
        self.layers = layers
        self.rotary_tables = rotary_tables  # by layer type
        self.norm = norm
        self.unembed = unembed
        self.logit_steps = logit_steps
        self.causal_masks = CausalMaskCache(spec.dtype, spec.device)
        self._embedding = embedding
        self._slots = 0  # slots for which `prepare` has made tables and masks
        self._latest = LatestFusedPass()

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        return [(attention.kind.window, None) for attention, _ in self.layers]

    @property
    def weight_bytes(self) -> int:
        table: Tensor = self._embedding.weight  # type: ignore[attr-defined]
        tied = (
            not self.unembed.weight.is_mkldnn and table.data_ptr() == self.unembed.weight.data_ptr()
        )
        unread = 0 if self.experts is None else self.experts.unread_bytes
        return self.read_bytes + unread + (0 if tied else table.nbytes)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some; None: there are none."""
        routed = [mlp for _, mlp in self.layers if mlp.routing is not None]
        if not routed or (routing := routed[0].routing) is None:
            return None
        n, expert_bytes = routing.n_experts, routed[0].gate_up.nbytes + routed[0].down.nbytes
        return Experts(n, routing.per_token, len(routed), expert_bytes // n)

    @property
    def read_bytes(self) -> int:
        parts = [part for layer in self.layers for part in _list_parts(layer)]
        matrices = [part for part in parts if hasattr(part, "add_to")] + [self.unembed]
        norms = [part for part in parts if isinstance(part, RMSNorm)] + [self.norm]
        vectors = [n.weight for n in norms] + [m.bias for m in matrices if m.bias is not None]
        unread = 0 if self.experts is None else self.experts.unread_bytes
        return sum(m.nbytes for m in matrices) + sum(v.nbytes for v in vectors) - unread

    def with_matrices(self, convert: Callable[[Linear], Linear]) -> FusedAdapter:
        """Return a variant with all matrices of the layers converted.

        Head, norms, embedding and tables are shared.
        """
        variant = copy.copy(self)
        variant.layers = [convert_layer(layer, convert) for layer in self.layers]
        return variant

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        self.prepare(capacity)
        return KVCache(self.spec.n_layers, batch, capacity)

    def prepare(self, slots: int) -> None:
        """Extend rotary tables and masks for passes over `slots` slots."""
        if slots > self._slots:
            slots = round_slots(slots)
            self.causal_masks.grow_to(slots)
            for table in self.rotary_tables.values():
                table.grow_to(slots)
            self._slots = slots

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._embedding(tokens)

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
        attention, feed_forward = self.layers[i]
        if attn:
            h = attention(h, cache, self.get_pass_inputs(plan))
        return feed_forward(h) if mlp else h

    def head(self, h: Tensor) -> Tensor:
        logits = self.unembed(self.norm(h.reshape(-1, h.shape[-1]))).view(*h.shape[:-1], -1)
        for step in self.logit_steps:
            logits = step(logits)
        return logits

    def get_pass_inputs(self, plan: PassPlan) -> PassInputs:
        shared = self._latest.inputs
        if shared is None or shared.plan is not plan:
            self.prepare(plan.n_keys)
            shared = self._latest.inputs = PassInputs(plan, self.rotary_tables, self.causal_masks)
        return shared


def _list_parts(layer: tuple[Attention, MLP]) -> Iterator[Any]:
    """Yield the fields of a layer, and of what its MLP consists of."""
    attention, mlp = layer
    for part in (attention, mlp, mlp.routing, mlp.shared):
        if part is not None:
            yield from (getattr(part, name) for name in part.__dataclass_fields__)


def list_matrices(layer: tuple[Attention, MLP]) -> list[Linear]:
    """Return the matrices of a layer that a copy may round, in the order of a pass.

    Routers and the gates of shared experts keep their numbers.
    """
    attention, mlp = layer
    shared = [] if mlp.shared is None else [mlp.shared.gate_up, mlp.shared.down]
    return [attention.qkv, attention.out, mlp.gate_up, mlp.down, *shared]


def replace_matrices(
    layer: tuple[Attention, MLP], matrices: Sequence[Linear]
) -> tuple[Attention, MLP]:
    """Return a layer with other matrices, in the order of `list_matrices`."""
    attention, mlp = layer
    qkv, out, gate_up, down, *rest = matrices
    shared = None if mlp.shared is None else replace(mlp.shared, gate_up=rest[0], down=rest[1])
    return (
        replace(attention, qkv=qkv, out=out),
        replace(mlp, gate_up=gate_up, down=down, shared=shared),
    )


def convert_layer(
    layer: tuple[Attention, MLP], convert: Callable[[Linear], Linear]
) -> tuple[Attention, MLP]:
    """Return a layer with all matrices of `list_matrices` converted."""
    return replace_matrices(layer, [convert(matrix) for matrix in list_matrices(layer)])


def fuse_model(
    model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any = None
) -> FusedAdapter:
    """Fuse a model for which `why_not_fusable` returns None, and free the model's matrices."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    parts = decompose_model(model, family)
    kinds = [
        kind
        if family.uses_rope is None or family.uses_rope(layer.attn.run)
        else replace(kind, layer_type=NO_ROPE)
        for kind, layer in zip(parts.kinds, parts.layers, strict=True)
    ]
    rotary = double_angles(parts.rotary) if family.rotary_halves else parts.rotary
    tables = {
        layer_type: RotaryTable(no_rotation(rotary), None, spec)
        if layer_type == NO_ROPE
        else RotaryTable(rotary, layer_type, spec)
        for layer_type in dict.fromkeys(kind.layer_type for kind in kinds)
    }
    layers = list[tuple[Attention, MLP]]()
    for i, (kind, layer) in enumerate(zip(kinds, parts.layers, strict=True)):
        interleaved_dims = tables[kind.layer_type].rotary_dims if family.rope_interleaved else 0
        attention = _fuse_attention(i, layer.attn, kind, config, interleaved_dims, spec.device)
        layers.append((attention, _fuse_mlp(layer.mlp)))
    norm, unembed, *logit_steps = parts.head_steps
    embedding, matrix = _embedding_and_head(parts, unembed)
    final_norm = rms_norm_from(norm)
    if family.branch_scale_key is not None:
        # The residual stream is divided by the scale of its branches, which are then added as they
        # are. An RMS norm of the divided stream is the same with a smaller epsilon.
        scale = getattr(config, family.branch_scale_key)
        embed_scale = getattr(config, str(family.embed_scale_key), 1.0) / scale
        embedding = _scale_embedding(embedding, embed_scale)
        final_norm = replace(final_norm, eps=final_norm.eps / scale**2)
        layers = [
            (_divide_epsilon(attention, scale**2), _divide_epsilon(mlp, scale**2))
            for attention, mlp in layers
        ]
    fused = FusedAdapter(
        spec, embedding, layers, tables, final_norm, matrix, logit_steps, tokenizer
    )
    origin = FusedFrom(model.config, family, parts.rotary)
    fused.read_origin = lambda: origin
    return fused


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by a number."""

    def __init__(self, weight: Tensor, embed_scale: float):
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.embed_scale = embed_scale

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens."""
        return super().forward(tokens) * self.embed_scale


def _divide_epsilon(sublayer: SubLayerT, divisor: float) -> SubLayerT:
    """Return a sub-layer whose norm has a smaller epsilon."""
    assert sublayer.norm is not None
    return replace(sublayer, norm=replace(sublayer.norm, eps=sublayer.norm.eps / divisor))


def _scale_embedding(embedding: Any, embed_scale: float) -> nn.Module:
    """Return an embedding whose rows are multiplied by a number."""
    if not isinstance(embedding, StoredEmbedding):
        return ScaledEmbedding(embedding.weight, embed_scale)
    table = ScaledEmbedding(embedding.table.weight, embed_scale)
    return StoredEmbedding(embedding.matrix, table, embedding.dtype)


def _fuse_attention(
    i: int,
    sublayer: SubLayer,
    kind: LayerKind,
    config: Any,
    interleaved_dims: int,
    device: torch.device,
) -> Attention:
    """Fuse an attention. interleaved_dims: dimensions of a head that rotate in neighbour pairs."""
    module: Any = sublayer.run
    projections = (
        [module.qkv_proj]
        if hasattr(module, "qkv_proj")
        else [module.q_proj, module.k_proj, module.v_proj]
    )
    q_norm, k_norm = (_optional_norm(getattr(module, name, None)) for name in ("q_norm", "k_norm"))
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    order = (
        half_order_rows(heads, kv_heads, size, interleaved_dims, device)
        if interleaved_dims
        else None
    )
    return Attention(
        i,
        kind,
        _optional_norm(sublayer.norm),
        fuse_linears(projections, order),
        q_norm,
        k_norm,
        fuse_linears([module.o_proj]),
        _optional_norm(sublayer.post_norm),
        heads,
        kv_heads,
        size,
        module.scaling,
        order,
        module.sinks.detach() if hasattr(module, "sinks") else None,
        *_read_query_factors(config, device),
    )


def _read_query_factors(config: Any, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the `query_factors` and the `query_period` of an `Attention`."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not (scale := rope.get("llama_4_scaling_beta")):
        return None, 1
    period = int(rope["original_max_position_embeddings"])
    periods = torch.arange(-(-config.max_position_embeddings // period), device=device)
    return 1 + scale * torch.log(1 + periods), period


def _fuse_mlp(sublayer: SubLayer) -> MLP:
    module: Any = sublayer.run
    if hasattr(module, "experts"):
        return _fuse_experts(sublayer)
    projections = (
        [module.gate_up_proj]
        if hasattr(module, "gate_up_proj")
        else [module.gate_proj, module.up_proj]
    )
    act = module.activation_fn if hasattr(module, "activation_fn") else module.act_fn
    return MLP(
        _optional_norm(sublayer.norm),
        fuse_linears(projections),
        GatedActivation(_fast_activation(act)),
        fuse_linears([module.down_proj]),
        _optional_norm(sublayer.post_norm),
    )


def _fuse_experts(sublayer: SubLayer) -> MLP:
    """Fuse a router and its experts. Rows of all experts' gates come first, then those of ups."""
    block: Any = sublayer.run
    router = block.router if hasattr(block, "router") else block.gate
    stored: StoredExperts | None = None
    experts = block.experts
    if isinstance(experts, StoredExperts):
        stored, experts = experts, experts.module
    order, gate_up_bias, down_bias = experts_first_order(experts), None, None
    if experts.has_bias:
        gate_up_bias = experts.gate_up_proj_bias.detach().flatten()[order]
        down_bias = experts.down_proj_bias.detach().flatten()
    if stored is not None:
        gate_up: Linear = StoredFusedLinear(
            stored.gate_up, gate_up_bias, stored.dtype, stored.order
        )
        down: Linear = StoredFusedLinear((stored.down,), down_bias, stored.dtype)
    else:
        weights = [experts.gate_up_proj.detach(), experts.down_proj.detach()]
        if experts.is_transposed:
            weights = [weight.transpose(1, 2) for weight in weights]
        gate_up = PlainLinear(weights[0].flatten(0, 1)[order], gate_up_bias)
        down = PlainLinear(weights[1].flatten(0, 1), down_bias)
        free_weights_(experts)
    return MLP(
        _optional_norm(sublayer.norm),
        gate_up,
        _gated_activation_of(experts),
        down,
        _optional_norm(sublayer.post_norm),
        # Mixtral and gpt_oss have no setting: their weights always have a sum of 1.
        Routing(
            PlainLinear(router.weight.detach(), getattr(router, "bias", None)),
            router.top_k,
            bool(getattr(router, "norm_topk_prob", True)),
        ),
        _fuse_shared_expert(block) if hasattr(block, "shared_expert") else None,
    )


def _fuse_shared_expert(block: Any) -> SharedExpert:
    expert = block.shared_expert
    return SharedExpert(
        fuse_linears([expert.gate_proj, expert.up_proj]),
        fuse_linears([expert.down_proj]),
        PlainLinear(block.shared_expert_gate.weight.detach(), None),
    )


def _gated_activation_of(experts: Any) -> Activation:
    if hasattr(experts, "limit"):
        return ClampedSwiGLU(experts.alpha, experts.limit)
    return GatedActivation(_fast_activation(experts.act_fn))


def _fast_activation(act: Any) -> Any:
    """Return the function of SiLU or GELU, which is cheaper than a module call; else `act`."""
    if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return F.silu
    is_gelu_tanh = type(act).__name__ == "GELUTanh" and isinstance(act.act, partial)
    return gelu_tanh if is_gelu_tanh else act


def _optional_norm(module: Any) -> RMSNorm | None:
    return None if module is None else rms_norm_from(module)


def _embedding_and_head(
    parts: ModelParts, unembed: Any
) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Return (embedding, head). Tied weights stay shared, in the embedding's layout."""
    table: Any = parts.embed_steps[0]
    if isinstance(table, StoredEmbedding) or isinstance(unembed, StoredLinear):
        return table, fuse_linears([unembed])
    if table.weight.data_ptr() == unembed.weight.data_ptr():
        return table, pack_linear(table.weight.detach(), unembed.bias, shared=True)
    return table, fuse_linears([unembed])
