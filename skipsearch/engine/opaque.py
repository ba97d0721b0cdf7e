"""How torch's compiler is brought to leave a packed matrix to whoever brings it.

It knows oneDNN's product only of weights that are constants of the compiled code, which it then packs itself; ours are arguments, packed
already, so that one piece of code serves every layer. Inside `weights_are_arguments` it takes them as they come. Code is made with a
matrix as stored, since nothing can be traced with one in blocks; it hands its weights on untouched, so that either may come in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def stand_in(weight: Tensor) -> Tensor:
    """What stands for a weight while its code is made."""
    return torch.zeros(weight.shape, dtype=weight.dtype) if weight.is_mkldnn else weight


@contextmanager
def weights_are_arguments() -> Iterator[None]:
    from torch._inductor import ir, mkldnn_ir, mkldnn_lowerings
    from torch._inductor.lowering import lowerings

    assert mkldnn_lowerings  # imported for what it puts into `lowerings`

    def product(x: Any, weight: Any, bias: Any, attr: str, scalars: Any, algorithm: str) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, attr, scalars, algorithm))

    def added(x: Any, h: Any, weight: Any, bias: Any, attr: str) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, h, weight, bias, attr))

    op = torch.ops.mkldnn._linear_pointwise
    ours: dict[Any, Any] = {op.default: product, op.binary: added}
    theirs = {name: lowerings[name] for name in ours}
    lowerings.update(ours)
    try:
        yield
    finally:
        lowerings.update(theirs)
