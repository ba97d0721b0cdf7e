"""What is known of a loaded model, and the port every model is driven through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan


@dataclass(frozen=True)
class ModelSpec:
    """Identity and shape of a loaded model. context: longest sequence it was made for, None if it does not say.

    config_sha256, weights_sha256: of the canonical config and of the weight files; None where there are no files.
    """

    id: str
    revision: str | None
    family: str
    n_layers: int
    hidden: int
    vocab: int
    context: int | None
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    config_sha256: str | None = None
    weights_sha256: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class ModelAdapter(Protocol):
    """A decoder-only model as an embedding, a list of blocks and a head. Its unit is the block, because families with a
    parallel residual compute attention and MLP from one input."""

    spec: ModelSpec
    tokenizer: Any

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, H]."""

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        """Layer i without the sub-layers that are off; [B, T, H] -> [B, T, H]. Attention writes K/V where `plan` says."""

    def head(self, h: Tensor) -> Tensor:
        """Final norm and language-model head: [B, T, H] -> [B, T, V]."""
