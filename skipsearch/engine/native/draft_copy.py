"""Copies of a native model's weights in fewer bits, and rows of its head, for draft passes."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.panels import (
    HugePageArena,
    PanelLinear,
    PanelPacker,
    allocate,
    panel_nbytes,
)
from skipsearch.engine.native.structs import PANEL_ROWS
from skipsearch.models.fused.fused_adapter import list_matrices, replace_matrices
from skipsearch.models.fused.linear import Linear
from skipsearch.models.head_rows import HeadRows

# The head of a copy. A draft errs more by a rounded head than by rounded layers, because the head
# decides between tokens whose logits are close. Few of its rows are read if drafts have a
# vocabulary.
HEAD_BITS = 8
SCALE_BITS = 0.5  # of a weight in blocks: two bytes of scale for 32 weights


def list_layer_matrices(model: NativeAdapter, first_layer: int = 0) -> list[Linear]:
    """Return the matrices of all layers from one on, in the order of a pass."""
    layers = model.fused_model.layers[first_layer:]
    return [matrix for layer in layers for matrix in list_matrices(layer)]


def rounds_head(model: NativeAdapter) -> bool:
    """Return whether the copies of a model have a head of their own, in `HEAD_BITS` bits."""
    return bits_per_weight([model.fused_model.unembed]) > HEAD_BITS + SCALE_BITS


def bits_per_weight(matrices: Sequence[Linear]) -> float:
    """Return the mean bits of a weight, scales included."""
    n_weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)
    return 8 * sum(matrix.nbytes for matrix in matrices) / n_weights


def round_matrices(model: NativeAdapter, bits: int, first_layer: int = 0) -> NativeAdapter:
    """Return the model with the matrices of its layers, from one on, rounded to `bits` bits.

    The head has `HEAD_BITS` bits, or is the model's own if that has no more. Norms and embedding
    are shared with the model. Inputs of matrices are rounded to int8, which is fast, and which
    drafts need not avoid.
    Raises: MemoryError.
    """
    source = model.fused_model
    packer = PanelPacker(model.library, model.spec.dtype)
    widths = [(matrix, bits) for matrix in list_layer_matrices(model, first_layer)]
    has_own_head = rounds_head(model)
    if has_own_head:
        widths.append((source.unembed, HEAD_BITS))
    packer.arena = HugePageArena(sum(packer.rounded_nbytes(*pair) for pair in widths))
    copies = iter(packer.round_all(widths, torch.get_num_threads()))
    rounded = copy.copy(source)  # shares rotary tables
    rounded.layers = [
        *source.layers[:first_layer],
        *(
            replace_matrices(layer, [next(copies) for _ in list_matrices(layer)])
            for layer in source.layers[first_layer:]
        ),
    ]
    rounded.unembed = next(copies) if has_own_head else source.unembed
    adapter = NativeAdapter(rounded, model.library)
    adapter.use_activations("int8")
    return adapter


class SharedHeadRows:
    """The rows of the head that the drafts of all requests read.

    model: the model that drafts, with its whole head. token_ids: a multiple of PANEL_ROWS, unless
    these are all tokens.
    """

    def __init__(self, model: NativeAdapter, token_ids: Tensor):
        head = model.fused_model.unembed
        assert isinstance(head, PanelLinear)
        self.head, self.token_ids, self.dtype = head, token_ids, model.spec.dtype
        self.library, self.vocab_size, self.kind = (
            model.library,
            model.spec.vocab_size,
            head.kinds[0],
        )
        packer = PanelPacker(model.library, model.spec.dtype)
        self.rows = packer.allocate_rows(self.kind, len(token_ids), head.shape[1])
        self.copy_rows(token_ids, self.rows.panel_structs, 0)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def copy_rows(self, token_ids: Tensor, target: Any, first_row: int) -> None:
        """Copy the rows of these tokens to an array of panel structs, from `first_row` on."""
        token_ids = token_ids.contiguous()
        self.library.call(
            "copy_rows",
            structs.CopyRowsArgs(
                **{
                    "from": self.head.panel_structs,
                    "rows": token_ids.data_ptr(),
                    "n_rows": len(token_ids),
                    "in": self.head.shape[1],
                    "to": target,
                    "first_row": first_row,
                    "itemsize": self.dtype.itemsize,
                }
            ),
        )


class PanelHeadRows(HeadRows):
    """Rows in panels, of which the first are shared between requests."""

    def __init__(self, shared: SharedHeadRows):
        super().__init__(shared.vocab_size, shared.token_ids)
        self._shared, self._own_panels = shared, list[Tensor]()
        # If all tokens are shared, the last panel may have fewer rows, and none is added.
        self._n_panels = -(-len(shared.token_ids) // PANEL_ROWS)
        self._make_structs()

    @property
    def struct(self) -> structs.MatrixStruct:
        """The rows as a matrix for the kernels. It is valid until rows are added."""
        self._struct.out = self.count
        return self._struct

    def _reserve(self, capacity: int) -> None:
        n_inputs, kind = self._shared.head.shape[1], self._shared.kind
        n_new = -(-capacity // PANEL_ROWS) - self._n_panels
        if n_new <= 0:
            return
        size = panel_nbytes(kind, n_inputs, self._shared.dtype)
        memory = allocate(n_new * size).zero_()
        self._own_panels += memory.split(size)
        self._n_panels += n_new
        self._make_structs()

    def _store(self, tokens: Tensor, first_row: int) -> None:
        shared = self._shared
        shared.copy_rows(tokens, self._panels, first_row)
        if self._bias is not None:
            assert shared.head.bias is not None
            self._bias[first_row : first_row + len(tokens)] = shared.head.bias[tokens]

    def _make_structs(self) -> None:
        """Make the structs again, since arrays of structs cannot grow."""
        shared, n_shared = self._shared, len(self._shared.rows.kinds)
        self._panels = (structs.PanelStruct * self._n_panels)(
            *shared.rows.panel_structs[:n_shared],
            *(structs.PanelStruct(panel.data_ptr(), shared.kind) for panel in self._own_panels),
        )
        self._bias: Tensor | None = None
        if shared.head.bias is not None:
            dtype = torch.promote_types(shared.head.bias.dtype, torch.float32)
            bias = shared.head.bias[self.token_ids].to(dtype)
            self._bias = F.pad(bias, (0, self._n_panels * PANEL_ROWS - self.count))
        self._struct = structs.MatrixStruct(
            ctypes.cast(self._panels, ctypes.POINTER(structs.PanelStruct)),
            None if self._bias is None else self._bias.data_ptr(),
            self.count,
            shared.head.shape[1],
            shared.kind != structs.DENSE,
        )
