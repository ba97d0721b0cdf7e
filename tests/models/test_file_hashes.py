"""Sums of files are remembered, and never those of other bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from skipsearch.core import files
from skipsearch.models.loading import file_hashes
from skipsearch.models.loading.file_hashes import hash_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was changed long ago, as far as the rule on recent changes goes."""
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "RECENT_S", -1.0)
    (tmp_path / "file").write_bytes(b"weights")
    return tmp_path / "file"


def reads(file: Path) -> bool:
    """Return whether the file is read to compute its sum, which has to be right."""
    calls = []
    digest = hashlib.file_digest

    def record(*arguments: object) -> object:
        calls.append(arguments)
        return digest(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "file_digest", record)
        assert hash_file(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    return bool(calls)


def test_an_unchanged_file_is_read_once(file: Path) -> None:
    assert [reads(file), reads(file), reads(file)] == [True, False, False]


def test_a_file_with_other_bytes_of_the_same_size_and_time_is_read_again(file: Path) -> None:
    hash_file(file)
    status = file.stat()
    for change in (
        lambda: file.write_bytes(b"WEIGHTS"),
        lambda: os.replace(_write_copy(file, b"eeeeeee"), file),
    ):
        change()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (file.stat().st_size, reads(file), reads(file)) == (status.st_size, True, False)


def _write_copy(file: Path, content: bytes) -> Path:
    copy = file.with_name("copy")
    copy.write_bytes(content)
    return copy


def test_the_sum_of_a_file_that_just_changed_is_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "RECENT_S", 3600.0)
    assert [reads(file), reads(file)] == [True, True]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"facts": [], "sha256": "00"}', b'{"sha256": 1}', b"\xff"]
)
def test_a_damaged_record_is_written_again(content: bytes, file: Path) -> None:
    hash_file(file)
    (record,) = (files.cache_dir() / "hashes").iterdir()
    record.write_bytes(content)
    assert [reads(file), reads(file)] == [True, False]


def test_a_cache_that_cannot_be_written_to_costs_time_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(file / "no folder"))
    assert [reads(file), reads(file)] == [True, True]
