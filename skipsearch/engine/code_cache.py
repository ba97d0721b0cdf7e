"""Store compiled code for later processes, and decide which stored code is trusted.

Native code has all the rights of the process that loads it. The folder and each file in it must
therefore belong to this user, and no other user may be able to write to them. A folder that others
may write to is not used; a private folder of the process takes its place.

Each file begins with the SHA-256 of the code after it. The digest detects damage (a full disk,
flipped bits). It does not stop an attacker, who could write a matching digest. The checks of owner
and mode stop attackers. Digest and code are in one file because two files could not be replaced
atomically.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skipsearch.core.files import cache_dir, make_private_dir, write_atomically
from skipsearch.errors import UntrustedCacheWarning

OTHERS_WRITE_BITS = stat.S_IWGRP | stat.S_IWOTH
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CodeCache:
    """Compiled code by name, in a folder of this user."""

    folder: Path

    def path_of(self, name: str) -> Path:
        return self.folder / f"{name}.code"

    def read(self, name: str) -> bytes | None:
        """Return the code that was stored under a name, or None.

        A file that is damaged or belongs to another user is removed. Raises: OSError if the file
        cannot be read at the moment.
        """
        path = self.path_of(name)
        try:
            # Check the opened file and not its path, which another process may replace meanwhile.
            # Follow no pipe or link.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            path.unlink(missing_ok=True)
            return None
        with open(descriptor, "rb") as file:
            file_stat = os.fstat(descriptor)
            data = (
                file.read()
                if stat.S_ISREG(file_stat.st_mode) and _is_private_file(file_stat)
                else b""
            )
        code = data[DIGEST_BYTES:]
        if not code or hashlib.sha256(code).digest() != data[:DIGEST_BYTES]:
            path.unlink(missing_ok=True)
            return None
        return code

    def store(self, name: str, code: bytes) -> None:
        """Write the code under a name. Raises: OSError."""
        write_atomically(self.path_of(name), hashlib.sha256(code).digest() + code)


def open_code_cache() -> CodeCache:
    """Open the user's cache in the folder that SKIPSEARCH_CACHE_DIR names; create it if needed.

    If other users could have written to it, warn with `UntrustedCacheWarning` and return a private
    cache that is removed when the process ends. Raises: OSError if the folder cannot be created.
    """
    folder = cache_dir() / "compiled"
    if not os.path.lexists(folder):
        make_private_dir(folder)
    reason = why_untrusted(folder)
    if reason is None:
        return CodeCache(folder)
    warnings.warn(
        UntrustedCacheWarning(
            f"{folder} {reason}; until then every process compiles the code again"
        ),
        stacklevel=2,
    )
    return CodeCache(_process_folder())


def existing_code_cache() -> CodeCache | None:
    """Return the user's cache; None if there is none or it is not trusted. Never warns."""
    folder = cache_dir() / "compiled"
    try:
        return CodeCache(folder) if why_untrusted(folder) is None else None
    except OSError:
        return None


def why_untrusted(folder: Path) -> str | None:
    """Return why code in the folder is not trusted, and a remedy; None if it is trusted."""
    folder_stat = folder.lstat()
    way_out = "set SKIPSEARCH_CACHE_DIR to a folder of your own"
    if not stat.S_ISDIR(folder_stat.st_mode):
        return (
            "is a link or a file where a folder for compiled code should be: remove it, or "
            f"{way_out}"
        )
    if folder_stat.st_uid != os.geteuid():
        return (
            f"belongs to another user (uid {folder_stat.st_uid}), whose code is not run: {way_out}"
        )
    if folder_stat.st_mode & OTHERS_WRITE_BITS:
        return (
            f"lets others write to it (mode {stat.S_IMODE(folder_stat.st_mode):o}), so the code "
            f"in it is not run: chmod 700 {folder}, or {way_out}"
        )
    return None


def _is_private_file(file_stat: os.stat_result) -> bool:
    return file_stat.st_uid == os.geteuid() and not file_stat.st_mode & OTHERS_WRITE_BITS


def _process_folder() -> Path:
    """Return a folder (mode 0700) that is removed when this process ends. Raises: OSError."""
    return Path(_make_process_folder().name)


@cache
def _make_process_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="skipsearch-")
