"""Check all profiles in files and folders, for the continuous integration of a repository."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.copy_modules import module_problem
from skipsearch.profile.load import load_profile
from skipsearch.profile.paths import explain_misplaced, profile_files


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The outcome of the check of one file."""

    path: Path
    error: str | None  # one sentence; None: the file is valid


def validate_paths(paths: Iterable[Path]) -> list[ValidationResult]:
    """Check each file, and each *.yaml of each folder.

    A profile must load, lie at the path for its content, and have its modules. A file that is given
    directly may lie anywhere. Raises: ProfileError if a folder has no *.yaml.
    """
    checked = []
    for path in paths:
        files = list(profile_files(path)) if path.is_dir() else [path]
        if not files:
            raise ProfileError(
                f"{path}: there is no *.yaml file in this folder; profiles are kept under profiles/"
            )
        checked += [
            ValidationResult(file, _find_error(file, in_repository=file != path)) for file in files
        ]
    return checked


def _find_error(path: Path, in_repository: bool) -> str | None:
    try:
        profile = load_profile(path)
    except ProfileError as error:
        return str(error)
    return (explain_misplaced(path, profile) if in_repository else None) or module_problem(profile)
