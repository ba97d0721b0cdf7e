"""Build the native library from src/ on first use, store it, and load it in later processes.

A wheel for one system brings the library for every instruction set of its processors.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skipsearch.core.files import cache_dir
from skipsearch.engine.code_cache import existing_code_cache, open_code_cache
from skipsearch.engine.native import structs
from skipsearch.engine.native.layout import write_layout_checks
from skipsearch.errors import ModelError

BuildProgress = Callable[[int, int], None]

SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "compiled"  # of a wheel for one system
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
)
X86_MACHINES = ("x86_64", "AMD64")
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
AVX512_BF16 = (*AVX512, "avx512vnni", "avx512bf16", "avx512vbmi")


@dataclass(frozen=True)
class InstructionSet:
    """A set of processor instructions for which the kernels are compiled."""

    x86: tuple[str, ...] = ()  # names as the compiler has them
    arm: tuple[str, ...] = ()  # names as in /proc/cpuinfo
    options: tuple[str, ...] = ()  # of the compiler

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler options with which the kernels are compiled for this set."""
        return (*(f"-m{name}" for name in self.x86), *self.options)

    @property
    def has_vnni(self) -> bool:
        """Whether it has instructions for products of 8-bit integers."""
        return any("vnni" in name for name in self.x86)

    @property
    def required(self) -> str:
        """The condition in C++ by which `skipsearch_runs_here` tests the processor."""
        return "".join(f"SS_HAS({name})&&" for name in self.x86)

    def is_supported(self, machine: str, cpu_flags: frozenset[str]) -> bool:
        """Return whether a processor has all instructions of the set.

        machine: as `platform.machine` names it. cpu_flags: as in /proc/cpuinfo.
        """
        names = {
            name.replace("avx512vnni", "avx512_vnni")
            .replace("avx512bf16", "avx512_bf16")
            .replace("avxvnni", "avx_vnni")
            for name in self.x86
        }
        if machine in X86_MACHINES:
            return not self.arm and names <= cpu_flags
        return not self.x86 and cpu_flags.issuperset(self.arm)


WIDE_VECTORS = ("-mprefer-vector-width=512",)
INSTRUCTION_SETS: dict[str, InstructionSet] = {  # the plainest first
    "plain": InstructionSet(),
    "neon": InstructionSet(arm=("asimddp",), options=("-march=armv8.2-a+dotprod",)),
    "avx2": InstructionSet(AVX2),
    "avxvnni": InstructionSet((*AVX2, "avxvnni")),
    "avx512": InstructionSet(AVX512, options=WIDE_VECTORS),
    "avx512vnni": InstructionSet((*AVX512, "avx512vnni"), options=WIDE_VECTORS),
    "avx512bf16": InstructionSet(AVX512_BF16, options=(*WIDE_VECTORS, "-DSS_BF16_DOT")),
}
# kernels.cpp is compiled for each of these, with the flags of the instruction set.
KERNEL_TYPES = ("float", "bf16", "double")
SHARED_KERNELS = (
    "block_product",
    "quantize",
    "recurrent_net",
)  # compiled once, with the same flags
HOST_SOURCES = ("exports", "packing", "visibility", "threads")
COMPILE_TIMEOUT_S = 600.0


# The functions of src/exports.cpp: what they read. A struct is passed by its address.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "run_pass": (structs.ModelStruct, structs.PassArgs),
    "run_draft": (structs.ModelStruct, structs.PassArgs, ctypes.c_int64, ctypes.c_double),
    "run_product": (ctypes.c_int64, structs.ProductArgs),
    "run_delta_net": (structs.DeltaNetArgs,),
    "run_mamba": (structs.MambaArgs,),
    "read_rows": (ctypes.c_int64, structs.ReadRowsArgs),
    "copy_rows": (structs.CopyRowsArgs,),
    "quantize_blocks": (structs.QuantizeArgs,),
    "pack_blocks": (structs.PackArgs,),
}


class NativeLibrary:
    """The functions of the loaded library."""

    def __init__(self, handle: ctypes.CDLL, instructions: str, sha256: str):
        self.instructions = instructions  # the set that it was compiled for
        self.sha256 = sha256  # of its code
        self._functions = {name: getattr(handle, f"skipsearch_{name}") for name in FUNCTIONS}
        for name, function in self._functions.items():
            function.argtypes = [
                ctypes.POINTER(kind) if issubclass(kind, ctypes.Structure) else kind
                for kind in FUNCTIONS[name]
            ]
            function.restype = ctypes.c_int if name.startswith("run_") else None

    def call(self, name: str, *args: Any) -> None:
        """Call one of `FUNCTIONS` with structs and numbers.

        Raises: MemoryError; IndexError for a token, slot or position that model or cache does not
            have.
        """
        if code := self._functions[name](*args):
            raise _error_of_code(code)

    def run_draft_chain(
        self, model: structs.ModelStruct, args: structs.PassArgs, max_tokens: int, threshold: float
    ) -> int:
        """Run passes of one token each, starting with the token in `args`, as `args.sampling` says.

        Returns the number of passes. Raises: as `call`.
        """
        count: int = self._functions["run_draft"](model, args, max_tokens, threshold)
        if count < 0:
            raise _error_of_code(-count)
        return count


def _error_of_code(code: int) -> Exception:
    return (
        MemoryError("no memory for the buffers of a pass")
        if code == 1
        else IndexError("a token, slot or position out of range")
    )


class NoCompilerError(ModelError):
    """An error that reports that there is no working C++ compiler."""


_loaded: dict[str, NativeLibrary] = {}
_loading = threading.Lock()


def load_or_build(
    progress: BuildProgress = lambda done, total: None, instructions: str | None = None
) -> NativeLibrary:
    """Load the library; build it first if it is not stored.

    progress(done, total): numbers of compiled files.
    instructions: a key of `INSTRUCTION_SETS`; None: the best set of this processor.
    Raises: NoCompilerError; ModelError if the library cannot be stored or loaded.
    """
    chosen = instructions or best_instruction_set()
    name = _cache_name(chosen)
    with _loading:
        if name not in _loaded:
            try:
                library = _load_stored(name, chosen)
            except OSError as error:
                raise _cannot_store(cache_dir() / "compiled", error) from None
            _loaded[name] = library or _build_and_store(name, chosen, progress)
        return _loaded[name]


def cached_library() -> NativeLibrary | None:
    """Return the library if the wheel brought it or a process built it before, else None.

    This builds nothing.
    """
    chosen = best_instruction_set()
    name = _cache_name(chosen)
    with _loading:
        with suppress(OSError, ModelError):
            if name not in _loaded and (library := _load_stored(name, chosen)) is not None:
                _loaded[name] = library
        return _loaded.get(name)


@cache
def best_instruction_set() -> str:
    """Return the name of the last of `INSTRUCTION_SETS` that this processor supports."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "neon"  # every Apple processor has these instructions, and no /proc/cpuinfo
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "ignore").splitlines()
    except OSError:
        return "plain"
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    machine, cpu_flags = platform.machine(), frozenset(line.split())
    return [
        name
        for name, instructions in INSTRUCTION_SETS.items()
        if instructions.is_supported(machine, cpu_flags)
    ][-1]


def _cache_name(instructions: str) -> str:
    source = b"".join(path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir()))
    options = f"{FLAGS}{INSTRUCTION_SETS[instructions].flags}{sys.platform}{platform.machine()}"
    # What Python expects counts too: a library that was compiled for other structs is not loaded.
    described = f"{options}{write_layout_checks()}".encode()
    return f"native-{instructions}-{hashlib.sha256(source + described).hexdigest()[:24]}"


def _load_stored(name: str, instructions: str) -> NativeLibrary | None:
    """Load the library that the wheel brought or a process built; None if there is none.

    Raises: OSError, ModelError.
    """
    library = _load_shipped(name, instructions)
    code_cache = existing_code_cache() if library is None else None
    code = None if code_cache is None else code_cache.read(name)
    return library if code is None else load_library(code, instructions)


def _load_shipped(name: str, instructions: str) -> NativeLibrary | None:
    """Load the library that the wheel brought; None if it brought none. Raises: ModelError."""
    try:
        code = (SHIPPED / f"{name}.so").read_bytes()
    except OSError:
        return None
    return load_library(code, instructions)


def ship_libraries(
    folder: Path = SHIPPED, progress: Callable[[str], None] = lambda instructions: None
) -> list[Path]:
    """Compile the library for every instruction set of this machine's architecture.

    A wheel that is built afterwards brings them. progress(instructions): before each set.
    Raises: NoCompilerError; OSError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_x86 = platform.machine() in X86_MACHINES
    paths = list[Path]()
    for name, instructions in INSTRUCTION_SETS.items():
        if not (instructions.arm if is_x86 else instructions.x86):
            progress(name)
            paths.append(folder / f"{_cache_name(name)}.so")
            paths[-1].write_bytes(compile_library(name))
    return paths


def _build_and_store(name: str, instructions: str, progress: BuildProgress) -> NativeLibrary:
    """Build the library, try it here, and store it. Raises: NoCompilerError, ModelError."""
    try:
        code_cache = open_code_cache()
    except OSError as error:
        raise _cannot_store(cache_dir() / "compiled", error) from None
    code = compile_library(instructions, progress)
    library = load_library(code, instructions)
    if library is None:
        raise ModelError(
            "the engine native was built and does not run on this processor; use --engine lean"
        )
    try:
        code_cache.store(name, code)
    except OSError as error:
        raise _cannot_store(code_cache.folder, error) from None
    return library


def find_compiler() -> str | None:
    """Return the command of a C++ compiler, or None."""
    return os.environ.get("CXX") or next(
        filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None
    )


def compile_library(instructions: str, progress: BuildProgress = lambda done, total: None) -> bytes:
    """Compile the library; return its code.

    Raises: NoCompilerError; OSError if the temporary folder is full.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NoCompilerError(
            "the engine native needs a C++ compiler and there is none: install g++"
        )
    flags = (*FLAGS, *INSTRUCTION_SETS[instructions].flags)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def compile_to_object(name: str, source: str, *options: str) -> list[str]:
            output = str(folder / f"{name}.o")
            return [compiler, *options, "-c", str(SOURCES / source), "-o", output]

        commands = [
            compile_to_object(kind, "kernels.cpp", *flags, f"-DSS_TYPE={kind}")
            for kind in KERNEL_TYPES
        ]
        commands += [compile_to_object(part, f"{part}.cpp", *flags) for part in SHARED_KERNELS]
        # Without the flags of the set: this code runs before the processor is checked.
        layout = folder / "layout.h"
        layout.write_text(write_layout_checks(), "utf-8")
        checks = (f"-I{SOURCES}", "-include", str(layout))
        required = f"-DSS_REQUIRED={INSTRUCTION_SETS[instructions].required}"
        commands += [
            compile_to_object(part, f"{part}.cpp", *FLAGS, required, *checks)
            for part in HOST_SOURCES
        ]
        total = len(commands) + 1
        progress(0, total)
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            for done, command in enumerate(
                as_completed([pool.submit(_run_compiler, command, folder) for command in commands]),
                1,
            ):
                command.result()
                progress(done, total)
        library = folder / "native.so"
        _run_compiler(
            [
                compiler,
                "-shared",
                "-pthread",
                *(
                    str(folder / f"{part}.o")
                    for part in (*KERNEL_TYPES, *SHARED_KERNELS, *HOST_SOURCES)
                ),
                "-o",
                str(library),
            ],
            folder,
        )
        progress(total, total)
        return library.read_bytes()


def _run_compiler(command: Sequence[str], folder: Path) -> None:
    """Run one command. Raises: NoCompilerError, which quotes the compiler's first error."""
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(
            f"the engine native needs a C++ compiler that works ({error}): install g++"
        ) from None
    if process.returncode:
        output = process.stderr.splitlines() or [f"exit status {process.returncode}"]
        lines = [line for line in output if "error" in line] or output
        raise NoCompilerError(
            f"the engine native needs a C++ compiler that works ({lines[0][:160]}): install g++ 11 "
            "or newer"
        )


def load_library(code: bytes, instructions: str) -> NativeLibrary | None:
    """Load the code; return None if this processor lacks its instructions.

    The bytes themselves are loaded. The file that they were read from may have changed since.
    Raises: ModelError if the system loads no code from the temporary folder.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "native.so"
            path.write_bytes(code)
            handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(
            f"the engine native could not be loaded ({str(error)[:120]}); the temporary folder may "
            "be full, or mounted so that no code in it runs: set TMPDIR to another folder, or use "
            "--engine lean"
        ) from None
    return (
        NativeLibrary(handle, instructions, hashlib.sha256(code).hexdigest())
        if handle.skipsearch_runs_here()
        else None
    )


def _cannot_store(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"the engine native cannot be stored in {folder} ({error.strerror}): set "
        "SKIPSEARCH_CACHE_DIR to a folder with room, or use --engine lean "
        "without a profile whose drafts read rounded weights (--profile none)"
    )
