"""The fused fast path for Llama-shaped models: their weights as a few large matrices, their sub-layers as a few kernels.

It takes a Hugging Face model apart for good: each layer's matrices are laid out again and the old ones are released at once, so that no
moment of loading holds a second copy of more than one layer. A model that somebody else holds is therefore never driven this way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan
from skipsearch.models import masks
from skipsearch.models.bands import Bands
from skipsearch.models.families import Family
from skipsearch.models.layout import LayerKind, Layout, SubLayer, take_apart
from skipsearch.models.linear import Linear, fused, laid_out
from skipsearch.models.norms import Norm, norm_of
from skipsearch.models.rope import Angles, by_halves, still
from skipsearch.models.spec import ModelSpec, PassRunner

LEAN = frozenset({"ernie4_5", "exaone4", "gemma", "gemma3", "gemma3_text", "glm", "glm4", "llama", "mistral", "olmo2", "olmo3", "phi3",
                  "qwen2", "qwen3", "seed_oss", "smollm3"})
UNTURNED = "unturned"   # in the place of a layer type, of layers whose heads are not turned by position


def why_not(config: Any, quantization: str | None, n_devices: int) -> str | None:
    """What keeps a model from the fused path, as half a sentence; None if nothing does."""
    text = config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if config.model_type not in LEAN:
        return f"{config.model_type} models are not of its shape (they are: {', '.join(sorted(LEAN))})"
    if quantization is not None:
        return f"its weights are quantised ({quantization})"
    if n_devices > 1:
        return "it is spread over several GPUs"
    if any(isinstance(part, dict) and part.get("rope_type") == "dynamic" for part in (rope, *rope.values())):
        return "its rotary angles change with the length of the text"
    return None


@dataclass(frozen=True, slots=True)
class Attention:
    """h + post_norm(out(attention(rotary(qkv(norm(h)))))); heads of q, then of k, then of v in one matrix.

    order: of its rows, as the module's own have it, where that is another one; its heads are turned by halves in any case.
    """

    index: int
    kind: LayerKind
    norm: Norm | None
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    post_norm: Norm | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    order: Tensor | None = None

    def __call__(self, h: Tensor, cache: KVCache, step: Pass) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        b, t, width = h.shape
        flat = h.view(b * t, width)
        q, k, v = self.heads_of(flat if self.norm is None else self.norm(flat), b, t, *step.turns(self.kind))
        keys, values = cache.write(self.index, k, v, step.plan)
        bias, causal = step.bias(self.kind)
        seen = F.scaled_dot_product_attention(q, keys, values, bias, is_causal=causal, scale=self.scale,
                                              enable_gqa=self.heads != self.kv_heads)
        branch = seen.transpose(1, 2).reshape(b * t, self.heads * self.head_dim)
        return self.summed(flat, branch).view(b, t, width)

    def heads_of(self, x: Tensor, b: int, t: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H] -> q [B, heads, T, D], k and v [B, kv_heads, T, D]; q and k normed and turned."""
        turned = (self.heads + self.kv_heads) * self.head_dim
        qkv = self.qkv(x)
        qk = self._normed(qkv[:, :turned]).view(b, t, self.heads + self.kv_heads, self.head_dim)
        qk = rotated(qk, cos, sin).transpose(1, 2)
        v = qkv[:, turned:].view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        return qk[:, :self.heads], qk[:, self.heads:], v

    def summed(self, h: Tensor, branch: Tensor) -> Tensor:
        return self.out.added(h, branch) if self.post_norm is None else h + self.post_norm(self.out(branch))

    def _normed(self, qk: Tensor) -> Tensor:
        """q and k [N, (heads + kv_heads) · D], each normed by its own: head by head, or all of its heads at once."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        n, width = len(qk), self.heads * self.head_dim
        q, k = (norm(x.reshape(-1, norm.width)).view(n, -1)
                for norm, x in ((self.q_norm, qk[:, :width]), (self.k_norm, qk[:, width:])))
        return torch.cat([q, k], dim=-1)


@dataclass(frozen=True, slots=True)
class MLP:
    """h + post_norm(down(act(gate(x)) · up(x))), x = norm(h)."""

    norm: Norm | None
    gate_up: Linear
    act: Callable[[Tensor], Tensor]
    down: Linear
    post_norm: Norm | None

    def __call__(self, h: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        flat = h.view(-1, h.shape[-1])
        gate, up = self.gate_up(flat if self.norm is None else self.norm(flat)).chunk(2, dim=-1)
        branch = self.act(gate) * up
        return (self.down.added(flat, branch) if self.post_norm is None else flat + self.post_norm(self.down(branch))).view(h.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, heads, D]; cos, sin: [B or 1, T, 1, R], R ≤ D, sin with the sign that its half of the pair takes.

    Some families keep angles in float32, whatever the dtype of their weights; the heads stay in theirs."""
    r = cos.shape[-1]
    part = x if r == x.shape[-1] else x[..., :r]
    swapped = part.unflatten(-1, (2, r // 2)).flip(-2).flatten(-2)
    turned = torch.addcmul(part * cos, swapped, sin).to(x.dtype)
    return turned if r == x.shape[-1] else torch.cat([turned, x[..., r:]], dim=-1)


class Pass:
    """What the layers of one pass share: angles by rotary table and masks by window, each made by the first that asks."""

    __slots__ = ("_bias", "_masks", "_owner", "_turns", "plan")

    def __init__(self, plan: PassPlan, owner: LeanAdapter):
        self.plan, self._owner = plan, owner
        self._turns: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._bias: dict[int | None, tuple[Tensor | None, bool]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def turns(self, kind: LayerKind) -> tuple[Tensor, Tensor]:
        found = self._turns.get(kind.layer_type)
        if found is None:
            found = self._turns[kind.layer_type] = self._owner.tables[kind.layer_type].of(self.plan)
        return found

    def mask(self, kind: LayerKind) -> Tensor:
        """The additive mask in full [B or 1, 1, T, keys], contiguous."""
        found = self._masks.get(kind.window)
        if found is None:
            found = self._masks[kind.window] = self._additive(kind.window).contiguous()
        return found

    def bias(self, kind: LayerKind) -> tuple[Tensor | None, bool]:
        """(additive mask [B or 1, 1, T, keys] or None, whether the kernel fills in the causal pattern)."""
        found = self._bias.get(kind.window)
        if found is None:
            found = self._bias[kind.window] = self._new_bias(kind.window)
        return found

    def _new_bias(self, window: int | None) -> tuple[Tensor | None, bool]:
        plan = self.plan
        if plan.visible is None and (window is None or plan.keys <= window):
            return None, plan.positions.shape[1] > 1
        return self._additive(window), False

    def _additive(self, window: int | None) -> Tensor:
        if self.plan.chain:
            return self._owner.bands.of(self.plan, window)
        mask = masks.windowed(self.plan, window)
        assert mask is not None
        return masks.additive(mask, self._owner.spec.dtype)


class LatestPass(threading.local):
    """The pass that this thread is in. One model serves several threads, and none of them may see what another one's pass shares."""

    shared: Pass | None = None


class LeanAdapter:
    """A `ModelAdapter` over fused weights."""

    passes: PassRunner | None = None

    def __init__(self, spec: ModelSpec, embedding: Callable[[Tensor], Tensor], layers: list[tuple[Attention, MLP]],
                 tables: dict[str | None, Angles], norm: Norm, unembed: Linear, after: list[Callable[[Tensor], Tensor]],
                 tokenizer: Any = None):
        self.spec, self.tokenizer, self.layers, self.tables = spec, tokenizer, layers, tables
        self.bands = Bands(spec.dtype, spec.device)
        self.norm, self.unembed = norm, unembed
        self._embedding, self.after = embedding, after
        self._latest = LatestPass()

    @property
    def spans(self) -> list[tuple[int | None, int | None]]:
        return [(attention.kind.window, None) for attention, _ in self.layers]

    @property
    def weight_bytes(self) -> int:
        table: Tensor = self._embedding.weight  # type: ignore[attr-defined]
        tied = not self.unembed.weight.is_mkldnn and table.data_ptr() == self.unembed.weight.data_ptr()
        return self.read_bytes + (0 if tied else table.nbytes)

    @property
    def read_bytes(self) -> int:
        parts = [getattr(part, name) for layer in self.layers for part in layer for name in part.__dataclass_fields__]
        matrices = [part for part in parts if hasattr(part, "added")] + [self.unembed]
        norms = [part for part in parts if isinstance(part, Norm)] + [self.norm]
        vectors = [n.weight for n in norms] + [m.bias for m in matrices if m.bias is not None]
        return sum(m.bytes for m in matrices) + sum(v.nbytes for v in vectors)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        self.bands.room(capacity)
        for table in self.tables.values():
            table.room(capacity)
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._embedding(tokens)

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        attention, feed_forward = self.layers[i]
        if attn:
            h = attention(h, cache, self.pass_of(plan))
        return feed_forward(h) if mlp else h

    def head(self, h: Tensor) -> Tensor:
        logits = self.unembed(self.norm(h.reshape(-1, h.shape[-1]))).view(*h.shape[:-1], -1)
        for piece in self.after:
            logits = piece(logits)
        return logits

    def pass_of(self, plan: PassPlan) -> Pass:
        shared = self._latest.shared
        if shared is None or shared.plan is not plan:
            shared = self._latest.shared = Pass(plan, self)
        return shared


def fuse(model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any = None) -> LeanAdapter:
    """The fused form of a model of which `why_not` has nothing to say. The model is used up: its matrices are emptied."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    layout = take_apart(model, family)
    kinds = [kind if family.turned is None or family.turned(layer.attn.run) else replace(kind, layer_type=UNTURNED)
             for kind, layer in zip(layout.kinds, layout.layers, strict=True)]
    tables = {name: Angles(still(layout.rotary), None, spec) if name == UNTURNED else Angles(layout.rotary, name, spec)
              for name in dict.fromkeys(kind.layer_type for kind in kinds)}
    layers = [(_attention(i, layer.attn, kinds[i], config, tables[kinds[i].layer_type].width if family.interleaved else 0), _mlp(layer.mlp))
              for i, layer in enumerate(layout.layers)]
    norm, unembed, *after = layout.after
    embedding, matrix = _ends(layout, unembed)
    return LeanAdapter(spec, embedding, layers, tables, norm_of(norm), matrix, after, tokenizer)


def _attention(i: int, sublayer: SubLayer, kind: LayerKind, config: Any, interleaved: int) -> Attention:
    """interleaved: dimensions of a head that are turned in pairs of neighbours."""
    module: Any = sublayer.run
    projections = [module.qkv_proj] if hasattr(module, "qkv_proj") else [module.q_proj, module.k_proj, module.v_proj]
    q_norm, k_norm = (_norm(getattr(module, name, None)) for name in ("q_norm", "k_norm"))
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    order = by_halves(heads, kv_heads, size, interleaved, projections[0].weight.device) if interleaved else None
    return Attention(i, kind, _norm(sublayer.norm), fused(projections, order), q_norm, k_norm, fused([module.o_proj]),
                     _norm(sublayer.post_norm), heads, kv_heads, size, module.scaling, order)


def _mlp(sublayer: SubLayer) -> MLP:
    module: Any = sublayer.run
    projections = [module.gate_up_proj] if hasattr(module, "gate_up_proj") else [module.gate_proj, module.up_proj]
    act = module.activation_fn if hasattr(module, "activation_fn") else module.act_fn
    if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
        act = F.silu  # without the module's call around it
    return MLP(_norm(sublayer.norm), fused(projections), act, fused([module.down_proj]), _norm(sublayer.post_norm))


def _norm(module: Any) -> Norm | None:
    return None if module is None else norm_of(module)


def _ends(layout: Layout, unembed: Any) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Embedding and head. Where they share their weights they go on doing so, in the order that the embedding needs."""
    table: Any = layout.before[0]
    if table.weight.data_ptr() == unembed.weight.data_ptr():
        return table, laid_out(table.weight.detach(), unembed.bias, shared=True)
    return table, fused([unembed])
