"""The rounding of a matrix's inputs, as its definition says it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 32  # inputs that share a scale
# Name -> the largest number that an input is rounded to; float does not round.
MAX_NUMBERS = {"int8": 127, "int16": 127 * 128, "float": 0}


def round_activations(x: Tensor, activations: str) -> Tensor:
    """Return inputs [..., in] after rounding in blocks of 32, in their dtype."""
    max_number = MAX_NUMBERS[activations]
    if not max_number:
        return x
    width = x.shape[-1]
    groups = F.pad(x.float(), (0, -width % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scales = largest / max_number
    numbers = torch.where(scales > 1e-37, (groups * (max_number / largest)).round(), 0.0)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (numbers.to(wide) * scales.to(wide)).flatten(-2)[..., :width].to(x.dtype)
