"""Matrix products on a GPU by number format of the weights and by rows, in CUDA graphs.

For the matrices of several sizes of model: microseconds of a product in bfloat16, in 8 bits and in
4 bits with torch's own kernels, and the bytes of weights that it reads in a second. Each figure is
the median of triton's `do_bench_cudagraph`, over copies of the matrix that do not fit the cache.

    python tests/benchmarks/gpu_kernels.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = {  # inputs, outputs
    "1 B, gate and up": (2048, 11264),
    "1 B, down": (5632, 2048),
    "7 B, q, k and v": (4096, 12288),
    "7 B, gate and up": (4096, 22016),
    "7 B, down": (11008, 4096),
    "7 B, head": (4096, 32000),
}
ROWS = (1, 2, 4, 8, 16)
COPIES_BYTES = 400_000_000  # of a matrix in bfloat16, together
GROUP_SIZE = 32


def time_us(run: Callable[[], object], n_products: int) -> float:
    """Return the microseconds of one of `n_products` products."""
    from triton.testing import do_bench_cudagraph

    return 1e3 * float(do_bench_cudagraph(run)) / n_products


def products(n_inputs: int, n_outputs: int) -> dict[str, tuple[float, Callable[[Tensor], object]]]:
    """Return (bytes of the weights, function that multiplies by all copies) by number format."""
    n_copies = max(2, COPIES_BYTES // (2 * n_inputs * n_outputs))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    dense = [torch.randn(n_outputs, n_inputs, **options) for _ in range(n_copies)]
    int8 = [torch.randint_like(w, -127, 127).to(torch.int8) for w in dense]
    scales8 = torch.rand(n_outputs, **options)
    pairs = torch.randint(0, 255, (n_outputs, n_inputs // 2), device="cuda").to(torch.uint8)
    int4 = [torch._convert_weight_to_int4pack(pairs, 8) for _ in dense]
    scales4 = torch.rand(n_inputs // GROUP_SIZE, n_outputs, 2, **options)
    n = n_inputs * n_outputs
    return {
        "bfloat16": (2 * n, lambda x: [F.linear(x, w) for w in dense]),
        "8 bits": (n, lambda x: [torch._weight_int8pack_mm(x, w, scales8) for w in int8]),
        "4 bits": (
            n / 2,
            lambda x: [torch._weight_int4pack_mm(x, w, GROUP_SIZE, scales4) for w in int4],
        ),
    }


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, (n_inputs, n_outputs) in SHAPES.items():
        by_format = products(n_inputs, n_outputs)
        n_copies = max(2, COPIES_BYTES // (2 * n_inputs * n_outputs))
        for rows in ROWS:
            x = torch.randn(rows, n_inputs, device="cuda", dtype=torch.bfloat16)
            cells = []
            for label, (n_bytes, multiply) in by_format.items():
                microseconds = time_us(partial(multiply, x), n_copies)
                cells.append(
                    f"{label} {microseconds:.1f} us {n_bytes / microseconds / 1e6:.2f} TB/s"
                )
            print(f"{name}, {rows} rows: {', '.join(cells)}")


if __name__ == "__main__":
    main()
