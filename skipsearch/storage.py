"""Where a study lives: a journal file, which one process at a time writes, or a data base, which any number of them share."""

from __future__ import annotations

import fcntl
import os
import re
import warnings
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO
from urllib.parse import unquote

import optuna
import sqlalchemy
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import IntegrityError, ProgrammingError

from skipsearch.errors import SearchError

STUDY = "skipsearch"             # the name of a study whose place does not say another
JOURNAL_START = b'{"op_code":'   # what Optuna begins every journal with
HEARTBEAT_SECONDS = 10           # between two signs of life of a worker that measures
GRACE_SECONDS = 60               # without one, after which it is taken for dead
CONNECTION = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}   # libpq, seconds

_held: dict[str, BinaryIO] = {}  # journals that this process writes; the kernel lets go of them when it ends, however it ends


def is_url(where: str) -> bool:
    return "://" in where


def study_file(where: str) -> Path | None:
    """The file that a study is in: a journal, or what SQLite keeps. None for a server's, and for an address that makes no sense."""
    if not is_url(where):
        return Path(where)
    try:
        url = sqlalchemy.make_url(study_name(where)[0])
    except sqlalchemy.exc.ArgumentError:
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def study_name(url: str) -> tuple[str, str]:
    """The address and the study's name of `postgresql://…#name`; without one the name is `skipsearch`."""
    match = re.fullmatch(r"(.*?)#([\w.-]+)", url)
    return (match[1], match[2]) if match else (url, STUDY)


def with_driver(url: str) -> str:
    """`postgresql://` means psycopg 3, SQLAlchemy's own reading of it is another driver."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def shown(where: str) -> str:
    """A place as it may be printed: without a password."""
    if not is_url(where):
        return where
    return re.sub(r"(password=)[^&#]*", r"\1***", re.sub(r"(://[^:/]*):.*@", r"\1:***@", where))


def reason(error: BaseException, where: str = "") -> str:
    """What was wrong at bottom, in one line and without the password of `where`."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).splitlines() or [type(error).__name__])[0]
    for secret in filter(None, re.findall(r"://[^:/]*:(.*)@", where) + re.findall(r"password=([^&#]*)", where)):
        line = line.replace(secret, "***").replace(unquote(secret), "***")
    return line[:200]


def open_database(url: str) -> RDBStorage:
    """Any data base that SQLAlchemy knows, `postgresql://` by psycopg 3. Raises: SearchError if it cannot be reached or used."""
    address = with_driver(url)
    options = {"pool_pre_ping": True, **({"connect_args": CONNECTION} if address.startswith("postgresql+psycopg") else {})}
    for attempts_left in reversed(range(20)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return RDBStorage(address, options, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS)
        except ImportError as error:
            install = "pip install 'skipsearch[postgresql]'" if "postgresql" in address else "install it with pip"
            raise SearchError(f"the study {shown(url)} needs the driver of its data base, which is not installed "
                              f"({reason(error, url)}): {install}") from error
        except Exception as error:
            # Of workers that start together one makes the tables, and the others find half of them.
            half_made = isinstance(error, IntegrityError | ProgrammingError) or "already exists" in str(error)
            if not (half_made and attempts_left):
                raise SearchError(f"the study {shown(url)} cannot be reached ({reason(error, url)}): check the address, user and "
                                  "password, and that the server runs") from error
            sleep(0.1)
    raise AssertionError("the last attempt returns or raises")


def insert(database: RDBStorage, table: str, rows: list[dict[str, Any]]) -> None:
    """Rows of one of Optuna's tables in one statement: it would take three queries for each parameter of a trial, of which 80 layers have
    160, and keep other workers waiting meanwhile."""
    if rows:
        with database.engine.begin() as connection:
            connection.execute(sqlalchemy.insert(sqlalchemy.table(table, *map(sqlalchemy.column, rows[0]))), rows)


def journal_begun(path: Path) -> bool:
    """Whether a search was begun in this file. Raises: SearchError if it holds something else, cannot be read, or is a device or pipe."""
    start = b""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SearchError(f"the study {path} is a device or pipe: name a file with --study")
    try:
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(JOURNAL_START))
    except OSError as error:
        raise SearchError(f"the study {path} cannot be read ({error.strerror}): name another file with --study") from error
    if start != JOURNAL_START[:len(start)]:  # Optuna would write its lines behind those of any file
        raise SearchError(f"{path} is not the journal of a search: name another file with --study")
    return bool(start)


def open_journal(path: Path) -> tuple[JournalStorage, bool]:
    """A journal for this process alone, until `close_journal` or its end; whether its last line was torn, and was cut off.

    Raises: OSError; SearchError if another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _hold(path)
    torn = cut_torn_line(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return JournalStorage(JournalFileBackend(os.path.abspath(path), _Held() if str(path.resolve()) in _held else None)), torn


def close_journal(path: Path) -> None:
    """Let another process go on with it."""
    if file := _held.pop(str(path.resolve()), None):
        file.close()


def discard_journal(path: Path) -> None:
    """Make room for a new journal. Raises: SearchError if the file is none, or another process writes it."""
    if journal_begun(path):
        _hold(path)
    path.unlink(missing_ok=True)
    close_journal(path)


class _Held:
    """In place of Optuna's lock around each write, for a journal that `_hold` keeps for this process anyway.

    Optuna's is a link beside the journal. A kill leaves it behind, for the next process to wait for: for ever where the journal's path is
    relative, so that the link leads nowhere. An interruption while it is taken away comes out as a missing file.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _hold(path: Path) -> None:
    """A second process would take the first one's running trial for one that a kill left behind, and cut off a line it is writing."""
    held = _held.get(str(path.resolve()))
    if held and path.exists() and os.path.samestat(os.fstat(held.fileno()), path.stat()):
        return
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SearchError(f"the study {path} is in use by another process: wait for its end, name another file with --study, or let both "
                          "share one in a data base (--study postgresql://…)") from None
    except OSError:  # a file system without locks
        file.close()
        return
    _held[str(path.resolve())] = file


def cut_torn_line(path: Path) -> bool:
    """A process killed while it wrote, and a full disk, leave half a line, to which the next one would be glued: cut it off.

    Returns whether there was one. Raises: OSError.
    """
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return False
    with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)
    return True
