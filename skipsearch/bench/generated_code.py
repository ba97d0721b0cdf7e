"""Run a program that a model wrote, in a child process with limits.

The child has a limit of CPU time, wall time, memory and file sizes, an empty folder, an empty
environment and no input. It has no network: on Linux in a network namespace of its own, and
everywhere through an audit hook that also refuses other processes, and files outside its folder.
An audit hook stops accidents, not an attacker. Use a container if the model is not trusted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

RUN_TIMEOUT_S = 10
CPU_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 1 << 30
FILE_LIMIT_BYTES = 1 << 20
CHILD = Path(__file__).with_name("run_limited.py")


def passes_tests(program: str) -> bool:
    """Return whether a program with its tests ends without an error, within the limits."""
    with tempfile.TemporaryDirectory(prefix="skipsearch-program-") as folder:
        Path(folder, "program.py").write_text(program, "utf-8", errors="replace")
        limits = map(str, (CPU_LIMIT_S, MEMORY_LIMIT_BYTES, FILE_LIMIT_BYTES))
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD), *limits],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return False
    return child.returncode == 0 and output.strip() == str(child.pid).encode()
