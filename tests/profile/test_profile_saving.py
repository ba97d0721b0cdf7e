"""A profile is written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from profile_samples import plain, speculate

from skipsearch.errors import ProfileError
from skipsearch.profile import dump_profile, load_profile, save_profile


def test_saving_makes_the_folders_and_loads_back(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "demo" / "x.yaml"
    save_profile(speculate(), path)
    assert load_profile(path) == speculate()
    assert os.listdir(path.parent) == ["x.yaml"]


def test_saving_respects_the_umask_as_any_file_does(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_profile(speculate(), tmp_path / "x.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.yaml").stat().st_mode) == 0o644


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "x.yaml"
    save_profile(plain(), path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(ProfileError, match=r"cannot write .*x\.yaml: No space left on device"):
        save_profile(speculate(), path, replace=True)
    assert os.listdir(tmp_path) == ["x.yaml"]
    assert path.read_text() == dump_profile(plain())


def test_an_interrupt_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_profile(speculate(), tmp_path / "x.yaml")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.yaml").mkdir()
    for path in (tmp_path / "file" / "x.yaml", tmp_path / "folder.yaml"):
        with pytest.raises(ProfileError, match=f"cannot write {path}: .*choose another place"):
            save_profile(speculate(), path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.yaml"]


def test_a_profile_that_would_not_load_again_is_not_written_over_one_that_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.yaml"
    save_profile(plain(), path)
    unreadable = speculate().model_copy(
        update={"engine": "no name of an engine"}
    )  # a copy is not validated
    with pytest.raises(ProfileError, match=r"would not load again \(.*engine"):
        save_profile(unreadable, path, replace=True)
    assert load_profile(path) == plain()
    assert (tmp_path / "x.yaml.unreadable").read_text() == dump_profile(unreadable)
    assert len(os.listdir(tmp_path)) == 2


def test_a_long_file_name_still_has_room_for_its_temporary_neighbour(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".yaml")
    save_profile(speculate(), path)
    assert load_profile(path) == speculate()
