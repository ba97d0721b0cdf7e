"""Choose device and dtype of a model, and check that it fits before its weights are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipsearch.core.registry import unknown_name
from skipsearch.errors import ModelError
from skipsearch.models.loading.quantize import bytes_per_value
from skipsearch.models.loading.weight_files import StoredTensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Placement:
    """The device or devices of a model."""

    device: torch.device  # of the first layer
    multi_gpu: bool = False  # layers are spread over all GPUs, because one GPU cannot hold them


def pick_device(name: str) -> torch.device:
    """Return a device by name. auto: a CUDA GPU if there is one, or the CPU. Raises: ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(
            f"there is no device called {name!r}; use auto, cpu, cuda, cuda:N or mps"
        ) from None
    if device.type not in {"cpu", "cuda", "mps"}:
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda, cuda:N or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(
            f"device {name} was asked for, and torch sees no GPU of Apple's here; use --device cpu"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device {name} was asked for and torch sees no GPU here; use --device cpu, or a CUDA "
            "build of torch"
        )
    if (
        device.type == "cuda"
        and device.index is not None
        and device.index >= torch.cuda.device_count()
    ):
        raise ModelError(
            f"there is no {name}: this machine has {torch.cuda.device_count()} GPU(s), counted "
            "from cuda:0"
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a dtype by name. Raises: ModelError.

    auto: float32 on a CPU, bfloat16 on a GPU, float16 if the GPU does not support bfloat16.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        if device.type == "mps":
            return torch.bfloat16
        return (
            torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        )
    if name not in DTYPES:
        raise ModelError(f"{unknown_name('dtype', name, DTYPES)}; or auto")
    if name == "float64" and device.type == "mps":
        raise ModelError(
            "dtype float64 was asked for, and Apple's GPUs have none; use float32 or --device cpu"
        )
    return DTYPES[name]


def choose_placement(
    name: str,
    tensors: Sequence[StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
) -> Placement:
    """Choose a placement that the weights fit: the device, or all GPUs.

    All GPUs are used only if the device is `cuda` without a number. Raises: ModelError if the
    weights fit nowhere.
    """
    needed = compute_weight_bytes(tensors, dtype, quantization)
    if device.type in ("cpu", "mps"):  # Apple's GPU has no memory of its own
        devices, free = [device], [available_host_memory()]
    else:
        devices = (
            [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            if device.index is None
            else [device]
        )
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in devices]
    if needed < max(free):
        return Placement(devices[free.index(max(free))])
    if len(free) > 1 and needed < sum(free):
        return Placement(devices[0], multi_gpu=True)
    supply = (
        f"{len(free)} GPUs have {in_gb(sum(free))} free together"
        if len(free) > 1
        else _describe_free(devices[0], free[0])
    )
    raise ModelError(
        f"{name} needs {_describe_need(tensors, dtype, quantization)} and {supply}: "
        f"{_suggest_smaller(tensors, device, dtype, quantization, sum(free))}"
    )


def out_of_memory(
    name: str,
    tensors: Sequence[StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    free: int,
) -> str:
    """Return the error sentence for a model that ran out of memory during loading.

    tensors: the model's weights; empty if not known yet. free: free bytes at the time.
    """
    supply = _describe_free(device, free)
    if not tensors:
        return (
            f"{name} ran out of memory before its weights were read, {supply}: end other programs, "
            "or use a larger machine"
        )
    return (
        f"{name} ran out of memory while it was loaded: it needs "
        f"{_describe_need(tensors, dtype, quantization)}, and room to work beside them, "
        f"and {supply}: {_suggest_smaller(tensors, device, dtype, quantization, free)}"
    )


def _describe_need(
    tensors: Sequence[StoredTensor], dtype: torch.dtype, quantization: str | None
) -> str:
    number_format = quantization or str(dtype).removeprefix("torch.")
    size = in_gb(compute_weight_bytes(tensors, dtype, quantization))
    return f"{size} for its weights as {number_format}"


def _describe_free(device: torch.device, free: int) -> str:
    return f"{device if device.type == 'cuda' else 'this machine'} has {in_gb(free)} free"


def in_gb(size: float) -> str:
    """Return a size in bytes as `0.5 GB`, or as `39 MB` if it would round to 0.0 GB."""
    return (
        f"{size / BYTES_PER_GB:.1f} GB"
        if size >= BYTES_PER_GB / 10 or not size
        else f"{size / 1e6:.0f} MB"
    )


def compute_weight_bytes(
    tensors: Iterable[StoredTensor], dtype: torch.dtype, quantization: str | None
) -> int:
    """Return the bytes of the weights after loading.

    Floats are counted as `dtype` or quantised, other tensors as stored.
    """
    return int(
        sum(
            t.n_values * (t.bytes_per_value or bytes_per_value(t, dtype, quantization))
            for t in tensors
        )
    )


def available_host_memory() -> int:
    """Return the bytes of memory that this process may still allocate.

    This is the minimum of the machine's free memory and the limits of the control group and `ulimit
    -v`.
    """
    import psutil  # type: ignore[import-untyped]

    available = min(int(psutil.virtual_memory().available), _address_space())
    group = Path("/sys/fs/cgroup")
    try:
        return min(
            available,
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()),
        )
    except (OSError, ValueError):  # no control group, or its limit is "max"
        return available


def _address_space() -> int:
    """Return the remaining bytes under `ulimit -v`; `sys.maxsize` without a limit."""
    try:
        import resource
    except ImportError:  # Windows has none
        return sys.maxsize
    import psutil

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return (
        sys.maxsize
        if limit == resource.RLIM_INFINITY
        else max(0, limit - int(psutil.Process().memory_info().vms))
    )


def reject_offload(name: str, device_map: Mapping[str, Any]) -> None:
    """Raise ModelError if accelerate left a part of a GPU's model on the CPU or on disk.

    Timings would then measure transfers.
    """
    outside = sorted(part for part, device in device_map.items() if str(device) in {"cpu", "disk"})
    if 0 < len(outside) < len(device_map):
        raise ModelError(
            f"{name} does not fit on the GPUs: {len(outside)} of its parts ({outside[0]} first) "
            "would stay on the CPU or on disk, which is refused, since timings would measure the "
            "bus; use a smaller dtype, a quantization or --device cpu"
        )


def _suggest_smaller(
    tensors: Sequence[StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    free_bytes: int,
) -> str:
    smaller: dict[str, int] = {}  # bytes by option
    if quantization is None and dtype.itemsize > 2:
        smaller["--dtype bfloat16"] = compute_weight_bytes(tensors, torch.bfloat16, None)
    if quantization is None and device.type == "cuda":
        name = "bitsandbytes-4bit"
        smaller[f"--quantization {name}"] = compute_weight_bytes(tensors, dtype, name)
    for option, needed in smaller.items():
        if needed < free_bytes:
            return f"{option} needs {in_gb(needed)}"
    return "use a larger machine or a smaller model"
