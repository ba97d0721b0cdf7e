"""What lies in a model folder: which weight files there are, whether they are whole, how large they are, and their hash.

safetensors is read where there is one. A PyTorch file (.bin) is a pickle, which can run code when it is opened: torch unpickles it with
`weights_only=True`, which builds tensors and plain containers and refuses everything else, so that no code of the file runs.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.telling import in_short

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5")
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
OTHERS = {"C64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # anything else takes one byte, or less
LARGEST_HEADER = 100_000_000  # bytes; safetensors itself reads no larger one


@dataclass(frozen=True)
class Stored:
    """A tensor as its file's header announces it. bytes_per_value: None for a float, which is loaded as the dtype asked for."""

    name: str
    shape: tuple[int, ...]
    bytes_per_value: int | None

    @property
    def values(self) -> int:
        return prod(self.shape)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json as it stands. Raises: ModelError."""
    path = folder / "config.json"
    if not path.is_file():
        where = name if name == str(folder) else f"{name}: {folder}"
        raise ModelError(f"{where} has no config.json, so it is no Hugging Face model folder: give the one that has it")
    data = read_json(path, name, "download it again")
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ModelError(f"{name}: {path} names no model_type, so nothing says which family it is; "
                         "take the config.json of the original model")
    return data


def read_json(path: Path, name: str, way_out: str) -> Any:
    """What a JSON file of a model holds. Raises: ModelError, ending in `way_out`."""
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ModelError(f"{name}: {path} is nested too deep to be read; {way_out}") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{name}: {path} is not readable JSON ({error}); {way_out}") from None


def weight_files(folder: Path, name: str) -> list[Path]:
    """The files that make up the model, in order, all of one format. Raises: ModelError if there are none or some are missing."""
    _refuse_others(folder, name)
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index, single = folder / f"{stem}.index.json", folder / stem
        if index.is_file():
            files = [folder / shard for shard in _shards(index)]
            break
        if single.is_file():
            return [single]
    else:
        raise ModelError(f"{name}: {_no_weights(folder)}")
    if any(path.suffix != Path(stem).suffix for path in files):
        raise ModelError(f"{index} is not a readable index of the weight files beside it; download it again")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{name}: {folder} lacks {missing[0]}{more} of the {len(files)} weight files that its index lists: "
                         "the download is not complete, run it again")
    return files


def stored_tensors(files: list[Path]) -> Iterator[Stored]:
    """Every tensor that the headers announce; no weight is read. Raises: ModelError if a file is damaged or cut short."""
    for path in files:
        if path.suffix == ".bin":
            yield from _unpickled(path)
            continue
        for name, entry in _header(path).items():
            yield Stored(name, tuple(entry["shape"]), None if entry["dtype"] in FLOATS else OTHERS.get(entry["dtype"], 1))


def _unpickled(path: Path) -> Iterator[Stored]:
    """Raises: ModelError for a file that is damaged, or holds more than tensors."""
    import torch

    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer and not the weights: run `git lfs pull` in that folder")
    try:
        found = torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:   # torch names what it refused in several lines, the first ones how to run it after all
        raise ModelError(f"{path} is a pickle that holds more than tensors, and could run code if it were opened: it was not; take a "
                         "revision that has safetensors") from None
    except Exception as error:   # torch has a kind for each way a file can be broken
        raise ModelError(f"{path} is cut short or damaged ({in_short(error)}): delete it and download it again") from None
    if not isinstance(found, dict) or not all(isinstance(weight, torch.Tensor) for weight in found.values()):
        raise ModelError(f"{path} holds no table of weights: take the file of the original model")
    for name, weight in found.items():
        yield Stored(str(name), tuple(weight.shape), None if weight.is_floating_point() else weight.itemsize)


def weights_hash(files: list[Path]) -> str:
    """sha256 over the names and sha256 sums of the weight files.

    A file of the Hub's cache is a link to a blob that is named by its own sum, so nothing large is read there.
    """
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for path, blob in zip(files, pool.map(_sha256, files), strict=True):
            total.update(f"{path.name} {blob}\n".encode())
    return total.hexdigest()


def config_hash(config: Any) -> str:
    """sha256 of the canonical config without what does not change the function: paths, versions, dtype, cache use.

    Nor is quantization part of it: a profile names that by itself.
    """
    ignored = {"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "quantization_config"}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): kept(v) for k, v in value.items() if k not in ignored and not str(k).startswith("_")}
        return [kept(v) for v in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(json.dumps(kept(config.to_dict()), sort_keys=True, default=str).encode()).hexdigest()


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if not shards or any(Path(shard).name != shard for shard in shards):
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError):
        raise ModelError(f"{index} is not a readable index of the weight files beside it; download it again") from None
    return shards


def _refuse_others(folder: Path, name: str) -> None:
    """transformers would take these in the place of the files that were looked at, or add them to what those hold."""
    shard = next((path.name for path in folder.glob("shard-*.safetensors")), None)
    if shard is not None:
        raise ModelError(f"{name}: {folder} holds a distributed checkpoint ({shard}), which is not read: load the model with transformers "
                         "once and save_pretrained it into another folder")
    if (folder / "adapter_config.json").is_file() and find_spec("peft") and _has_weights(folder):
        raise ModelError(f"{name}: {folder} holds an adapter beside a whole model: merge it (peft: merge_and_unload) and save that, or "
                         "remove adapter_config.json")


def _has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json"))


def _no_weights(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter and not a whole model: merge it into its base (peft: merge_and_unload) and save that"
    other = next((path.name for pattern in OTHER_WEIGHTS for path in sorted(folder.glob(pattern))), None)
    found = f"holds its weights under another name ({other})" if other else "has no weights"
    return (f"{folder} {found}; read are model.safetensors and pytorch_model.bin, in one file or several with an index: take a revision "
            "that has them, or load the model with transformers once and save_pretrained it")


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer and not the weights: run `git lfs pull` in that folder")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ModelError(f"{path} is cut short or damaged ({size} bytes): delete it and download it again")
        text = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = 8 + length + max(map(_end, entries.values()), default=0)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelError(f"{path} is damaged, its header cannot be read: delete it and download it again") from None
    if end != size:
        raise ModelError(f"{path} has {size} bytes and its header announces {end}: the download was cut short or the file is "
                         "damaged, delete it and download it again")
    return entries


def _end(entry: dict[str, Any]) -> int:
    """Where a tensor's bytes end. Raises: ValueError, KeyError or TypeError for an entry that describes no tensor."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end)):
        raise ValueError
    width = FLOATS.get(dtype) or OTHERS.get(dtype)
    if start > end or (width is not None and prod(shape) * width != end - start):
        raise ValueError
    return int(end)


def _sha256(path: Path) -> str:
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob):
        return blob
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
