"""Where a model goes and as what: device, dtype, and whether it fits there, asked before anything large is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipsearch.errors import ModelError
from skipsearch.models.files import Stored
from skipsearch.models.quantize import bytes_per_value
from skipsearch.names import unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
GB = 1e9


@dataclass(frozen=True)
class Placement:
    """device: where the model starts. spread: its layers go over every GPU, since one does not hold them."""

    device: torch.device
    spread: bool = False


def pick_device(name: str) -> torch.device:
    """auto is a GPU of CUDA if there is one, else the CPU. Raises: ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no device called {name!r}; use auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in {"cpu", "cuda", "mps"}:
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda, cuda:N or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {name} was asked for, and torch sees no GPU of Apple's here; use --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for and torch sees no GPU here; use --device cpu, or a CUDA build of torch")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ModelError(f"there is no {name}: this machine has {torch.cuda.device_count()} GPU(s), counted from cuda:0")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is float32 on a CPU, and on a GPU bfloat16, or float16 where the GPU is too old for that. Raises: ModelError."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        if device.type == "mps":
            return torch.bfloat16
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if name not in DTYPES:
        raise ModelError(f"{unknown('dtype', name, DTYPES)}; or auto")
    if name == "float64" and device.type == "mps":
        raise ModelError("dtype float64 was asked for, and Apple's GPUs have none; use float32 or --device cpu")
    return DTYPES[name]


def place(name: str, tensors: Sequence[Stored], device: torch.device, dtype: torch.dtype, quantization: str | None) -> Placement:
    """Where the weights fit: on the device, or over all GPUs where `cuda` names none. Raises: ModelError, before loading them."""
    needed = weight_bytes(tensors, dtype, quantization)
    if device.type in ("cpu", "mps"):   # Apple's GPU has no memory of its own
        places, free = [device], [host_memory()]
    else:
        places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.index is None else [device]
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in places]
    if needed < max(free):
        return Placement(places[free.index(max(free))])
    if len(free) > 1 and needed < sum(free):
        return Placement(places[0], spread=True)
    room = f"{sum(free) / GB:.1f} GB free"
    one = str(places[0]) if device.type == "cuda" else "this machine"
    has = f"{one} has {room}" if len(free) == 1 else f"{len(free)} GPUs have {room} together"
    kind = quantization or str(dtype).removeprefix("torch.")
    raise ModelError(f"{name} needs {needed / GB:.1f} GB for its weights as {kind} and {has}: "
                     f"{_way_out(tensors, device, dtype, quantization, sum(free))}")


def weight_bytes(tensors: Iterable[Stored], dtype: torch.dtype, quantization: str | None) -> int:
    """Bytes of the weights once loaded: floats as `dtype` or quantised, the rest as stored."""
    return int(sum(t.values * (t.bytes_per_value or bytes_per_value(t, dtype, quantization)) for t in tensors))


def host_memory() -> int:
    """Bytes that this process may still take: what the machine has left, or what its control group has if that is less."""
    import psutil  # type: ignore[import-untyped]

    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        return min(available, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return available


def refuse_offload(name: str, device_map: Mapping[str, Any]) -> None:
    """Raises: ModelError if accelerate left a part of a GPU's model on the CPU or on disk: timings would measure the bus."""
    outside = sorted(part for part, where in device_map.items() if str(where) in {"cpu", "disk"})
    if 0 < len(outside) < len(device_map):
        raise ModelError(f"{name} does not fit on the GPUs: {len(outside)} of its parts ({outside[0]} first) would stay on the "
                         "CPU or on disk, which is refused, since timings would measure the bus; use a smaller dtype, a "
                         "quantization or --device cpu")


def _way_out(tensors: Sequence[Stored], device: torch.device, dtype: torch.dtype, quantization: str | None, free: int) -> str:
    if quantization is None:
        smaller = [("--dtype bfloat16", weight_bytes(tensors, torch.bfloat16, None))] if dtype.itemsize > 2 else []
        if device.type == "cuda":
            smaller.append(("--quantization bitsandbytes-4bit", weight_bytes(tensors, dtype, "bitsandbytes-4bit")))
        for option, needed in smaller:
            if needed < free:
                return f"{option} needs {needed / GB:.1f} GB"
    return "use a larger machine or a smaller model"
