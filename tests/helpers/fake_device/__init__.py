"""A device that this machine does not have, imitated: `away` keeps its memory apart from the CPU's
as a GPU does.

Its operators are the CPU's own, so its results are the CPU's. What a GPU refuses, it refuses: an
operator over tensors of two devices. What only a GPU can show, its kernels and its time, it cannot.
"""

from __future__ import annotations

import types
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def register_device() -> Any:
    """Make the device `away` known to torch, in this process and for good. Needs a C++ compiler;
    the first build takes a minute or two.

    Returns the extension, whose `fetched()` is how often a value was read off the device until now,
    which a GPU's host waits for."""
    from torch.utils.cpp_extension import load

    built: Any = load(
        "skipsearch_away", [str(Path(__file__).with_name("away.cpp"))], extra_cflags=["-O1"]
    )
    torch.utils.rename_privateuse1_backend("away")
    built.begin()
    module = types.ModuleType("away")
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
    }.items():
        setattr(module, name, lambda answer=answer: answer)
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module("away", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return built
