"""The git command, run so that neither the caller's surroundings nor a hostile server can make it do more than was asked.

No hooks, no prompts, no protocols but https, ssh and file. What a server can still do is send much, for long: every file that git
writes is capped by the operating system, and its time by a deadline.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from skipsearch.errors import ProfileError
from skipsearch.strict_yaml import printable

MAX_FILE_BYTES = 64 * 1024 * 1024  # of anything git writes: a pack, a listing
TIMEOUT_SECONDS = 300
_KEPT = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM", "GIT_ASKPASS")
_SETTINGS = {
    "core.hooksPath": os.devnull, "fetch.recurseSubmodules": "false", "gc.auto": "0", "maintenance.auto": "false",
    "core.bigFileThreshold": "1m",  # larger blobs go to disk as they come, not through memory
    "fetch.unpackLimit": "1",       # one pack, which the cap on a file then bounds
    "http.lowSpeedLimit": "1000", "http.lowSpeedTime": "30"}


def run_git(arguments: list[str], repository: Path | None = None, stdin: bytes = b"",
            way_out: str = "check the address, the @ref and your access") -> bytes:
    """Run git with nothing of the caller's repository, hooks or prompts around it; its output. way_out: what to do if it fails.

    Raises: ProfileError if git is missing, fails, takes longer than the deadline or writes a file beyond the cap.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in _KEPT}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:file", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
    environment.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
    command = ["git", *(part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")), *arguments]
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(stdin)
        source.seek(0)
        try:
            process = subprocess.Popen(command, cwd=repository, env=environment, stdin=source, stdout=output, stderr=errors,
                                       start_new_session=True, preexec_fn=_cap_files)
        except FileNotFoundError:
            raise ProfileError("git is not installed, and pulling profiles needs it; install git") from None
        try:
            status = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ProfileError(f"git {arguments[0]} took longer than {TIMEOUT_SECONDS} seconds; try again later") from None
        finally:
            if process.returncode is None:  # the deadline, or Ctrl-C: git's own children must go too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            raise ProfileError(_failure(arguments[0], status, errors, way_out))
        output.seek(0)
        return output.read()


def _cap_files() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # git then says that a file is too large, instead of dying silently
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def _failure(verb: str, status: int, errors: IO[bytes], way_out: str) -> str:
    errors.seek(0)
    said = errors.read(16 * 1024).decode("utf-8", "replace")
    if os.strerror(errno.EFBIG) in said:
        return f"the repository sends more than {MAX_FILE_BYTES // 1024**2} MiB for one commit, which no profiles need"
    lines = [line for line in said.splitlines() if line.startswith(("fatal:", "error:"))] or said.splitlines()[-1:]
    reason = printable(lines[0].partition(": ")[2] or lines[0], 200) if lines else f"exit status {status}"
    return f"git {verb} failed: {reason}; {way_out}"
