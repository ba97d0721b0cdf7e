"""Matrices in 4 bits with torch's own kernels, for drafts on a GPU.

On an H100, these kernels read 1.2 to 1.8 TB/s of weights in 4 bits where those for bfloat16 read
2.5, so one row takes half as long. torch's kernel for 8 bits is slower than bfloat16 there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.models.fused.linear import Linear, pack_linear

GROUP_SIZE = 32  # inputs that share a scale
ZERO = 8  # the number that means 0
# Scales that are tried: the weight of the largest magnitude becomes the lowest number, zero, plus
# one of these. They are those of `engine/native/src/quantize.cpp`.
SCALE_STEPS = (0.0, -0.9, -0.6, -0.3, 0.3, 0.6)
MIN_CAPABILITY = (8, 0)  # of the GPU, for these kernels
OUT_MULTIPLE = 16  # the kernels compute 8 outputs at once on a GPU and 16 on a CPU


def can_pack_int4(matrix: Linear) -> bool:
    """Return whether torch has a kernel for this matrix in 4 bits that is faster than its own."""
    n_outputs, n_inputs = matrix.shape
    return (
        matrix.weight.is_cuda
        and matrix.weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(matrix.weight.device) >= MIN_CAPABILITY
        and n_outputs % OUT_MULTIPLE == 0
        and n_inputs % GROUP_SIZE == 0
    )


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights [out, in] to the nearest of 16 numbers, by the rule of the engine native.

    Returns: (numbers 0 … 15 [out, in] in int32, scales [out, in / GROUP_SIZE] in float32).
    """
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    numbers = scales = least_error = None
    for step in SCALE_STEPS:
        scale = (extreme / -(ZERO + step)).half().float()
        rounded = (groups / scale.where(scale != 0, 1.0)).round().clamp(-ZERO, ZERO - 1)
        error = (rounded * scale - groups).square().sum(2, keepdim=True)
        if numbers is None or scales is None or least_error is None:
            numbers, scales, least_error = rounded, scale, error
            continue
        is_better = error < least_error
        numbers, scales = rounded.where(is_better, numbers), scale.where(is_better, scales)
        least_error = error.minimum(least_error)
    assert numbers is not None
    assert scales is not None
    return (numbers + ZERO).int().flatten(1), scales[..., 0]


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A matrix in 4 bits, in groups of 32 inputs with a scale each, for inputs in bfloat16."""

    source: Linear  # in the model's dtype; the copy reads it only to unpack itself
    weight: Tensor  # packed for the kernel
    scales: Tensor  # [in / GROUP_SIZE, out, 2], scale and offset
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    def to_dense(self) -> Tensor:
        numbers, scales = round_to_int4(self.source.to_dense())
        groups = (numbers - ZERO).unflatten(1, (-1, GROUP_SIZE)) * scales[..., None]
        return groups.flatten(1).to(torch.bfloat16)

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return pack_int4(pack_linear(weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        product: Tensor = multiply(x, self.weight, GROUP_SIZE, self.scales)
        return product if self.bias is None else product + self.bias

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(hidden)


def pack_int4(matrix: Linear) -> Int4Linear:
    """Round a matrix in bfloat16 to 4 bits."""
    numbers, scales = round_to_int4(matrix.to_dense())
    pairs = F.pad(scales.t()[..., None], (0, 1)).bfloat16().contiguous()
    inner_tiles = max(tiles for tiles in (2, 4, 8) if numbers.shape[1] % (16 * tiles) == 0)
    if numbers.is_cuda:
        bytes_ = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(bytes_, inner_tiles)
    else:
        packed = torch._convert_weight_to_int4pack_for_cpu(numbers, inner_tiles)
    return Int4Linear(matrix, packed, pairs, matrix.bias)
