"""Weight matrices as the native kernels read them: panels of neighbouring output rows."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.block_formats import find_block_format
from skipsearch.engine.native.blocks import CHUNK_WEIGHTS, FORMAT_BY_CODE, FORMAT_OF_BITS, quantize
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.grid_blocks import GRID_FORMATS, has_exact_scales, unpack_grid_rows
from skipsearch.engine.native.rounded import RoundedMatrix
from skipsearch.engine.native.structs import DENSE, PANEL_ROWS
from skipsearch.errors import ModelError
from skipsearch.models.activations import DEFAULT_ACTIVATIONS
from skipsearch.models.fused.linear import Linear, StoredFusedLinear
from skipsearch.models.stored_linear import StoredMatrix

HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64
MXFP4_BYTES = 17  # of a block: an exponent, then 32 numbers of a sign and MXFP4_MAGNITUDES
MXFP4_MAGNITUDES = 0x77
MXFP4_EXPONENTS = (104, 143)  # of scales that are halves
GRID_KINDS = {
    block_format.code for block_format in map(find_block_format, GRID_FORMATS) if block_format
}
MAPS_PRIVATELY = hasattr(mmap, "MAP_PRIVATE")  # not on Windows


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """A `Linear` whose weight is stored panel by panel, as src/abi.h describes it."""

    weight: Tensor  # uint8 [n], all panels, each at the end of the one before
    kinds: tuple[int, ...]  # of each panel: DENSE, or the code of a format in blocks.py
    bias: Tensor | None  # [out]
    shape: tuple[int, int]  # (out, in), without padding
    # 2: panels of the first half of the outputs and of the second one alternate (gate, up). Else 1.
    interleave: int
    dtype: torch.dtype  # of inputs, outputs and dense panels
    activations: str  # how inputs of panels in blocks are rounded, one of ACTIVATIONS
    library: NativeLibrary
    _structs: Any = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def panel_structs(self) -> Any:
        """An array of `structs.PanelStruct`. It is valid while this object lives."""
        if self._structs is None:
            sizes = [panel_nbytes(kind, self.shape[1], self.dtype) for kind in self.kinds]
            offsets = accumulate(sizes, initial=self.weight.data_ptr())
            panels = zip(offsets, self.kinds, strict=False)
            array = (structs.PanelStruct * len(sizes))(
                *(structs.PanelStruct(weight, kind) for weight, kind in panels)
            )
            object.__setattr__(self, "_structs", array)
        return self._structs

    @property
    def struct(self) -> structs.MatrixStruct:
        """The matrix for the kernels, without the bias. It is valid while this object lives."""
        return structs.MatrixStruct(
            self.panel_structs,
            None,
            len(self.kinds) * PANEL_ROWS if self.interleave > 1 else self.shape[0],
            self.shape[1],
            any(self.kinds),
        )

    @property
    def bias_fp32(self) -> Tensor | None:
        """The bias as the kernels read it, [panels · PANEL_ROWS] in panel order.

        Its dtype is float32 or a wider one.
        """
        if self.bias is None:
            return None
        bias = F.pad(self.bias.to(torch.promote_types(self.bias.dtype, torch.float32)), (0, 1))
        return bias[panel_outputs(self.shape[0], self.interleave)].flatten().contiguous()

    def to_dense(self) -> Tensor:
        """Return a copy of the weight, [out, in]."""
        return self.read_rows(torch.arange(self.shape[0]))

    def read_rows(self, row_indices: Tensor) -> Tensor:
        """Return a copy of these rows of the weight, […] -> […, in].

        Raises: ModelError for an index outside the matrix.
        """
        rows = row_indices.flatten().contiguous()
        if len(rows):
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.shape[0]:
                raise ModelError(
                    f"row {low if low < 0 else high} is outside 0..{self.shape[0] - 1} of this "
                    "matrix: is a token id from another tokenizer?"
                )
        if self.interleave > 1:
            places = torch.empty(self.shape[0] + 1, dtype=torch.long)
            outputs = panel_outputs(self.shape[0], self.interleave).flatten()
            places[outputs] = torch.arange(len(outputs))
            rows = places[rows]
        out = torch.empty(*row_indices.shape, self.shape[1], dtype=self.dtype)
        self.library.call(
            "read_rows",
            _dtype_code(self.dtype),
            structs.ReadRowsArgs(
                ctypes.pointer(self.struct), rows.data_ptr(), len(rows), out.data_ptr()
            ),
        )
        return out

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Return another matrix packed like this one, in dense panels."""
        return PanelPacker(self.library, self.dtype).pack_dense(weight, bias, self.interleave)

    def multiply_parts(self, x: Tensor, first_rows: Tensor) -> Tensor:
        """Multiply each row [T, in] by one of N parts of the matrix, such as experts: [T, out / N].

        first_rows: [N + 1], where the rows of each part begin. A part has whole panels.
        """
        return self._multiply(x, first_rows)

    def _multiply(self, x: Tensor, first_rows: Tensor | None = None) -> Tensor:
        x, matrix, bias = x.contiguous(), self.struct, self.bias_fp32
        if bias is not None:
            matrix.bias = bias.data_ptr()
        n_parts = 1 if first_rows is None else len(first_rows) - 1
        y = x.new_empty(len(x), matrix.out // n_parts)
        self.library.call(
            "run_product",
            _dtype_code(x.dtype),
            structs.ProductArgs(
                ctypes.pointer(matrix),
                x.data_ptr(),
                y.data_ptr(),
                len(x),
                torch.get_num_threads(),
                structs.ACTIVATION_CODES[self.activations],
                n_parts,
                None if first_rows is None else first_rows.data_ptr(),
            ),
        )
        return y

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if self.interleave == 1:
            return y
        halves = (
            y.view(len(x), -1, self.interleave, PANEL_ROWS)
            .transpose(1, 2)
            .reshape(len(x), self.interleave, -1)
        )
        return halves[..., : self.shape[0] // self.interleave].reshape(len(x), -1)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden + self(x)


@dataclass(frozen=True, slots=True)
class PanelEmbedding:
    """An embedding in panels. It shares the matrix of the head, or has a matrix of its own."""

    matrix: PanelLinear
    scale: float  # of each row, rounded to the dtype; 1: none

    @property
    def weight(self) -> Tensor:
        return self.matrix.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, [B, T] -> [B, T, H]."""
        rows = self.matrix.read_rows(tokens)
        return rows if self.scale == 1 else rows * self.scale


class HugePageArena:
    """Memory for all matrices of a model, in pages as large as the system gives.

    A pass reads all of this memory. Large pages need fewer address translations.
    """

    def __init__(self, n_bytes: int):
        # Systems give huge pages to private memory, and rarely to shared memory.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if MAPS_PRIVATELY else {}
        self._memory = mmap.mmap(-1, max(n_bytes + HUGE_PAGE_BYTES, 1), **flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)  # owns the memory
        self._offset = -self._bytes.data_ptr() % HUGE_PAGE_BYTES

    def allocate(self, n_bytes: int) -> Tensor:
        """Return unused memory, uint8 [n_bytes], that begins on a cache line."""
        memory = self._bytes[self._offset : self._offset + n_bytes]
        self._offset += round_to_lines(n_bytes)
        return memory


def allocate(n_bytes: int) -> Tensor:
    """Return memory, uint8 [n_bytes], that begins on a cache line.

    Small memory is not in huge pages, because clearing such a page takes longer than using it.
    """
    if n_bytes >= HUGE_PAGE_BYTES:
        return HugePageArena(n_bytes).allocate(n_bytes)
    memory = torch.empty(n_bytes + CACHE_LINE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % CACHE_LINE_BYTES :][:n_bytes]


def round_to_lines(n_bytes: int) -> int:
    """Return a number of bytes rounded up to whole cache lines."""
    return -(-n_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def panel_nbytes(kind: int, n_inputs: int, dtype: torch.dtype) -> int:
    """Return the bytes of a panel. dtype: the dtype of weights in a dense panel."""
    if kind != DENSE:
        return FORMAT_BY_CODE[kind].panel_nbytes(n_inputs)
    return round_to_lines(-(-n_inputs // 2) * 2 * PANEL_ROWS * dtype.itemsize)


def panel_outputs(n_outputs: int, interleave: int) -> Tensor:
    """Return the indices of each panel's outputs, [panels, PANEL_ROWS]; -1 for padding."""
    n_part_outputs = n_outputs // interleave
    outputs = F.pad(
        torch.arange(n_outputs).view(interleave, n_part_outputs),
        (0, -n_part_outputs % PANEL_ROWS),
        value=-1,
    )
    return outputs.unflatten(1, (-1, PANEL_ROWS)).transpose(0, 1).flatten(0, 1)


class PanelPacker:
    """A packer that stores matrices in panels.

    activations: how the inputs of panels in blocks are rounded, one of ACTIVATIONS.
    arena: where to allocate panels; None: each matrix has memory of its own.
    """

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        activations: str = DEFAULT_ACTIVATIONS,
        arena: HugePageArena | None = None,
    ):
        self.library, self.dtype = library, dtype
        self.activations, self.arena = activations, arena

    def nbytes(self, matrix: Linear, interleave: int = 1) -> int:
        """Return the bytes that a matrix takes in panels, rounded up to whole cache lines."""
        return round_to_lines(
            sum(
                panel_nbytes(kind, matrix.shape[1], self.dtype)
                for kind in self._choose_kinds(matrix, interleave)
            )
        )

    def pack(self, matrix: Linear, interleave: int = 1) -> PanelLinear:
        """Store a matrix in panels. Afterwards the caller should release `matrix`."""
        if not isinstance(matrix, StoredFusedLinear):
            return self.pack_dense(matrix.to_dense(), matrix.bias, interleave)
        panels = self._allocate(
            self._choose_kinds(matrix, interleave), matrix.shape, matrix.bias, interleave
        )
        if (unrounded := _unrounded(matrix)) is not None:
            weight, bits = unrounded
            self._round_into(panels, weight.dequantize_rows, bits)
            return panels
        addresses = torch.from_numpy(matrix.row_addresses())
        for first, end, kind, outputs, memory in _iter_runs(panels):
            if kind == DENSE:
                for panel, rows in zip(memory.view(end - first, -1), outputs, strict=True):
                    dense = matrix.dequantize_rows(rows[rows >= 0]).to(self.dtype)
                    _copy_dense(panel[None], F.pad(dense, (0, 0, 0, PANEL_ROWS - len(dense)))[None])
            elif kind in GRID_KINDS:
                self._pack_grid_rows(panels, kind, matrix, outputs, memory)
            else:
                n_threads = min(torch.get_num_threads(), end - first)
                parts = (
                    torch.where(outputs < 0, 0, addresses[outputs]).tensor_split(n_threads),
                    memory.view(end - first, -1).tensor_split(n_threads),
                )
                with ThreadPoolExecutor(n_threads) as executor:
                    list(executor.map(partial(self._pack_blocks, panels, kind, False), *parts))
        return panels

    def _pack_grid_rows(
        self,
        panels: PanelLinear,
        kind: int,
        matrix: StoredFusedLinear,
        outputs: Tensor,
        memory: Tensor,
    ) -> None:
        """Store rows in IQ2 or IQ3 in panels, some panels at a time."""
        n_parts = -(-outputs.numel() * panels.shape[1] // CHUNK_WEIGHTS)

        def pack_part(rows: Tensor, to: Tensor) -> None:
            unpacked = unpack_grid_rows(matrix, rows.clamp(min=0).flatten())
            addresses = unpacked.data_ptr() + torch.arange(len(unpacked)) * unpacked.shape[1]
            addresses = torch.where(rows < 0, 0, addresses.view(rows.shape))
            self._pack_blocks(panels, kind, False, addresses, to)

        parts = outputs.tensor_split(n_parts), memory.view(len(outputs), -1).tensor_split(n_parts)
        with ThreadPoolExecutor(torch.get_num_threads()) as executor:
            list(executor.map(pack_part, *parts))

    def rounded_nbytes(self, matrix: Linear, bits: int) -> int:
        """Return the bytes of a matrix in `bits` bits, rounded up to whole cache lines."""
        assert isinstance(matrix, PanelLinear)
        return round_to_lines(
            len(matrix.kinds) * FORMAT_OF_BITS[bits].panel_nbytes(matrix.shape[1])
        )

    def round_all(self, widths: Sequence[tuple[Linear, int]], threads: int) -> list[PanelLinear]:
        """Return copies of matrices in panels. widths: (matrix, bits of its rounded weights)."""
        rounded = []
        for matrix, bits in widths:
            assert isinstance(matrix, PanelLinear)
            kinds = [FORMAT_OF_BITS[bits].code] * len(matrix.kinds)
            panels = self._allocate(kinds, matrix.shape, matrix.bias, matrix.interleave)
            rounded.append((panels, matrix.read_rows, bits))
        # The rounding is one call of C++, in which other threads of Python run.
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(lambda job: self._round_into(*job), rounded))
        return [panels for panels, _, _ in rounded]

    def allocate_rows(self, kind: int, n_rows: int, n_inputs: int) -> PanelLinear:
        """Return memory for a matrix [n_rows, n_inputs] without a bias. kind: of its panels."""
        kinds = [kind] * -(-n_rows // PANEL_ROWS)
        return self._allocate(kinds, (n_rows, n_inputs), None, 1)

    def pack_dense(self, weight: Tensor, bias: Tensor | None, interleave: int = 1) -> PanelLinear:
        """Store a weight [out, in] in dense panels, which do not round it."""
        shape = weight.shape[0], weight.shape[1]
        n_panels = len(panel_outputs(shape[0], interleave))
        panels = self._allocate([DENSE] * n_panels, shape, bias, interleave)
        for _, to, rows in _iter_chunks(panels, weight.__getitem__):
            _copy_dense(to, rows)
        return panels

    def _round_into(
        self, panels: PanelLinear, read_rows: Callable[[Tensor], Tensor], bits: int
    ) -> None:
        """Round rows to blocks of `bits` bits and store them in panels, chunk by chunk.

        bits: 8 (int8), 6, 5 or 4. The rounding is `quantize`, the packing `pack_blocks` in C++.
        """
        for kind, to, rows in _iter_chunks(panels, read_rows):
            blocks = quantize(rows.flatten(0, 1), bits, self.library).flatten(1)
            addresses = blocks.data_ptr() + torch.arange(len(blocks)) * blocks.shape[1]
            self._pack_blocks(panels, kind, True, addresses, to)

    def _choose_kinds(self, matrix: Linear, interleave: int) -> list[int]:
        """Return the kind (DENSE or a block format) of each panel.

        If the rows of a panel have different kinds, the panel is dense.
        """
        outputs = panel_outputs(matrix.shape[0], interleave)
        if not isinstance(matrix, StoredFusedLinear):
            return [DENSE] * len(outputs)
        codes = [_kind_of(part) for part in matrix.parts]
        if len(set(codes)) == 1:
            return [codes[0]] * len(outputs)
        kinds = torch.tensor(codes)[torch.from_numpy(matrix.row_parts())]
        row_kinds = kinds[outputs.clamp(min=0)]
        row_kinds = torch.where(outputs < 0, row_kinds[:, :1], row_kinds)
        is_mixed = (row_kinds != row_kinds[:, :1]).any(dim=1)
        return torch.where(is_mixed, DENSE, row_kinds[:, 0]).tolist()

    def _allocate(
        self, kinds: Sequence[int], shape: tuple[int, int], bias: Tensor | None, interleave: int
    ) -> PanelLinear:
        n_bytes = sum(panel_nbytes(kind, shape[1], self.dtype) for kind in kinds)
        memory = allocate(n_bytes) if self.arena is None else self.arena.allocate(n_bytes)
        return PanelLinear(
            memory,
            tuple(kinds),
            bias,
            shape,
            interleave,
            self.dtype,
            self.activations,
            self.library,
        )

    def _pack_blocks(
        self, panels: PanelLinear, kind: int, is_unpacked: bool, addresses: Tensor, to: Tensor
    ) -> None:
        addresses = addresses.contiguous()
        self.library.call(
            "pack_blocks",
            structs.PackArgs(
                rows=addresses.data_ptr(),
                is_unpacked=is_unpacked,
                n_panels=addresses.numel() // PANEL_ROWS,
                kind=kind,
                panels=to.data_ptr(),
                **{"in": panels.shape[1]},
            ),
        )


def _dtype_code(dtype: torch.dtype) -> int:
    return structs.DTYPE_CODES[str(dtype).removeprefix("torch.")]


def _unrounded(matrix: StoredFusedLinear) -> tuple[StoredFusedLinear, int] | None:
    """Return (the matrix before rounding, bits); None if the matrix is not rounded when it is read.

    Packing rounds the matrix, and a matrix that is rounded twice may differ from one that is
    rounded once.
    """
    rounded = [part for part in matrix.parts if isinstance(part, RoundedMatrix)]
    if not rounded:
        return None
    return replace(matrix, parts=tuple(part.source for part in rounded)), rounded[0].bits


def _kind_of(matrix: StoredMatrix) -> int:
    """Return the kind of the panels that can hold a matrix in its own format; DENSE: none.

    The scales of MXFP4, IQ2 and IQ3 have a larger range than the halves of panels, which usual
    weights do not need.
    """
    block_format = find_block_format(matrix.format)
    if block_format is None:
        return DENSE
    if matrix.format == "mxfp4":
        fits = _has_half_scales(matrix)
    else:
        fits = matrix.format not in GRID_FORMATS or has_exact_scales(matrix)
    return block_format.code if fits else DENSE


def _has_half_scales(matrix: StoredMatrix) -> bool:
    """Return whether halves can be the scales of a matrix in MXFP4."""
    blocks = matrix.data.reshape(-1, MXFP4_BYTES)
    exponents = blocks[:, 0]
    outside = (exponents < MXFP4_EXPONENTS[0]) | (exponents > MXFP4_EXPONENTS[1])
    return not (blocks[outside, 1:] & MXFP4_MAGNITUDES).any()


def _iter_chunks(
    panels: PanelLinear, read_rows: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (kind, memory of some panels, their rows [panels, PANEL_ROWS, in]).

    All panels must be of one kind. Padding rows are zeros.
    """
    outputs = panel_outputs(panels.shape[0], panels.interleave)
    memory = panels.weight.view(len(outputs), -1)
    step = max(1, CHUNK_WEIGHTS // (PANEL_ROWS * panels.shape[1]))
    for first in range(0, len(outputs), step):
        chunk = outputs[first : first + step]
        rows = read_rows(chunk.clamp(min=0).flatten())
        rows[chunk.flatten() < 0] = 0
        yield panels.kinds[0], memory[first : first + step], rows.unflatten(0, chunk.shape)


def _iter_runs(panels: PanelLinear) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """Yield (first panel, end, kind, outputs, memory) of each run of panels of one kind.

    outputs: the indices of the panels' outputs, [panels, PANEL_ROWS].
    """
    outputs = panel_outputs(panels.shape[0], panels.interleave)
    first = offset = 0
    for kind, run in groupby(panels.kinds):
        end = first + len(list(run))
        n_bytes = (end - first) * panel_nbytes(kind, panels.shape[1], panels.dtype)
        yield first, end, kind, outputs[first:end], panels.weight[offset : offset + n_bytes]
        first, offset = end, offset + n_bytes


def _copy_dense(to: Tensor, rows: Tensor) -> None:
    """Store rows [panels, PANEL_ROWS, in] in dense panels, uint8 [panels, n]."""
    inputs_per_cell = 2 if rows.dtype == torch.bfloat16 else 1
    cells = F.pad(rows, (0, -rows.shape[2] % inputs_per_cell)).unflatten(2, (-1, inputs_per_cell))
    n_bytes = cells[0].numel() * rows.dtype.itemsize
    memory = to[:, :n_bytes].view(rows.dtype).view(cells.transpose(1, 2).shape)
    memory.copy_(cells.transpose(1, 2))
