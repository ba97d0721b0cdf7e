"""The child process of `generated_code`: take limits, then run program.py in the current folder.

    python -I -S run_limited.py CPU_SECONDS MEMORY_BYTES FILE_BYTES

Prints its process id and exits with status 0 if the program ends without an error. The output of
the program itself is dropped, so a program cannot print the id instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "ctypes.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.system",
    "pty.",
    "signal.pthread_kill",
    "sys.addaudithook",
    "webbrowser.",
)
CHANGES_FILES = (
    "os.chmod",
    "os.chown",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "shutil.",
)
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Set limits of this process that its children inherit. Windows has none of them."""
    try:
        import resource
    except ImportError:
        return
    for name, limit in (
        ("RLIMIT_CPU", cpu_s),
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_FSIZE", file_bytes),
        ("RLIMIT_CORE", 0),
    ):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def leave_network() -> None:
    """Move to a network namespace without interfaces, where the kernel allows it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def refuse_side_effects(folder: str) -> None:
    """Refuse, for the rest of this process, network, other processes, and files outside `folder`
    that the program would write, move or delete.
    """
    inside = os.path.join(os.path.realpath(folder), "")

    def check_event(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"a generated program may not use {event}")
        if event == "open":
            path, mode, flags = args
            writes = bool(flags & WRITE_FLAGS) if isinstance(flags, int) else "r" not in mode
            if writes and not is_inside(path):
                raise PermissionError(f"a generated program may not write {path}")
        elif event.startswith(CHANGES_FILES) and not all(
            is_inside(path) for path in args if isinstance(path, str | bytes)
        ):
            raise PermissionError(f"a generated program may not use {event} outside its folder")

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):  # a descriptor that is open already
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(inside)

    sys.addaudithook(check_event)


def main() -> None:
    cpu_s, memory_bytes, file_bytes = map(int, sys.argv[1:4])
    with open("program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec")
    pid, result = os.getpid(), os.dup(1)
    os.set_inheritable(result, False)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    leave_network()
    limit_resources(cpu_s, memory_bytes, file_bytes)
    refuse_side_effects(os.getcwd())
    exec(program, {"__name__": "program"})
    os.write(result, str(pid).encode())


if __name__ == "__main__":
    main()
