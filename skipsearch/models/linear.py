"""Weight matrices in the layout that their device and dtype read fastest at a few rows, one copy each.

    Transposed  float32 (and float64) on a CPU: at 4 … 16 rows up to twice as fast as F.linear, which takes three rows at a time
    Packed      bfloat16 and float16 on a CPU: oneDNN's blocked layout, where sixteen rows cost little more than one
    Plain       everything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK_ROWS = 8  # that oneDNN lays blocks out for; the layout serves any number


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

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(h if self.bias is None else h + self.bias, x, self.weight.t())


@dataclass(frozen=True, slots=True)
class Transposed:
    """weight: [in, out], contiguous."""

    weight: Tensor
    bias: Tensor | None

    @property
    def bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(h if self.bias is None else h + self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Packed:
    """weight: opaque to everything but oneDNN. The op is the one that `torch.compile` puts in for frozen weights."""

    weight: Tensor
    bias: Tensor | None
    bytes: int  # an opaque tensor does not tell

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, h, self.weight, self.bias, "add")
        return result


def laid_out(weight: Tensor, bias: Tensor | None, pack: bool = True) -> Linear:
    """weight: [out, in]. The caller lets go of it, or there are two copies. pack: `Packed` may be chosen."""
    if weight.device.type != "cpu":
        return Plain(weight.contiguous(), bias)
    if transposes(weight):
        return Transposed(weight.t().contiguous(), bias)
    if pack and _packs(weight.dtype):
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS), bias, weight.nbytes)
    return Plain(weight.contiguous(), bias)


def transposes(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def fused(modules: Sequence[Any], pack: bool = True) -> Linear:
    """Several `nn.Linear` of one input as one matrix, their outputs side by side. Empties the modules: no second copy stays behind."""
    biases = [m.bias for m in modules]
    bias = None if all(b is None for b in biases) else torch.cat(
        [b if b is not None else m.weight.new_zeros(m.out_features) for b, m in zip(biases, modules, strict=True)])
    matrix = laid_out(torch.cat([m.weight for m in modules]) if len(modules) > 1 else modules[0].weight.detach(), bias, pack)
    for module in modules:
        emptied(module)
    return matrix


def emptied(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)
