"""What lies in a model folder: the hash of its weight files is that of their content, whatever the
files are called.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants

from skipsearch.models.loading.weight_files import hash_weight_files

NAME = "ab" * 32  # of a blob, and not the hash of what these tests put into it


def linked(target: Path, content: bytes = b"weights") -> Path:
    """model.safetensors in a folder of its own, a link to `target` with this content."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    link = target.parents[1] / "snapshots" / "model.safetensors"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return link


def hash_of(file: Path, sha256: str) -> bool:
    return (
        hash_weight_files([file]) == hashlib.sha256(f"{file.name} {sha256}\n".encode()).hexdigest()
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the Hub's cache, reached by a link as on machines where it lies on another
    disk.
    """
    (tmp_path / "disk").mkdir()
    (tmp_path / "hub").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_blob_of_the_hubs_cache_is_believed_to_be_what_it_is_called(cache: Path) -> None:
    assert hash_of(linked(cache / "models--org--name" / "blobs" / NAME), NAME)


@pytest.mark.parametrize(
    "place",
    [
        "elsewhere/models--org--name/blobs",
        "hub/models--org--name/mine",
        "hub/org/blobs",
        "hub/deeper/models--org--name/blobs",
    ],
)
def test_a_link_to_a_file_elsewhere_is_read_whatever_that_is_called(
    cache: Path, tmp_path: Path, place: str
) -> None:
    file = linked(tmp_path / place / NAME)
    assert hash_of(file, hashlib.sha256(b"weights").hexdigest())
    before = hash_weight_files([file])
    assert hash_weight_files([linked(tmp_path / place / NAME, b"others")]) != before


def test_a_file_with_such_a_name_that_is_no_link_is_read(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(b"weights")
    assert hash_of(file, hashlib.sha256(b"weights").hexdigest())
