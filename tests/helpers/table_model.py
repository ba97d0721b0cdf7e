"""A language model of a few small tables: quick enough to be sampled thousands of times, and in
need of its K/V cache.

Two layers, or as many as asked for. Attention adds what the token before wrote, so that two layers
make logits depend on the last three tokens; an MLP bends the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipsearch.models import ModelSpec
from skipsearch.models.kv_cache import KVCache, PassPlan

TABLE_LAYERS = 2


class TableModel:
    """A `ModelAdapter` whose hidden state [B, T, V] is the logits themselves."""

    pass_runner = None

    def __init__(
        self,
        vocab: int = 5,
        seed: int = 0,
        sharpness: float = 1.6,
        branch: float = 1.0,
        layers: int = TABLE_LAYERS,
    ):
        rng = np.random.default_rng(seed)
        self.spec = ModelSpec(
            "table", None, "table", layers, vocab, vocab, None, torch.float64, torch.device("cpu")
        )
        self.tokenizer: Any = None
        self.branch = branch
        self.embedding = rng.normal(size=(vocab, vocab)) * sharpness
        self.weights = {kind: rng.normal(size=(layers, vocab, vocab)) for kind in ("attn", "mlp")}
        self._embedding = torch.from_numpy(self.embedding)
        self._weights = {kind: torch.from_numpy(w) for kind, w in self.weights.items()}

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._embedding[tokens]

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
        if attn:
            value = torch.tanh(h @ self._weights["attn"][i])[:, None]  # [B, 1, T, V]
            _, values = cache.write(i, value[..., :1], value, plan)  # [B, 1, keys, V]
            before = (plan.slots[0] - 1).clamp(min=0)
            if (
                not plan.is_chain and plan.mask is not None
            ):  # of a tree: the last slot that a row sees before its own
                earlier = plan.mask[0, 0] & (torch.arange(plan.n_keys) < plan.slots[0][:, None])
                before = torch.where(earlier, torch.arange(plan.n_keys), 0).amax(dim=-1)
            h = h + self.branch * values[:, 0, before] * (plan.slots > 0)[..., None]
        if mlp:
            h = h + self.branch * torch.tanh(h @ self._weights["mlp"][i])
        return h

    def head(self, h: Tensor) -> Tensor:
        return h

    def next_logits(self, history: Sequence[int]) -> NDArray[np.float64]:
        """The full model again, over a whole history at once and without a cache: [V]."""
        h = self.embedding[list(history)]
        for attn, mlp in zip(self.weights["attn"], self.weights["mlp"], strict=True):
            written = np.tanh(h @ attn)
            h = h + self.branch * np.vstack([np.zeros_like(written[:1]), written[:-1]])
            h = h + self.branch * np.tanh(h @ mlp)
        return h[-1]
