"""Every fault of every profile in some files and folders, for a repository's continuous integration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.load import load_profile
from skipsearch.profile.modules import missing
from skipsearch.profile.places import misplaced, profile_files


@dataclass(frozen=True, slots=True)
class Checked:
    """A file and one sentence about what is wrong with it, or None."""

    path: Path
    fault: str | None


def validate_paths(paths: Iterable[Path]) -> list[Checked]:
    """Each file, and each *.yaml of each folder: does it load, is it where its content says it belongs, are its modules there?

    A file named by itself may be anywhere. Raises: ProfileError if a folder holds no *.yaml.
    """
    checked = []
    for path in paths:
        files = list(profile_files(path)) if path.is_dir() else [path]
        if not files:
            raise ProfileError(f"{path}: there is no *.yaml file in this folder; profiles are kept under profiles/")
        checked += [Checked(file, _fault(file, in_repository=file != path)) for file in files]
    return checked


def _fault(path: Path, in_repository: bool) -> str | None:
    try:
        profile = load_profile(path)
    except ProfileError as error:
        return str(error)
    return (misplaced(path, profile) if in_repository else None) or missing(profile)
