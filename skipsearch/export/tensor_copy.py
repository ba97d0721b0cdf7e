"""Copy tensors from one checkpoint to another under new names, with one shard in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skipsearch.errors import ExportError
from skipsearch.models.loading.weight_files import FLOAT_BYTES, OTHER_BYTES

SHARD_BYTES = 2_000_000_000  # of tensors held in memory at once
# safetensors' name of a dtype -> bytes of a value; all other dtypes have one byte.
VALUE_BYTES = FLOAT_BYTES | OTHER_BYTES


def copy_weights(
    files: list[Path],
    rename_tensor: Callable[[str], str | None],
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write the tensors of `files` to `folder` under new names, in their stored dtype.

    rename_tensor: stored name -> new name; None leaves a tensor out. progress(done, total): bytes.

    Raises: ExportError if the disk has too little space, or a file cannot be read or written.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, tuple[Path, str]] = {}
    try:
        for path in files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  (not a dict)
                    if (new := rename_tensor(name)) is not None:
                        part = stored.get_slice(name)
                        sizes[new] = prod(part.get_shape()) * VALUE_BYTES.get(part.get_dtype(), 1)
                        origin[new] = path, name
        total, done = sum(sizes.values()), 0
        _require_free_space(total, folder)
        plan = split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            max_shard_size=SHARD_BYTES,
            filename_pattern="model{suffix}.safetensors",
        )
        for shard, names in plan.filename_to_tensors.items():
            _write_shard(folder / shard, {name: origin[name] for name in names})
            done += sum(sizes[name] for name in names)
            progress(done, total)
    except SafetensorError as error:
        raise ExportError(
            f"a weight file cannot be copied ({error}): check the model's files and the room on "
            "the disk"
        ) from None
    if plan.is_sharded:
        index = {
            "metadata": plan.metadata,
            "weight_map": dict(sorted(plan.tensor_to_filename.items())),
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", "utf-8"
        )


def _write_shard(path: Path, tensors: dict[str, tuple[Path, str]]) -> None:
    loaded: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in tensors.values()}):
        with safe_open(file, framework="pt") as stored:
            loaded |= {
                new: stored.get_tensor(old)
                for new, (origin, old) in tensors.items()
                if origin == file
            }
    save_file(loaded, path, metadata={"format": "pt"})
    # safetensors creates files that only their owner may read.
    shutil.copymode(path.with_name("config.json"), path)


def _require_free_space(needed_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ExportError(
            f"the draft's weights take {needed_bytes / 1e9:.1f} GB and the disk of "
            f"{folder.parent.parent} has {free_bytes / 1e9:.1f} GB "
            "free: make room there, or choose another --out"
        )
