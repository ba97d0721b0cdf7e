"""The attention of a fused model, and the inputs that its layers share in a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.models import attention_masks
from skipsearch.models.families.decompose import LayerKind
from skipsearch.models.fused.causal_masks import CausalMaskCache
from skipsearch.models.fused.linear import Linear
from skipsearch.models.fused.norms import RMSNorm
from skipsearch.models.fused.rope import RotaryTable
from skipsearch.models.kv_cache import KVCache, PassPlan


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention sub-layer: h + post_norm(out(attention(rotary(qkv(norm(h))))))."""

    index: int  # of its buffers in the KV cache
    kind: LayerKind  # layers of one kind share rotary table and mask
    norm: RMSNorm | None
    qkv: Linear  # [(heads + 2 · kv_heads) · head_dim, H]: the heads of q, then of k, then of v
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Linear  # [H, heads · head_dim]
    post_norm: RMSNorm | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    # For each row of `qkv`, its row in the module; None: the same order. Rows are reordered if the
    # module rotates neighbour pairs, because this class rotates pairs of halves.
    order: Tensor | None = None
    # [heads]: a score of each head that only adds to the sum of its softmax; None: there is none.
    sinks: Tensor | None = None
    # [periods] float32: queries are multiplied by entry ⌊position / period⌋, as in Llama 4; None:
    # they are not.
    query_factors: Tensor | None = None
    query_period: int = 1

    def __call__(self, h: Tensor, cache: KVCache, inputs: PassInputs) -> Tensor:
        """Run the sub-layer: [B, T, H] -> [B, T, H]."""
        b, t, width = h.shape
        flat = h.view(b * t, width)
        q, k, v = self.project_heads(
            flat if self.norm is None else self.norm(flat), b, t, *inputs.rotary(self.kind)
        )
        if self.query_factors is not None:
            factors = self.query_factors[inputs.plan.positions // self.query_period]
            q = q * factors[:, None, :, None].to(q.dtype)
        keys, values = cache.write(self.index, k, v, inputs.plan)
        attended = self._attend(q, keys, values, inputs)
        branch = attended.transpose(1, 2).reshape(b * t, self.heads * self.head_dim)
        return self.add_residual(flat, branch).view(b, t, width)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, inputs: PassInputs) -> Tensor:
        """Attend: q [B, heads, T, D] to keys and values [B, kv_heads, n_keys, D]."""
        if self.sinks is not None:
            mask = inputs.full_mask(self.kind)
            return attend_with_sinks(q, keys, values, mask, self.scale, self.sinks)
        bias, causal = inputs.attn_bias(self.kind)
        return F.scaled_dot_product_attention(
            q,
            keys,
            values,
            bias,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )

    def project_heads(
        self, x: Tensor, b: int, t: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project [N, H] to q [B, heads, T, D], k and v [B, kv_heads, T, D]. Norm and rotate q and
        k.
        """
        qk_width = (self.heads + self.kv_heads) * self.head_dim
        qkv = self.qkv(x)
        qk = self._apply_qk_norm(qkv[:, :qk_width]).view(
            b, t, self.heads + self.kv_heads, self.head_dim
        )
        qk = apply_rope(qk, cos, sin).transpose(1, 2)
        v = qkv[:, qk_width:].view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        return qk[:, : self.heads], qk[:, self.heads :], v

    def add_residual(self, h: Tensor, branch: Tensor) -> Tensor:
        return (
            self.out.add_to(h, branch)
            if self.post_norm is None
            else h + self.post_norm(self.out(branch))
        )

    def _apply_qk_norm(self, qk: Tensor) -> Tensor:
        """Norm q and k, [N, (heads + kv_heads) · D], with separate weights.

        The norm is over each head, or over all heads together.
        """
        if self.q_norm is None or self.k_norm is None:
            return qk
        n, width = len(qk), self.heads * self.head_dim
        q, k = (
            norm(x.reshape(-1, norm.width)).view(n, -1)
            for norm, x in ((self.q_norm, qk[:, :width]), (self.k_norm, qk[:, width:]))
        )
        return torch.cat([q, k], dim=-1)


def attend_with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """Attend with one more score for each head, whose value is zero. Source: gpt_oss.

    q: [B, heads, T, D]. keys, values: [B, kv_heads, n_keys, D]. mask: additive, [B or 1, 1, T,
    n_keys]. sinks: [heads], the scores."""
    b, heads, t, _ = q.shape
    grouped = q.reshape(b, keys.shape[1], -1, q.shape[-1])  # the heads that share keys
    scores = (grouped @ keys.transpose(2, 3) * scale).view(b, heads, t, -1) + mask
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)], dim=-1)
    probs = scores.softmax(dim=-1)[..., :-1]
    return (probs.reshape(*grouped.shape[:3], -1) @ values).view(q.shape)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R ≤ D dimensions of each head, in pairs of halves.

    x: [B, T, heads, D]. cos, sin: [B or 1, T, 1, R] of a `RotaryTable`, in which the first half of
    sin is negated. They may be float32; the result has the dtype of x."""
    r = cos.shape[-1]
    part = x if r == x.shape[-1] else x[..., :r]
    swapped = part.unflatten(-1, (2, r // 2)).flip(-2).flatten(-2)
    rotated = torch.addcmul(part * cos, swapped, sin).to(x.dtype)
    return rotated if r == x.shape[-1] else torch.cat([rotated, x[..., r:]], dim=-1)


class PassInputs:
    """The rotary angles and masks of one pass, each made once for all layers that share it."""

    __slots__ = ("_attn_bias", "_causal_masks", "_masks", "_rotary", "_rotary_tables", "plan")

    def __init__(
        self,
        plan: PassPlan,
        rotary_tables: Mapping[str | None, RotaryTable],
        causal_masks: CausalMaskCache,
    ):
        self.plan, self._rotary_tables, self._causal_masks = plan, rotary_tables, causal_masks
        self._rotary: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._attn_bias: dict[int | None, tuple[Tensor | None, bool]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def rotary(self, kind: LayerKind) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), [B or 1, T, 1, R] each."""
        cos_sin = self._rotary.get(kind.layer_type)
        if cos_sin is None:
            table = self._rotary_tables[kind.layer_type]
            cos_sin = self._rotary[kind.layer_type] = table.for_plan(self.plan)
        return cos_sin

    def full_mask(self, kind: LayerKind) -> Tensor:
        """Return the additive mask [B or 1, 1, T, n_keys], contiguous."""
        mask = self._masks.get(kind.window)
        if mask is None:
            mask = self._masks[kind.window] = self._make_additive_mask(kind.window).contiguous()
        return mask

    def attn_bias(self, kind: LayerKind) -> tuple[Tensor | None, bool]:
        """Return (additive mask [B or 1, 1, T, n_keys] or None, whether the kernel adds the causal
        pattern).
        """
        bias = self._attn_bias.get(kind.window)
        if bias is None:
            bias = self._attn_bias[kind.window] = self._make_attn_bias(kind.window)
        return bias

    def _make_attn_bias(self, window: int | None) -> tuple[Tensor | None, bool]:
        plan = self.plan
        if plan.mask is None and (window is None or plan.n_keys <= window):
            return None, plan.positions.shape[1] > 1
        return self._make_additive_mask(window), False

    def _make_additive_mask(self, window: int | None) -> Tensor:
        if self.plan.is_chain:
            return self._causal_masks.for_plan(self.plan, window)
        mask = attention_masks.with_window(self.plan, window)
        assert mask is not None
        return attention_masks.make_additive(mask, self._causal_masks.dtype)
