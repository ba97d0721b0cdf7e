"""A real PostgreSQL for tests of searches that several processes share: `.ci/run` starts one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest


@pytest.fixture
def postgresql() -> Iterator[str]:
    """URL of an empty data base, gone after the test."""
    server = server_url()
    name = f"skipsearch_{uuid4().hex}"
    execute(server, f"CREATE DATABASE {name}")
    yield f"{server.rpartition('/')[0]}/{name}"
    execute(server, f"DROP DATABASE {name} WITH (FORCE)")


def execute(url: str, *statements: str) -> None:
    """Have a server do something."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def server_url() -> str:
    """Without a server a test is skipped; in CI it fails."""
    server = os.environ.get("SKIPSEARCH_TEST_POSTGRES")
    if not server:
        why = "SKIPSEARCH_TEST_POSTGRES names no server: .ci/postgres COMMAND starts one"
        pytest.fail(why) if os.environ.get("CI", "false") != "false" else pytest.skip(why)
    return server
