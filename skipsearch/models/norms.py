"""RMS norms as one call each, by what their module does beside the norm itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) · weight. wide: the weight is float32 and so is the product, rounded once at the end."""

    weight: Tensor
    eps: float
    wide: bool

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]."""
        if self.wide and x.dtype != self.weight.dtype:
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm_of(module: Any) -> Norm:
    """The norm that a module computes. Gemma's scale by 1 + weight in float32; the others by weight."""
    weight: Tensor = module.weight.detach()
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if type(module).__name__.startswith("Gemma"):
        return Norm(1 + (weight if weight.dtype == torch.float64 else weight.float()), eps, wide=True)
    return Norm(weight, eps, wide=False)
