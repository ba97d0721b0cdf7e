"""Folders of this user, and careful reading and writing of files."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skipsearch.errors import SkipSearchError


class IrregularFileError(OSError):
    """A path that names a folder, a device or a pipe instead of a file; `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"this is a {kind}")
        self.kind = kind


def cache_dir() -> Path:
    """Return the folder of files that may be deleted at any time: compiled code, latency tables."""
    chosen = os.environ.get("SKIPSEARCH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipsearch"


def hash_facts(facts: Any) -> str:
    """Return the SHA-256 of a value of JSON, whatever the order of its keys: the name of what
    depends on these facts.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def make_private_dir(folder: Path) -> None:
    """Make the folder and its missing parents, for this user alone (mode 0700). Raises: OSError."""
    for part in reversed((folder, *folder.parents)):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)  # another process may make it at the same time


def open_regular(path: str | Path, follow_links: bool = True) -> BufferedReader:
    """Open a regular file to read.

    A pipe would block its reader, and a device may never end. Raises: IrregularFileError for
    these; OSError; ValueError if the path holds a zero byte.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0)))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise IrregularFileError("folder" if stat.S_ISDIR(mode) else "device or pipe")


def write_atomically(path: Path, content: bytes, private: bool = True) -> None:
    """Write a file through a temporary one in the same folder, then `os.replace`.

    Readers see the old content or the new one. private: for this user alone (mode 0600), else as
    the umask has it. Raises: OSError; the old content then stays.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        mode = 0o600 if private else 0o666
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a crash after the rename must not leave an empty file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def save_file(path: Path, content: str | bytes, error: type[SkipSearchError]) -> None:
    """Make the folders of a user's file and write it atomically. Raises: `error`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode() if isinstance(content, str) else content, False)
    except OSError as cause:
        raise error(
            f"cannot write {path}: {cause.strerror or cause}; make room there, or choose another "
            "place"
        ) from cause


@contextmanager
def new_folder(target: Path, replace: bool) -> Iterator[Path]:
    """Yield an empty hidden folder next to `target`, and rename it to `target` at the end.

    If the block fails or is interrupted, the new folder is removed and `target` stays as it was.
    replace: replace an existing folder `target`. Raises: OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:50]}-") as scratch:
        folder = Path(scratch, "new")
        folder.mkdir()
        yield folder
        if replace and target.exists():
            _replace_folder(folder, target)
        else:
            os.rename(folder, target)


def _replace_folder(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`, which exists. If that fails, `target` stays as it was.

    The old folder is outside of every temporary folder that an interrupt would remove.
    """
    parking = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:50]}-old-"))
    old = parking / "old"
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        if not target.exists():
            os.rename(old, target)
            parking.rmdir()
        raise
    shutil.rmtree(parking)


def check_writable(
    target: Path,
    replace: bool,
    error: type[SkipSearchError],
    option: str = "--out",
    inputs: Mapping[str, Iterable[Path]] = MappingProxyType({}),
    way_out: str = "",
) -> None:
    """Check before the work that its result can be saved at `target`, and make its folder.

    replace: an existing file may be replaced. option: the flag that named the target. inputs:
    files that must not be overwritten, by the flag that named them. way_out: the first advice if
    the file exists. Raises: `error`.
    """
    if target.is_dir():
        raise error(f"{option} {target} is a folder; name the file to write")
    for input_option, files in inputs.items():
        if any(_is_same_file(target, file) for file in files):
            raise error(
                f"{option} {target} is the file of {input_option}, which would be lost: write "
                f"another with {option}"
            )
    if target.exists() and not target.is_file():
        raise error(f"{option} {target} is a device or pipe; name a file to write")
    if target.exists() and not replace:
        raise error(
            f"{target} exists already: {way_out}replace it with --force, or write another with "
            f"{option}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise error(
            f"the folder {target.parent} cannot be made ({cause.strerror}): choose another with "
            f"{option}"
        ) from None
    if not os.access(target.parent, os.W_OK):
        raise error(
            f"the folder {target.parent} may not be written to: choose another with {option}"
        )


def _is_same_file(target: Path, file: Path) -> bool:
    """Return whether both paths lead to one file, or would if they do not exist yet."""
    with suppress(OSError):
        return os.path.samefile(target, file)
    return os.path.realpath(target) == os.path.realpath(file)
