"""Native code by torch's ahead-of-time compiler: from an exported program to the bytes of a package, and from these to what runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from skipsearch.engine.kept import private_folder
from skipsearch.errors import ModelError

TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
HEADERS, HEADER_LOCKS = "_HEADER_DIR", "_HEADER_LOCK_DIR"   # of torch._inductor.codecache, which asks TORCH_FOLDER for neither


def make_package(program: ExportedProgram) -> bytes:
    """Raises: ModelError without room; InvalidCxxCompiler and CppCompileError of torch."""
    try:
        with tempfile.TemporaryDirectory() as folder, _private_torch_folder():
            made = Path(folder) / "piece.pt2"
            torch._inductor.aoti_compile_and_package(program, package_path=str(made))
            return made.read_bytes()
    except OSError as error:
        raise _no_room("compiled", error) from None


def load_package(code: bytes, otherwise: str = "") -> Any:
    """What runs it. The bytes themselves are loaded and not the file that they were read from, which may have changed since.

    otherwise: what else to do where it cannot be. Raises: ModelError.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "piece.pt2"
            package.write_bytes(code)
            # torch._inductor.aoti_load_package looks for the processor's kind on top, with code out of a folder that anyone may have made
            return torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    except (OSError, RuntimeError) as error:
        raise _no_room("loaded", error, otherwise) from None


@contextmanager
def _private_torch_folder() -> Iterator[None]:
    """torch's own is /tmp/torchinductor_NAME, whoever made it first, and it runs the code that it finds there."""
    before = os.environ.get(TORCH_FOLDER)
    os.environ[TORCH_FOLDER] = str(private_folder("torch"))
    try:
        with _private_headers(private_folder("headers")):
            yield
    finally:
        if before is None:
            os.environ.pop(TORCH_FOLDER, None)
        else:
            os.environ[TORCH_FOLDER] = before


@contextmanager
def _private_headers(folder: Path) -> Iterator[None]:
    """g++ takes a precompiled header as it lies there, and code can be in it. Where torch's folder for them has no name, none is made."""
    from torch._inductor import codecache, config

    places = {HEADERS: str(folder), HEADER_LOCKS: str(folder / "locks")}
    if not all(hasattr(codecache, name) for name in places):
        with config.patch({"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}):
            yield
        return
    before = {name: getattr(codecache, name) for name in places}
    try:
        for name, place in places.items():
            setattr(codecache, name, place)
        yield
    finally:
        for name, place in before.items():
            setattr(codecache, name, place)


def _no_room(what: str, error: Exception, otherwise: str = "") -> ModelError:
    """Both unpack files into the temporary folder, and say no more than that they could not."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = (said.splitlines() or [type(error).__name__])[0][:120]
    return ModelError(f"compiled code could not be {what} ({line}); the temporary folder may be full or not writable: set TMPDIR to a "
                      f"folder with room, or use --engine lean{otherwise}")
