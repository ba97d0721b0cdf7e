"""Describe this machine: the hardware and software that a measurement depends on."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from skipsearch import __version__

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Machine:
    """The hardware that a model runs on.

    kind: "cpu", "cuda" or "mps".
    count: devices used.
    threads: CPU threads of torch; None on a GPU.
    """

    kind: str
    name: str
    count: int
    threads: int | None

    @property
    def description(self) -> str:
        """The machine in words, such as `AMD EPYC 7B13, 2 threads`."""
        if self.kind != "cpu":
            return f"{self.count} × {self.name}"
        return f"{self.name}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def describe_machine(device: torch.device) -> Machine:
    """Return the hardware of a device."""
    import torch

    if device.type == "cuda":
        return Machine("cuda", torch.cuda.get_device_name(device), 1, None)
    if device.type == "mps":
        return Machine("mps", read_cpu_name(), 1, None)  # one chip, one name
    return Machine("cpu", read_cpu_name(), 1, torch.get_num_threads())


def read_cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "ignore").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work, so that a clock read next is right."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def software_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that a measurement depends on."""
    import torch

    return {
        "skipsearch": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),  # an import takes a second
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def source_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with `-dirty` if files differ.

    None outside a checkout.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            [
                "git",
                "-C",
                str(root),
                "describe",
                "--always",
                "--dirty",
                "--exclude",
                "*",
                "--abbrev=12",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def load_average() -> float | None:
    """Return the one-minute load average; None if the platform does not report it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
