"""RMS norms as one kernel call each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """The norm x / rms(x) · weight."""

    weight: Tensor  # [width]
    eps: float
    fp32: bool  # the weight and the product are float32, and the result is rounded once

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Norm rows: [N, width] -> [N, width]."""
        if self.fp32 and x.dtype != self.weight.dtype:
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(
                x.dtype
            )
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rms_norm_from(module: Any) -> RMSNorm:
    """Return the norm that a module computes. Gemma's norms scale by 1 + weight, in float32."""
    weight: Tensor = module.weight.detach()
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if type(module).__name__.startswith("Gemma"):
        return RMSNorm(
            1 + (weight if weight.dtype == torch.float64 else weight.float()), eps, fp32=True
        )
    return RMSNorm(weight, eps, fp32=False)
