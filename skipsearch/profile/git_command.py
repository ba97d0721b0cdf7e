"""Run git safely, whatever the environment says and the server sends.

Hooks and prompts are off, and only the protocols https, ssh and file are allowed. A server could
still send too much or too slowly. The operating system therefore limits the size of every file that
git writes, and a timeout limits its time.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from skipsearch.core.strict_yaml import make_printable
from skipsearch.errors import ProfileError

MAX_FILE_BYTES = 64 * 1024 * 1024  # of any file that git writes: a pack, a listing
TIMEOUT_S = 300
_PASSED_VARIABLES = (
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_SSL_CAINFO",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_ASKPASS",
)
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "core.bigFileThreshold": "1m",  # larger blobs go to disk without passing through memory
    "fetch.unpackLimit": "1",  # always one pack, so that the limit on files bounds it
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "30",
}


def run_git(
    arguments: list[str],
    repository: Path | None = None,
    stdin: bytes = b"",
    way_out: str = "check the address, the @ref and your access",
) -> bytes:
    """Run git without the caller's repository, hooks or prompts; return its output.

    way_out: advice if it fails. Raises: ProfileError if git is missing, fails, takes longer than
    TIMEOUT_S or writes a file larger than MAX_FILE_BYTES.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key in _PASSED_VARIABLES
    }
    environment |= {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "LC_ALL": "C",
    }
    environment.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
    command = [
        "git",
        *(part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")),
        *arguments,
    ]
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        source.write(stdin)
        source.seek(0)
        try:
            process = subprocess.Popen(
                command,
                cwd=repository,
                env=environment,
                stdin=source,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                preexec_fn=_limit_file_size,
            )
        except FileNotFoundError:
            raise ProfileError(
                "git is not installed, and pulling profiles needs it; install git"
            ) from None
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProfileError(
                f"git {arguments[0]} took longer than {TIMEOUT_S} seconds; try again later"
            ) from None
        finally:
            if process.returncode is None:  # timeout or Ctrl-C: end git's children too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            raise ProfileError(_failure_message(arguments[0], status, errors, way_out))
        output.seek(0)
        return output.read()


def _limit_file_size() -> None:
    import resource

    # With the signal ignored, git reports that a file is too large instead of dying silently.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def _failure_message(verb: str, status: int, errors: IO[bytes], way_out: str) -> str:
    errors.seek(0)
    output = errors.read(16 * 1024).decode("utf-8", "replace")
    if os.strerror(errno.EFBIG) in output:
        return (
            f"the repository sends more than {MAX_FILE_BYTES // 1024**2} MiB for one commit, which "
            "no profiles need"
        )
    lines = output.splitlines()
    lines = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines[-1:]
    reason = f"exit status {status}"
    if lines:
        reason = make_printable(lines[0].partition(": ")[2] or lines[0], 200)
    return f"git {verb} failed: {reason}; {way_out}"
