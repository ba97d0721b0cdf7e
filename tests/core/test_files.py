"""Folders are replaced whole or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skipsearch.core.files import new_folder


def write_new(target: Path) -> None:
    with new_folder(target, replace=True) as folder:
        (folder / "file").write_text("new")


def test_a_folder_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "draft"
    for _ in range(2):
        write_new(target)
    assert (target / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["draft"]


@pytest.mark.parametrize("error", [OSError("disk is full"), KeyboardInterrupt()])
def test_a_folder_stays_as_it_was_if_its_replacement_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    target = tmp_path / "draft"
    target.mkdir()
    (target / "file").write_text("old")
    rename = os.rename

    def fail_on_the_new_folder(source: Path, to: Path) -> None:
        if Path(source).name == "new":
            raise error
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail_on_the_new_folder)
    with pytest.raises(type(error)):
        write_new(target)
    assert (target / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["draft"]
