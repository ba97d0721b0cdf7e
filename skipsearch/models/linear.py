"""Weight matrices in the layout that their device and dtype read fastest at a few rows, one copy each.

    Packed  on a CPU, dtypes that oneDNN has kernels for: its blocked layout, where eight rows cost little more than one
    Plain   everything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK_ROWS = 16  # that oneDNN lays blocks out for; the layout serves any number. For one row it would not make blocks


class Linear(Protocol):
    @property
    def weight(self) -> Tensor:
        """In the layout's own order, or opaque."""

    @property
    def bias(self) -> Tensor | None:
        """[out]"""

    @property
    def bytes(self) -> int:
        """Of the weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""

    def dense(self) -> Tensor:
        """The weight as [out, in]; a copy, where the layout is another."""

    def like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Another matrix [out, in] in this layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out], bias included."""

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        """h + self(x), in one kernel where there is one; h: [N, out]."""


@dataclass(frozen=True, slots=True)
class Plain:
    """weight: [out, in], as stored."""

    weight: Tensor
    bias: Tensor | None

    @property
    def bytes(self) -> int:
        return self.weight.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dense(self) -> Tensor:
        return self.weight

    def like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return laid_out(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(h if self.bias is None else h + self.bias, x, self.weight.t())


@dataclass(frozen=True, slots=True)
class Packed:
    """weight: in blocks that nothing but oneDNN can read; or [out, in] as stored, which the same op takes, where an embedding reads it too.

    The op is the one that `torch.compile` puts in for frozen weights.
    """

    weight: Tensor
    bias: Tensor | None
    bytes: int  # an opaque tensor does not tell

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dense(self) -> Tensor:
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight

    def like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return laid_out(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(h)  # oneDNN's own op for it copies h first, which takes longer


def laid_out(weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
    """weight: [out, in]. The caller lets go of it, or there are two copies. shared: somebody else reads it as it is stored."""
    stored = weight.contiguous()  # the same one, where it lies so already
    if not _packs(weight.device, weight.dtype):
        return Plain(stored, bias)
    return Packed(stored if shared else torch.ops.mkldnn._reorder_linear_weight(stored, PACK_ROWS), bias, weight.nbytes)


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def fused(modules: Sequence[Any], order: Tensor | None = None) -> Linear:
    """Several `nn.Linear` of one input as one matrix, their outputs side by side, in another order if one is given. Empties the modules:
    no second copy stays behind."""
    biases = [m.bias for m in modules]
    bias = None if all(b is None for b in biases) else torch.cat(
        [b if b is not None else m.weight.new_zeros(m.out_features) for b, m in zip(biases, modules, strict=True)])
    weight = torch.cat([m.weight for m in modules]) if len(modules) > 1 else modules[0].weight.detach()
    matrix = laid_out(weight, bias) if order is None else laid_out(weight[order], None if bias is None else bias[order])
    for module in modules:
        emptied(module)
    return matrix


def emptied(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)
