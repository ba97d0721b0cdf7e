"""The native library: built from the sources beside this file on first use, kept, and loaded by later processes."""

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
from functools import cache
from pathlib import Path

import torch

from skipsearch.engine.kept import Shelf, existing_shelf, open_shelf
from skipsearch.engine.native import abi
from skipsearch.errors import ModelError
from skipsearch.machine import cache_folder

Progress = Callable[[int, int], None]

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fvisibility=hidden")
AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# Sets of instructions from the plainest on: what /proc/cpuinfo calls them, and what the compiler is told.
SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "plain": (frozenset(), ()),
    "avx2": (frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    "avx512": (frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}), AVX512),
    "avx512bf16": (frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
                   (*AVX512, "-mavx512bf16", "-DSS_BF16_DOT")),
}
KERNELS = ("float", "bf16", "double")        # compiled with the flags of the set, each a file of its own
AROUND = ("main", "rows", "threads")
LONGEST = 600.0                              # seconds that a compiler may take


class Library:
    """The library's functions. set: the instructions that it was compiled to."""

    def __init__(self, handle: ctypes.CDLL, instructions: str):
        self.instructions = instructions
        self.run_pass = handle.skipsearch_pass
        self.run_pass.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.run_draft = handle.skipsearch_draft
        self.run_draft.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
        self.run_product = handle.skipsearch_product
        self.run_product.argtypes = (ctypes.c_int64, ctypes.c_void_p)

    def whole_pass(self, model: abi.Model, step: abi.Pass) -> None:
        """Raises: MemoryError; IndexError for a token, slot or position that the model or the cache has no room for."""
        if failed := self.run_pass(ctypes.byref(model), ctypes.byref(step)):
            raise _failure(failed)

    def draft(self, model: abi.Model, first: abi.Pass, most: int, threshold: float) -> int:
        """Passes of one token each, of which the first is given; how many there were. Raises: as `whole_pass`."""
        count: int = self.run_draft(ctypes.byref(model), ctypes.byref(first), most, threshold)
        if count < 0:
            raise _failure(-count)
        return count

    def product(self, dtype: torch.dtype, product: abi.Product) -> None:
        """Raises: MemoryError."""
        if self.run_product(abi.DTYPES[str(dtype).removeprefix("torch.")], ctypes.byref(product)):
            raise MemoryError("no memory for a matrix product")


def _failure(code: int) -> Exception:
    return MemoryError("no memory for what a pass works in") if code == 1 else IndexError("a token, slot or position out of range")


class NoCompiler(ModelError):
    """There is no C++ compiler here that works."""


_loaded: dict[str, Library] = {}
_loading = threading.Lock()


def open_library(progress: Progress = lambda done, total: None, instructions: str | None = None) -> Library:
    """Loaded, after it was built where it was not kept. instructions: of `SETS`; the best that this processor has, if not given.

    progress(done, total): of files compiled. Raises: NoCompiler; ModelError where the library cannot be kept or loaded.
    """
    chosen = instructions or best_set()
    name = _name(chosen)
    with _loading:
        if name not in _loaded:
            try:
                shelf = open_shelf()
                kept = shelf.read(name)
                found = None if kept is None else load(kept, chosen)
            except OSError as error:
                raise _no_place(cache_folder() / "compiled", error) from None
            _loaded[name] = found or _made(name, chosen, shelf, progress)
        return _loaded[name]


def kept_library() -> Library | None:
    """The library if a process built it before; None otherwise. Builds nothing."""
    chosen = best_set()
    name = _name(chosen)
    with _loading:
        if name not in _loaded:
            try:
                shelf = existing_shelf()
                code = None if shelf is None else shelf.read(name)
                found = None if code is None else load(code, chosen)
            except (OSError, ModelError):
                return None
            if found is None:
                return None
            _loaded[name] = found
        return _loaded[name]


@cache
def best_set() -> str:
    """The last of `SETS` that this processor has all of."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "plain"
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "ignore").splitlines()
    except OSError:
        return "plain"
    has = frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    return [name for name, (needs, _) in SETS.items() if needs <= has][-1]


def _name(instructions: str) -> str:
    source = b"".join(path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir()))
    known = f"{FLAGS}{SETS[instructions][1]}{sys.platform}{platform.machine()}"
    return f"native-{instructions}-{hashlib.sha256(source + known.encode()).hexdigest()[:24]}"


def _made(name: str, instructions: str, shelf: Shelf, progress: Progress) -> Library:
    """Raises: NoCompiler, ModelError."""
    code = build(instructions, progress)
    found = load(code, instructions)
    if found is None:
        raise ModelError("the engine native was built and does not run on this processor; use --engine lean")
    try:
        shelf.keep(name, code)
    except OSError as error:
        raise _no_place(shelf.folder, error) from None
    return found


def compiler_here() -> str | None:
    """What would compile the library; None where no C++ compiler was found."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def build(instructions: str, progress: Progress = lambda done, total: None) -> bytes:
    """Raises: NoCompiler; OSError where the temporary folder has no room."""
    compiler = compiler_here()
    if compiler is None:
        raise NoCompiler("the engine native needs a C++ compiler and there is none: install g++")
    flags = (*FLAGS, *SETS[instructions][1])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jobs = [[compiler, *flags, f"-DSS_TYPE={kind}", "-c", str(SOURCES / "kernels.cpp"), "-o", str(folder / f"{kind}.o")]
                for kind in KERNELS]
        # Without the set's flags: what runs before the processor was asked.
        jobs += [[compiler, *FLAGS, f"-DSS_SET={list(SETS).index(instructions)}", "-c", str(SOURCES / f"{part}.cpp"), "-o",
                  str(folder / f"{part}.o")] for part in AROUND]
        total = len(jobs) + 1
        progress(0, total)
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            for done, job in enumerate(as_completed([pool.submit(_run, job, folder) for job in jobs]), 1):
                job.result()
                progress(done, total)
        whole = folder / "native.so"
        _run([compiler, "-shared", "-pthread", *(str(folder / f"{part}.o") for part in (*KERNELS, *AROUND)), "-o", str(whole)], folder)
        progress(total, total)
        return whole.read_bytes()


def _run(command: Sequence[str], folder: Path) -> None:
    """Raises: NoCompiler."""
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"the engine native needs a C++ compiler that works ({error}): install g++") from None
    if ran.returncode:
        said = ran.stderr.splitlines() or [f"exit status {ran.returncode}"]
        lines = [line for line in said if "error" in line] or said
        raise NoCompiler(f"the engine native needs a C++ compiler that works ({lines[0][:160]}): install g++ 11 or newer")


def load(code: bytes, instructions: str) -> Library | None:
    """What runs the code; None where this processor does not. The bytes themselves are loaded and not the file that they were read from,
    which may have changed since. Raises: ModelError where the system loads no code from the temporary folder."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "native.so"
            path.write_bytes(code)
            handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(f"the engine native could not be loaded ({str(error)[:120]}); the temporary folder may be full, or mounted so "
                         "that no code in it runs: set TMPDIR to another folder, or use --engine lean") from None
    return Library(handle, instructions) if handle.skipsearch_runs_here() else None


def _no_place(folder: Path, error: OSError) -> ModelError:
    return ModelError(f"the engine native cannot be kept in {folder} ({error.strerror}): set SKIPSEARCH_CACHE_DIR to a folder with room, "
                      "or use --engine lean")
