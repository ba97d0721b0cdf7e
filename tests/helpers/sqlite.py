"""SQLite without waiting for the disk: nobody pulls the plug of a test, and some disks take a tenth
of a second a commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event


@pytest.fixture(scope="module", autouse=True)
def unsynced_sqlite() -> Iterator[None]:
    def relax(connection: Any, _: Any) -> None:
        if type(connection).__module__.startswith("sqlite3"):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", relax)
    yield
    event.remove(Engine, "connect", relax)
