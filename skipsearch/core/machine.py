"""What this machine is: the facts about hardware and software that a measurement is worth nothing
without.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skipsearch import __version__

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Machine:
    """kind: "cpu", "cuda" or "mps". count: devices used. threads: CPU threads of torch, None on a
    GPU.
    """

    kind: str
    name: str
    count: int
    threads: int | None

    @property
    def description(self) -> str:
        if self.kind != "cpu":
            return f"{self.count} × {self.name}"
        return f"{self.name}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def describe_machine(device: torch.device) -> Machine:
    import torch

    if device.type == "cuda":
        return Machine("cuda", torch.cuda.get_device_name(device), 1, None)
    if device.type == "mps":
        return Machine("mps", read_cpu_name(), 1, None)  # one chip, one name
    return Machine("cpu", read_cpu_name(), 1, torch.get_num_threads())


def read_cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "ignore").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work, so that a clock that is read next is right."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def software_versions() -> dict[str, str | None]:
    import torch
    import transformers

    return {
        "skipsearch": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def source_commit() -> str | None:
    """Commit of the checkout this package runs from, with `-dirty` behind it where files differ;
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
    """One-minute load average, to be said beside timings; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
