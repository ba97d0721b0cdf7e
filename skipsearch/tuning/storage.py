"""Storage of a study: a journal file of one process, or a database that several share."""

from __future__ import annotations

import fcntl
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO
from urllib.parse import unquote

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import IntegrityError, ProgrammingError

from skipsearch.errors import SearchError

DEFAULT_STUDY_NAME = "skipsearch"  # of a study whose URL names none
JOURNAL_START = b'{"op_code":'  # first bytes of every journal that Optuna writes
HEARTBEAT_S = 10  # between two heartbeats of a worker that measures
GRACE_S = 60  # after its last heartbeat, a worker counts as dead
CONNECTION_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}  # libpq, seconds

# Journals that this process has locked. The kernel unlocks them when the process ends.
_locked: dict[str, BinaryIO] = {}


def is_url(location: str) -> bool:
    return "://" in location


def study_file(location: str) -> Path | None:
    """Return the file of a journal or an SQLite database; None for any other address."""
    if not is_url(location):
        return Path(location)
    try:
        url = sqlalchemy.make_url(split_study_url(location)[0])
    except sqlalchemy.exc.ArgumentError:
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def split_study_url(url: str) -> tuple[str, str]:
    """Return address and study name of `postgresql://…#name`; the default name is `skipsearch`."""
    match = re.fullmatch(r"(.*?)#([\w.-]+)", url)
    return (match[1], match[2]) if match else (url, DEFAULT_STUDY_NAME)


def with_psycopg(url: str) -> str:
    """Return the URL with psycopg 3 as its driver; SQLAlchemy's default is another one."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def redact_url(location: str) -> str:
    """Return a location without its password."""
    if not is_url(location):
        return location
    return re.sub(r"(password=)[^&#]*", r"\1***", re.sub(r"(://[^:/]*):.*@", r"\1:***@", location))


def root_cause(error: BaseException, location: str = "") -> str:
    """Return the first cause of an error in one line, without the password of `location`."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).splitlines() or [type(error).__name__])[0]
    for secret in filter(
        None, re.findall(r"://[^:/]*:(.*)@", location) + re.findall(r"password=([^&#]*)", location)
    ):
        line = line.replace(secret, "***").replace(unquote(secret), "***")
    return line[:200]


def open_database(url: str) -> RDBStorage:
    """Open any database that SQLAlchemy knows; `postgresql://` uses psycopg 3.

    Raises: SearchError if it cannot be reached or used.
    """
    address = with_psycopg(url)
    options = {
        "pool_pre_ping": True,
        **(
            {"connect_args": CONNECTION_OPTIONS} if address.startswith("postgresql+psycopg") else {}
        ),
    }
    for attempts_left in reversed(range(20)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return RDBStorage(
                    address, options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S
                )
        except ImportError as error:
            install = (
                "pip install 'skipsearch[postgresql]'"
                if "postgresql" in address
                else "install it with pip"
            )
            raise SearchError(
                f"the study {redact_url(url)} needs the driver of its data base, which is not "
                "installed "
                f"({root_cause(error, url)}): {install}"
            ) from error
        except Exception as error:
            # If workers start together, one creates the tables, and others see only some of them.
            half_made = isinstance(
                error, IntegrityError | ProgrammingError
            ) or "already exists" in str(error)
            if not (half_made and attempts_left):
                raise SearchError(
                    f"the study {redact_url(url)} cannot be reached ({root_cause(error, url)}): "
                    "check the address, user and "
                    "password, and that the server runs"
                ) from error
            sleep(0.1)
    raise AssertionError("the last attempt returns or raises")


def insert_parameters(
    database: RDBStorage,
    trial_id: int,
    parameters: Mapping[str, float],
    distribution: BaseDistribution,
) -> None:
    """Store the parameters of a trial."""
    _insert_rows(
        database,
        "trial_params",
        [
            {
                "trial_id": trial_id,
                "param_name": name,
                "param_value": value,
                "distribution_json": distribution_to_json(distribution),
            }
            for name, value in parameters.items()
        ],
    )


def insert_attributes(database: RDBStorage, trial_id: int, attrs: Mapping[str, Any]) -> None:
    """Store the attributes of a trial."""
    _insert_rows(
        database,
        "trial_user_attributes",
        [
            {"trial_id": trial_id, "key": key, "value_json": json.dumps(value)}
            for key, value in attrs.items()
        ],
    )


def _insert_rows(database: RDBStorage, table: str, rows: list[dict[str, Any]]) -> None:
    """Insert rows into one of Optuna's tables in one statement.

    Optuna makes three queries for each parameter of a trial. 80 layers have 160 parameters, and
    other workers would wait during these queries.
    """
    if rows:
        with database.engine.begin() as connection:
            connection.execute(
                sqlalchemy.insert(sqlalchemy.table(table, *map(sqlalchemy.column, rows[0]))), rows
            )


def is_journal(path: Path) -> bool:
    """Return whether a file holds a journal; False if it is missing or empty.

    Raises: SearchError if it holds something else, cannot be read, or is a device or pipe.
    """
    start = b""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SearchError(f"the study {path} is a device or pipe: name a file with --study")
    try:
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(JOURNAL_START))
    except OSError as error:
        raise SearchError(
            f"the study {path} cannot be read ({error.strerror}): name another file with --study"
        ) from error
    # Without this check, Optuna would append its lines to any file.
    if start != JOURNAL_START[: len(start)]:
        raise SearchError(f"{path} is not the journal of a search: name another file with --study")
    return bool(start)


def open_journal(path: Path) -> tuple[JournalStorage, bool]:
    """Open a journal for this process alone, until `close_journal` or the end of the process.

    Returns (the storage, whether a half-written last line was cut off). Raises: OSError;
    SearchError if another process has the journal open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _lock_journal(path)
    truncated = truncate_partial_line(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return JournalStorage(
            JournalFileBackend(
                os.path.abspath(path), _NoLock() if str(path.resolve()) in _locked else None
            )
        ), truncated


def close_journal(path: Path) -> None:
    """Let other processes open a journal."""
    if file := _locked.pop(str(path.resolve()), None):
        file.close()


def discard_journal(path: Path) -> None:
    """Delete a journal.

    Raises: SearchError if `path` is no journal, or if another process has it open.
    """
    if is_journal(path):
        _lock_journal(path)
    path.unlink(missing_ok=True)
    close_journal(path)


class _NoLock:
    """A lock that does nothing, for a journal that this process has locked already.

    It replaces Optuna's lock around each write, which is a link next to the journal. A killed
    process leaves the link. The next process waits until the link's target has not changed for 30
    s. If the journal's path is relative, the link points nowhere, and the wait never ends. An
    interruption while the link is removed raises an error about a missing file.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _lock_journal(path: Path) -> None:
    """Lock a journal for this process. Raises: SearchError if another process has locked it.

    Without the lock, a second process would mark the first one's running trial as failed, and cut
    off the line that the first one is writing.
    """
    locked = _locked.get(str(path.resolve()))
    if locked and path.exists() and os.path.samestat(os.fstat(locked.fileno()), path.stat()):
        return
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SearchError(
            f"the study {path} is in use by another process: wait for its end, name another file "
            "with --study, or let both "
            "share one in a data base (--study postgresql://…)"
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return
    _locked[str(path.resolve())] = file


def truncate_partial_line(path: Path) -> bool:
    """Cut off a half-written last line, and return whether there was one. Raises: OSError.

    A killed process or a full disk leaves such a line. The next line would be appended to it.
    """
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return False
    with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)
    return True
