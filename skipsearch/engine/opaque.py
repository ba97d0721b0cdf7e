"""Makes torch's compiler accept packed matrices as arguments of compiled code.

By itself the compiler uses oneDNN's product only for weights that are constants of the compiled code, which it packs itself. Our weights
are arguments that are packed already, so that one piece of code serves every layer. Inside `weights_are_arguments` the compiler passes
them on unchanged. Tracing needs a matrix in its plain layout, so code is made with `stand_in`; the compiled code takes either layout.
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
