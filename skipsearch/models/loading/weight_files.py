"""List the weight files of a model folder, check that they are complete, and hash them.

safetensors files are preferred. A PyTorch file (.bin) is a pickle, which can run code when it is
opened. torch unpickles it with `weights_only=True`, which builds tensors and plain containers and
rejects everything else, so that no code of the file runs."""

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

from safetensors import SafetensorError, safe_open

from skipsearch.errors import ModelError
from skipsearch.models.loading.file_hashes import hash_file
from skipsearch.models.third_party import first_line_of

OTHER_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5")
# Bytes of the dtypes of safetensors; the rest take one byte or less.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
OTHER_BYTES = {"C64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """The description of a tensor in the header of its file."""

    name: str
    shape: tuple[int, ...]
    bytes_per_value: int | None  # None for a float, which is converted to the requested dtype
    number_format: str = "float"  # such as bf16 or i32, in the words of its file

    @property
    def n_values(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.number_format.startswith(("f", "bf"))


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of config.json. Raises: ModelError."""
    path = folder / "config.json"
    if not path.is_file():
        where = name if name == str(folder) else f"{name}: {folder}"
        raise ModelError(
            f"{where} has no config.json, so it is no Hugging Face model folder: give the one that "
            "has it"
        )
    data = read_json(path, name, "download it again")
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ModelError(
            f"{name}: {path} names no model_type, so nothing says which family it is; "
            "take the config.json of the original model"
        )
    return data


def read_json(path: Path, name: str, way_out: str) -> Any:
    """Parse a JSON file of a model. Raises: ModelError, whose message ends in `way_out`."""
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ModelError(f"{name}: {path} is nested too deep to be read; {way_out}") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{name}: {path} is not readable JSON ({error}); {way_out}") from None


def list_weight_files(folder: Path, name: str) -> list[Path]:
    """Return the weight files in order, all of one format.

    Raises: ModelError if there are none, or some are missing.
    """
    _reject_ambiguous(folder, name)
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index, single = folder / f"{stem}.index.json", folder / stem
        if index.is_file():
            files = [folder / shard for shard in _read_index(index)]
            break
        if single.is_file():
            return [single]
    else:
        raise ModelError(f"{name}: {_describe_missing(folder)}")
    if any(path.suffix != Path(stem).suffix for path in files):
        raise ModelError(
            f"{index} is not a readable index of the weight files beside it; download it again"
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{name}: {folder} lacks {missing[0]}{more} of the {len(files)} weight files that its "
            "index lists: "
            "the download is not complete, run it again"
        )
    return files


def list_stored_tensors(files: list[Path]) -> Iterator[StoredTensor]:
    """Yield every tensor that the headers describe, without reading any weight.

    Raises: ModelError if a file is damaged or cut short.
    """
    for path in files:
        with path.open("rb") as file:
            if file.read(8) == b"version ":
                raise ModelError(
                    f"{path} is a Git LFS pointer and not the weights: run `git lfs pull` in that "
                    "folder"
                )
        yield from (
            _read_pickle_tensors(path) if path.suffix == ".bin" else _read_safetensors(path)
        )


def _read_safetensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file. Raises: ModelError if it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:  # its text may quote the file
        raise ModelError(
            f"{path} is cut short or damaged ({path.stat().st_size} bytes): delete it and "
            "download it again"
        ) from None
    return [
        StoredTensor(
            name,
            tuple(entry.get_shape()),
            None if (dtype := entry.get_dtype()) in FLOAT_BYTES else OTHER_BYTES.get(dtype, 1),
            dtype.lower(),
        )
        for name, entry in slices.items()
    ]


def _read_pickle_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a PyTorch file.

    Raises: ModelError if the file is damaged or holds more than tensors.
    """
    import torch

    try:
        state_dict = torch.load(
            path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError:
        # torch's own message is not shown, because it begins with how to run the code anyway.
        raise ModelError(
            f"{path} is a pickle that holds more than tensors, and could run code if it were "
            "opened: it was not; take a "
            "revision that has safetensors"
        ) from None
    except Exception as error:  # torch raises various errors for damaged files
        raise ModelError(
            f"{path} is cut short or damaged ({first_line_of(error)}): delete it and download it "
            "again"
        ) from None
    if not isinstance(state_dict, dict) or not all(
        isinstance(weight, torch.Tensor) for weight in state_dict.values()
    ):
        raise ModelError(f"{path} holds no table of weights: take the file of the original model")
    for name, weight in state_dict.items():
        n_bytes = None if weight.is_floating_point() else weight.itemsize
        number_format = str(weight.dtype).removeprefix("torch.")
        yield StoredTensor(str(name), tuple(weight.shape), n_bytes, number_format)


def hash_weight_files(files: list[Path]) -> str:
    """Return the SHA-256 over the names and SHA-256 sums of the weight files.

    A file of the Hub's cache is a link to a blob whose name is its sum, so it need not be read.
    """
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for path, blob in zip(files, pool.map(_hash_file, files), strict=True):
            total.update(f"{path.name} {blob}\n".encode())
    return total.hexdigest()


def hash_config(config: Any) -> str:
    """Return the SHA-256 of the config without keys that do not change the function.

    These are paths, versions, dtype, cache use, and quantization, which a profile names
    separately.
    """
    ignored = {
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "architectures",
        "quantization_config",
    }

    def canonical(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(k): canonical(v)
                for k, v in value.items()
                if k not in ignored and not str(k).startswith("_")
            }
        return [canonical(v) for v in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(
        json.dumps(canonical(config.to_dict()), sort_keys=True, default=str).encode()
    ).hexdigest()


def _read_index(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if not shards or any(Path(shard).name != shard for shard in shards):
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError):
        raise ModelError(
            f"{index} is not a readable index of the weight files beside it; download it again"
        ) from None
    return shards


def _reject_ambiguous(folder: Path, name: str) -> None:
    """Reject files that transformers would load instead of the listed ones, or in addition."""
    shard = next((path.name for path in folder.glob("shard-*.safetensors")), None)
    if shard is not None:
        raise ModelError(
            f"{name}: {folder} holds a distributed checkpoint ({shard}), which is not read: load "
            "the model with transformers "
            "once and save_pretrained it into another folder"
        )
    if (folder / "adapter_config.json").is_file() and find_spec("peft") and _has_weights(folder):
        raise ModelError(
            f"{name}: {folder} holds an adapter beside a whole model: merge it (peft: "
            "merge_and_unload) and save that, or "
            "remove adapter_config.json"
        )


def _has_weights(folder: Path) -> bool:
    return any(
        (folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json")
    )


def _describe_missing(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds an adapter and not a whole model: merge it into its base (peft: "
            "merge_and_unload) and save that"
        )
    other = next(
        (path.name for pattern in OTHER_WEIGHT_PATTERNS for path in sorted(folder.glob(pattern))),
        None,
    )
    problem = f"holds its weights under another name ({other})" if other else "has no weights"
    return (
        f"{folder} {problem}; read are model.safetensors and pytorch_model.bin, in one file or "
        "several with an index: take a revision "
        "that has them, or load the model with transformers once and save_pretrained it"
    )


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file: the blob's name if it is a link to the Hub's cache."""
    target = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", target.name) and _is_hub_blob(target):
        return target.name
    return hash_file(target)


def _is_hub_blob(target: Path) -> bool:
    """Return whether a file is a blob in the Hub's cache, which is named by its hash."""
    from huggingface_hub import constants

    blobs = target.parent
    return (
        blobs.name == "blobs"
        and blobs.parent.name.startswith("models--")
        and blobs.parent.parent == Path(constants.HF_HUB_CACHE).expanduser().resolve()
    )
