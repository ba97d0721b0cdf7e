"""Let the compiler compare the structs and tables of Python with those of src/*.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from skipsearch.engine.native import structs
from skipsearch.engine.native.block_formats import BLOCK_FORMATS, SUPER_GROUPS

CODES = {
    "PANEL_ROWS": structs.PANEL_ROWS,
    "GROUP_SIZE": structs.GROUP_SIZE,
    "SUPER_GROUPS": SUPER_GROUPS,
    "DENSE": structs.DENSE,
    "SILU": structs.SILU,
    "GELU_TANH": structs.GELU_TANH,
    "GELU": structs.GELU,
    "CLAMPED_SWIGLU": structs.CLAMPED_SWIGLU,
    "F32": structs.DTYPE_CODES["float32"],
    "BF16": structs.DTYPE_CODES["bfloat16"],
    "F64": structs.DTYPE_CODES["float64"],
    **{name.upper(): code for name, code in structs.ACTIVATION_CODES.items()},
    "KV_DTYPE": structs.KV_CODES["auto"],
    "KV_INT8": structs.KV_CODES["int8"],
    "KV_GROUP": structs.KV_GROUP,
    **{name.upper(): block_format.code for name, block_format in BLOCK_FORMATS.items()},
}
WIDTHS = (1, 32, 33, 256, 288, 4096)  # inputs of panels whose bytes are compared


def write_layout_checks() -> str:
    """Return a header in C++ that compiles only if Python describes what the kernels read."""
    conditions = (
        *(f"{name} == {code}" for name, code in CODES.items()),
        *_compare_structs(),
        *_compare_formats(),
    )
    lines = (f"static_assert({condition});" for condition in conditions)
    return "\n".join(
        ("#include <cstddef>", "#include <type_traits>", '#include "blocks.h"', *lines, "")
    )


def _compare_structs() -> Iterator[str]:
    for struct in ctypes.Structure.__subclasses__():
        if struct.__module__ != structs.__name__:
            continue
        name = _name_in_cpp(struct)
        yield f"sizeof({name}) == {ctypes.sizeof(struct)}"
        for field, kind, *_ in struct._fields_:
            cpp_field = f"{name}::{field}"
            yield f"offsetof({name}, {field}) == {getattr(struct, field).offset}"
            numbers = {ctypes.c_int64: "int64_t", ctypes.c_double: "double"}
            if kind in numbers:
                yield f"std::is_same_v<decltype({cpp_field}), {numbers[kind]}>"
            elif issubclass(kind, ctypes.Structure):
                yield f"std::is_same_v<decltype({cpp_field}), {_name_in_cpp(kind)}>"
            else:
                yield f"std::is_pointer_v<decltype({cpp_field})>"


def _name_in_cpp(struct: type) -> str:
    return struct.__name__.removesuffix("Struct")


def _compare_formats() -> Iterator[str]:
    yield f"sizeof(BLOCK_FORMATS) / sizeof(BlockFormat) == {1 + len(BLOCK_FORMATS)}"
    for block_format in BLOCK_FORMATS.values():
        entry = f"BLOCK_FORMATS[{block_format.code}]"
        for field in ("bits", "zero", "has_min", "has_super_blocks", "n_scales", "has_codebook"):
            yield f"{entry}.{field} == {int(getattr(block_format, field))}"
        for n_inputs in WIDTHS:
            yield f"{entry}.panel_bytes({n_inputs}) == {block_format.panel_nbytes(n_inputs)}"
