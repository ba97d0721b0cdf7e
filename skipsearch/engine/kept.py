"""Where compiled code is kept between processes, and what is believed of what lies there.

Native code runs with all the rights of whoever loads it. So the folder and each file in it must be this user's own and nobody else may be
able to write to them; a folder that others may write to is left alone, and code is kept in a private one until the process ends.
Each file begins with the SHA-256 of the code behind it. That finds damage (a full disk, flipped bits) and stops no attacker, who could
write a fitting one as well: the owner and the mode do that. Both parts are one file because two could not be replaced at once.
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

from skipsearch.errors import UntrustedFolder
from skipsearch.machine import cache_folder, make_folder, write_whole

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Shelf:
    """Code by name in a folder of this user's own."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.code"

    def read(self, name: str) -> bytes | None:
        """The code that was kept under a name; None if there is none. What is damaged or not this user's own is removed.

        Raises: OSError where it cannot be read now, which says nothing about the code.
        """
        path = self.path(name)
        try:
            # The file that is opened is the one that is looked at, and no pipe or link is followed, whatever is moved there meanwhile.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):   # a link, a socket
                raise
            path.unlink(missing_ok=True)
            return None
        with open(number, "rb") as file:
            found = os.fstat(number)
            data = file.read() if stat.S_ISREG(found.st_mode) and _is_own(found) else b""
        code = data[DIGEST:]
        if not code or hashlib.sha256(code).digest() != data[:DIGEST]:
            path.unlink(missing_ok=True)
            return None
        return code

    def keep(self, name: str, code: bytes) -> None:
        """Raises: OSError."""
        write_whole(self.path(name), hashlib.sha256(code).digest() + code)


def open_shelf() -> Shelf:
    """The user's own, in the folder that SKIPSEARCH_CACHE_DIR names; where others could have put something there, a private one that lasts
    as long as this process, and an `UntrustedFolder` warning.

    Raises: OSError where the folder cannot be made.
    """
    folder = cache_folder() / "compiled"
    if not os.path.lexists(folder):
        make_folder(folder)
    flaw = _flaw(folder)
    if flaw is None:
        return Shelf(folder)
    warnings.warn(UntrustedFolder(f"{folder} {flaw}; until then every process compiles the code again"), stacklevel=2)
    return Shelf(_private_folder())


def existing_shelf() -> Shelf | None:
    """The user's own as it is; None, without a word, where there is none yet or its code is not to be run."""
    folder = cache_folder() / "compiled"
    try:
        return Shelf(folder) if _flaw(folder) is None else None
    except OSError:
        return None


def _flaw(folder: Path) -> str | None:
    """Why code that lies there is not run, and what to do about it; None if it may be."""
    found = folder.lstat()
    elsewhere = "set SKIPSEARCH_CACHE_DIR to a folder of your own"
    if not stat.S_ISDIR(found.st_mode):
        return f"is a link or a file where a folder for compiled code should be: remove it, or {elsewhere}"
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid}), whose code is not run: {elsewhere}"
    if found.st_mode & OTHERS_WRITE:
        return (f"lets others write to it (mode {stat.S_IMODE(found.st_mode):o}), so the code in it is not run: chmod 700 {folder}, or "
                f"{elsewhere}")
    return None


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def _private_folder() -> Path:
    """One of this process (mode 0700), removed when it ends. Raises: OSError."""
    return Path(_private().name)


@cache
def _private() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="skipsearch-")
