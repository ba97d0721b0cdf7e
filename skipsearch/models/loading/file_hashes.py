"""SHA-256 sums of large files, remembered as long as a file is unchanged."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from skipsearch.core.files import cache_dir, hash_facts, make_private_dir, write_atomically

# A file may change twice within one step of the file system's clock. Its sum is therefore
# remembered only if its last change is older.
RECENT_S = 2.0


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file.

    Reading a large file takes seconds, so the sum is stored in the cache folder with the size of
    the file and the times of its last changes. One of these times (ctime) is the system's own: no
    program can set it back, and every change of content, name or owner moves it.
    Raises: OSError if the file cannot be read.
    """
    facts, stored_at = _read_facts(path), _path_of_sum(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(stored_at.read_text("utf-8"))
        if stored["facts"] == facts and len(bytes.fromhex(stored["sha256"])) == 32:
            return str(stored["sha256"])
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    is_settled = abs(time.time() - path.stat().st_ctime) > RECENT_S
    if is_settled and _read_facts(path) == facts:
        with suppress(OSError):  # a full disk: the file is read again next time
            make_private_dir(stored_at.parent)
            content = json.dumps({"path": str(path), "facts": facts, "sha256": sha256})
            write_atomically(stored_at, content.encode())
    return sha256


def _read_facts(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _path_of_sum(path: Path) -> Path:
    return cache_dir() / "hashes" / f"{hash_facts(str(path.resolve()))}.json"
