"""Packed weights of GGUF files, stored once, and mapped by every later load.

An entry is one file: a preamble with a checksum, the structure of the fused model, and the bytes of
all tensors. The structure is a pickle that names nothing but the classes of `CLASSES`, so no code
of the file runs. Its tensors are places in the file, which is mapped for reading: processes share
the memory, and the system reads what a pass needs.

An entry holds what the same code packs from the same bytes: its name depends on the SHA-256 of the
weight files, the dtype, the machine code of the kernels, all sources of this package, and the
versions of libraries. What a load checks is therefore true of the entry, too, and an entry is only
read if the result of the load check is stored.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
import secrets
import shutil
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.core.files import cache_dir, hash_facts, make_private_dir
from skipsearch.core.machine import software_versions
from skipsearch.engine.code_cache import why_untrusted
from skipsearch.engine.native.build import NativeLibrary, cached_library
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.panels import (
    CACHE_LINE_BYTES,
    PanelEmbedding,
    PanelLinear,
    round_to_lines,
)
from skipsearch.engine.native.repack import warn_if_threads_spin
from skipsearch.errors import TokenizerWarning, UnpackedWeightsWarning
from skipsearch.models.adapter import ModelSpec
from skipsearch.models.families.decompose import Division, LayerKind, Multiplication, SoftCap
from skipsearch.models.fused.attention import Attention
from skipsearch.models.fused.fused_adapter import FusedAdapter, FusedFrom
from skipsearch.models.fused.mlp import (
    MLP,
    ClampedSwiGLU,
    GatedActivation,
    Routing,
    SharedExpert,
    gelu_tanh,
)
from skipsearch.models.fused.norms import RMSNorm
from skipsearch.models.fused.rope import RotaryAngles, RotaryTable
from skipsearch.models.loading.quantize import name_with_activations, split_activations
from skipsearch.models.loading.stored_tokenizer import StoredTokenizer, TokenizerParts, take_apart
from skipsearch.models.stored_checks import hash_own_code, load_check_result

SUFFIX = ".panels"
MAGIC = b"SSPANELS"
# Magic, bytes of the file, bytes of the structure, CRC-32 of the structure, CRC-32 of the tensors.
PREAMBLE = struct.Struct("<8sQQQQ")
TENSORS_ALIGNMENT = 4096
MIN_BYTES = 16 << 20  # smaller weights are packed in no time
SPARE_BYTES = 1 << 30  # that stay free on the disk
# Bytes of which one call computes a checksum. It runs without the lock of the interpreter, which
# making the tokenizer holds for a third of a second.
REGION_BYTES = 1 << 29
ABANDONED_S = 600.0  # since the last write to a temporary file, whose process has died

CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Attention,
        ClampedSwiGLU,
        Division,
        GatedActivation,
        LayerKind,
        MLP,
        ModelSpec,
        Multiplication,
        PanelEmbedding,
        RMSNorm,
        RotaryAngles,
        Routing,
        SharedExpert,
        SoftCap,
        F.silu,
        gelu_tanh,
        TokenizerParts,
        TokenizerWarning,
        UnpackedWeightsWarning,
    )
} | {("torch", "device"): torch.device}
STORED_WARNINGS = (TokenizerWarning, UnpackedWeightsWarning)  # that depend on the file alone


@dataclass(frozen=True)
class StoredWeights:
    """An entry of the cache."""

    path: Path
    model: str  # id
    n_bytes: int
    used_at: float  # seconds since the epoch


class WeightCache:
    """The packed weights that processes of this user have stored, in one folder.

    announce: is called with a sentence before an entry is written, and if it cannot be.
    """

    def __init__(self, announce: Callable[[str], None] = lambda sentence: None):
        self.folder, self.announce = cache_dir() / "weights", announce

    def list_entries(self) -> list[StoredWeights]:
        """Return the entries, that used longest ago first."""
        entries = list[StoredWeights]()
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may remove it
                status = path.stat()
                model = path.name.rsplit("@", 1)[0]
                entries.append(StoredWeights(path, model, status.st_size, status.st_mtime))
        return sorted(entries, key=lambda entry: entry.used_at)

    def remove_all(self) -> int:
        """Remove all entries and what killed processes left; return the bytes of the entries.

        A process that has mapped an entry keeps it until it ends. Raises: OSError.
        """
        entries = self.list_entries()
        for path in self.folder.glob(f".*{SUFFIX}.tmp"):
            path.unlink(missing_ok=True)
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        return sum(entry.n_bytes for entry in entries)

    def load(
        self,
        weights_sha256: str,
        dtype: torch.dtype,
        activations: str,
        read_origin: Callable[[], FusedFrom],
    ) -> NativeAdapter | None:
        """Return a stored model; None if it is not stored, or was not checked in this form.

        A damaged entry is removed. read_origin: as a fused model has it.
        """
        library = cached_library()
        if library is None or not self._is_trusted():
            return None
        matches = self.folder.glob(f"*@{_name_entry(weights_sha256, dtype, library)}")
        path = next(matches, None)
        entry = None if path is None else _MappedEntry.open(path)
        if path is None or entry is None:
            return None
        stored = entry.read_structure(library, activations)
        if stored is None:
            return None
        base, _ = split_activations(stored["spec"].quantization, None)
        spec = replace(stored["spec"], quantization=name_with_activations(str(base), activations))
        if load_check_result(replace(spec, engine="native"), library.sha256) is None:
            return None
        checksum = _Checksum(entry.memory, entry.start)
        parts = stored["tokenizer"]
        fused_model = FusedAdapter(
            spec,
            stored["embedding"],
            stored["layers"],
            {kind: RotaryTable(angles, None, spec) for kind, angles in stored["angles"]},
            stored["norm"],
            stored["head"],
            stored["logit_steps"],
            None if parts is None else StoredTokenizer(parts),
        )
        fused_model.read_origin = read_origin
        model = NativeAdapter(fused_model, library)
        if checksum.result() != entry.checksum:
            path.unlink(missing_ok=True)
            return None
        self._free_disk(0, path)
        with suppress(OSError):  # a folder that is for reading alone
            os.utime(path)
        for category, text in stored["warnings"]:
            warnings.warn(category(text), stacklevel=2)
        warn_if_threads_spin()
        return model

    def store(self, model: NativeAdapter, noted: list[Warning]) -> None:
        """Store a model that was loaded from files, unless it is small or has a part that cannot be
        stored. It takes the place of what other versions of the program stored of these files.

        noted: the warnings of the load. A full disk or a folder that cannot be written to is
        announced, and nothing is stored.
        """
        fused_model, spec = model.fused_model, model.fused_model.spec
        angles = [(kind, table.read_angles()) for kind, table in fused_model.rotary_tables.items()]
        if (
            spec.weights_sha256 is None
            or model.weight_bytes < MIN_BYTES
            or None in (computed for _, computed in angles)
        ):
            return
        tensors, tokenizer = _StoredTensors(), fused_model.tokenizer
        try:
            structure = tensors.pickle(
                {
                    "spec": replace(spec, sampling_defaults=dict(spec.sampling_defaults)),
                    "embedding": fused_model._embedding,
                    "layers": fused_model.layers,
                    "angles": angles,
                    "norm": fused_model.norm,
                    "head": fused_model.unembed,
                    "logit_steps": fused_model.logit_steps,
                    "tokenizer": tokenizer and take_apart(tokenizer),
                    "warnings": [
                        (type(note), str(note)) for note in noted if type(note) in STORED_WARNINGS
                    ],
                }
            )
        except pickle.PicklingError:  # a part of another kind, such as an activation
            return
        name = _name_entry(spec.weights_sha256, spec.dtype, model.library)
        model_name = re.sub(r"[^A-Za-z0-9._+-]", "_", spec.id)[:100]
        target = self.folder / f"{model_name}@{name}"
        try:
            make_private_dir(self.folder)
            if self._is_trusted():
                self._write(target, structure, tensors)
        except OSError as error:
            self.announce(
                f"the packed weights of {spec.id} are not stored in {self.folder} "
                f"({error.strerror or error}), so the next load packs them again: make room there, "
                "or set SKIPSEARCH_CACHE_DIR to a folder with room, or use --no-weight-cache"
            )

    def _write(self, target: Path, structure: bytes, tensors: _StoredTensors) -> None:
        """Write an entry, and remove older ones of the same files. Raises: OSError."""
        start = _round_up(PREAMBLE.size + len(structure))
        n_bytes = start + tensors.n_bytes
        self._free_disk(n_bytes, target)
        free = shutil.disk_usage(self.folder).free
        if free < n_bytes + SPARE_BYTES:
            raise OSError(
                f"they take {n_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free, of which "
                f"{SPARE_BYTES / 1e9:.2f} GB stay free"
            )
        self.announce(
            f"storing the packed weights ({n_bytes / 1e9:.2f} GB) in {self.folder}, once, so that "
            "this model loads faster from now on; --no-weight-cache stores nothing, and "
            "`skipsearch list models --remove` removes them"
        )
        temporary = target.with_name(f".{secrets.token_hex(6)}{SUFFIX}.tmp")
        try:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w+b") as file:
                file.write(bytes(PREAMBLE.size) + structure)
                file.seek(start)
                for part in tensors.parts():
                    file.write(part)
                file.flush()
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                    checksum = _Checksum(memory, start).result()
                sizes = n_bytes, len(structure)
                file.seek(0)
                file.write(PREAMBLE.pack(MAGIC, *sizes, zlib.crc32(structure), checksum))
            # Not flushed to the disk: the checksum shows what a crash of the system left out.
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink()
        files_and_dtype = target.name.rsplit("@", 1)[1].split(".")[0]
        for path in self.folder.glob(f"*@{files_and_dtype}.*{SUFFIX}"):
            if path != target:
                path.unlink(missing_ok=True)

    def _free_disk(self, n_bytes: int, needed: Path) -> None:
        """Remove entries, those used longest ago first, until so many bytes of the disk are free.

        needed: an entry that stays. What killed processes left is removed in any case.
        """
        with suppress(OSError):
            for path in self.folder.glob(f".*{SUFFIX}.tmp"):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink(missing_ok=True)
            for entry in self.list_entries():
                if shutil.disk_usage(self.folder).free >= n_bytes + SPARE_BYTES:
                    return
                if entry.path != needed:
                    entry.path.unlink(missing_ok=True)

    def _is_trusted(self) -> bool:
        """Return whether the folder exists, and no other user may write to it."""
        try:
            return why_untrusted(self.folder) is None
        except OSError:
            return False


class _StoredTensors:
    """The tensors of a structure, and where in the file they are stored."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._places: dict[tuple[Any, ...], tuple[int, Tensor]] = {}

    def place(self, tensor: Tensor) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
        """Return (offset, bytes, dtype, shape). Equal places of memory are stored once."""
        tensor = tensor.detach().contiguous()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
        if key not in self._places:
            self._places[key] = self.n_bytes, tensor
            self.n_bytes += round_to_lines(tensor.nbytes)
        return self._places[key][0], tensor.nbytes, tensor.dtype, tuple(tensor.shape)

    def pickle(self, structure: Any) -> bytes:
        """Return a structure as bytes. Raises: PicklingError for what is not of `CLASSES`."""
        buffer = io.BytesIO()
        _StructurePickler(buffer, self).dump(structure)
        return buffer.getvalue()

    def parts(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes of all tensors, each followed by its padding."""
        for _, tensor in self._places.values():
            yield tensor.flatten().view(torch.uint8).numpy().data
            yield bytes(-tensor.nbytes % CACHE_LINE_BYTES)


class _StructurePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: _StoredTensors):
        super().__init__(file, protocol=5)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        return self._tensors.place(obj) if isinstance(obj, Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is PanelLinear:  # without the library and the rounding of its inputs
            return PanelLinear, (
                obj.weight,
                obj.kinds,
                obj.bias,
                obj.shape,
                obj.interleave,
                obj.dtype,
            )
        if isinstance(obj, torch.dtype) or obj is PanelLinear:
            return NotImplemented
        if any(obj is known or type(obj) is known for known in CLASSES.values()):
            return NotImplemented
        raise pickle.PicklingError(f"a {type(obj).__name__} is not stored")


class _StructureUnpickler(pickle.Unpickler):
    """A reader of structures, which refuses every name that is not of `CLASSES`."""

    def __init__(self, data: bytes, tensors: Tensor, library: NativeLibrary, activations: str):
        super().__init__(io.BytesIO(data))
        self._tensors, self._library, self._activations = tensors, library, activations

    def persistent_load(self, pid: Any) -> Tensor:
        offset, n_bytes, dtype, shape = pid
        return self._tensors[offset : offset + n_bytes].view(dtype).view(shape)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (PanelLinear.__module__, PanelLinear.__qualname__):
            return partial(PanelLinear, activations=self._activations, library=self._library)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is not stored")


@dataclass(frozen=True)
class _MappedEntry:
    """The file of an entry, mapped for reading."""

    path: Path
    memory: mmap.mmap
    structure: bytes
    checksum: int  # of the tensors

    @classmethod
    def open(cls, path: Path) -> _MappedEntry | None:
        """Open an entry. If its length or its structure is damaged, remove it and return None."""
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # removed meanwhile; empty
            return None
        if len(memory) >= PREAMBLE.size:
            magic, n_bytes, structure_bytes, *checksums = PREAMBLE.unpack_from(memory)
            structure = memory[PREAMBLE.size : PREAMBLE.size + structure_bytes]
            known = magic, n_bytes, checksums[0]
            if known == (MAGIC, len(memory), zlib.crc32(structure)):
                return cls(path, memory, structure, checksums[1])
        path.unlink(missing_ok=True)
        return None

    @property
    def start(self) -> int:
        """The first byte of the tensors."""
        return _round_up(PREAMBLE.size + len(self.structure))

    def read_structure(self, library: NativeLibrary, activations: str) -> Any:
        """Return what was stored, with its tensors in the mapped memory.

        Return None, and remove the file, if it names what is not of `CLASSES`.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that cannot be written to
            memory = torch.frombuffer(self.memory, dtype=torch.uint8)
        tensors = memory[self.start :]
        try:
            return _StructureUnpickler(self.structure, tensors, library, activations).load()
        except pickle.UnpicklingError:
            self.path.unlink(missing_ok=True)
            return None


class _Checksum:
    """The checksum of a file's tensors, which threads compute while others run.

    This also reads the file before the first pass does.
    """

    def __init__(self, memory: mmap.mmap, start: int):
        view = memoryview(memory)
        self._executor = ThreadPoolExecutor(torch.get_num_threads())
        self._sums = [
            self._executor.submit(zlib.crc32, view[first : first + REGION_BYTES])
            for first in range(start, len(view), REGION_BYTES)
        ]

    def result(self) -> int:
        """Wait for the threads, and return the checksum."""
        with self._executor:
            sums = [region.result() for region in self._sums]
        return zlib.crc32(struct.pack(f"<{len(sums)}Q", *sums))


def _round_up(n_bytes: int) -> int:
    return -(-n_bytes // TENSORS_ALIGNMENT) * TENSORS_ALIGNMENT


def _name_entry(weights_sha256: str, dtype: torch.dtype, library: NativeLibrary) -> str:
    """Return the last part of an entry's name: the files and the dtype, then all other facts."""
    facts = [weights_sha256, str(dtype), library.sha256, hash_own_code(), software_versions()]
    dtype_name = str(dtype).removeprefix("torch.")
    return f"{weights_sha256[:16]}-{dtype_name}.{hash_facts(facts)[:32]}{SUFFIX}"
