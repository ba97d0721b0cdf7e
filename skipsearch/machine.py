"""What this machine is: the facts about hardware and software that a measurement is worth nothing without."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from skipsearch.version import __version__


@dataclass(frozen=True)
class Machine:
    """kind: "cpu", "cuda" or "mps". count: devices used. threads: CPU threads of torch, None on a GPU."""

    kind: str
    name: str
    count: int
    threads: int | None

    @property
    def description(self) -> str:
        if self.kind != "cpu":
            return f"{self.count} × {self.name}"
        return f"{self.name}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def this_machine(device: torch.device) -> Machine:
    if device.type == "cuda":
        return Machine("cuda", torch.cuda.get_device_name(device), 1, None)
    if device.type == "mps":
        return Machine("mps", cpu_name(), 1, None)   # one chip, one name
    return Machine("cpu", cpu_name(), 1, torch.get_num_threads())


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "ignore").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def synchronise(device: torch.device) -> None:
    """Wait for what was asked of the device, so that a clock read behind it tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def software() -> dict[str, str | None]:
    return {"skipsearch": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None}


def source_commit() -> str | None:
    """Commit of the checkout this package runs from, with `-dirty` behind it where files differ; None outside a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=12"],
                                capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def busy_cores() -> float | None:
    """One-minute load average, to be said beside timings; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def cache_folder() -> Path:
    """What may be thrown away at any time: compiled code, latency tables."""
    chosen = os.environ.get("SKIPSEARCH_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipsearch"


def make_folder(folder: Path) -> None:
    """The folder, and whatever leads to it that is missing, for this user alone (mode 0700). Raises: OSError."""
    for part in reversed((folder, *folder.parents)):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)   # another process may make it at the same time


def write_whole(path: Path, data: bytes) -> None:
    """Made beside its place under a name of its own and moved there whole: no process sees a half, of its own or of another. For this
    user alone (mode 0600). Raises: OSError, and leaves what was there."""
    number, half = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".half", dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(half, path)
    except BaseException:
        os.unlink(half)
        raise
