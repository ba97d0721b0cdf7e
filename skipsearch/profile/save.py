"""Save a profile, after a check that its text can be loaded again."""

from __future__ import annotations

from pathlib import Path

from skipsearch.core.files import save_file
from skipsearch.errors import ProfileError
from skipsearch.profile.canonical import dump_profile
from skipsearch.profile.load import parse_profile
from skipsearch.profile.schema import Profile


def save_profile(profile: Profile, path: str | Path, replace: bool = False) -> None:
    """Write `dump_profile(profile)` to `path` atomically, and make its folders.

    replace: replace an existing file with other content. Raises: ProfileError if such a file exists
    and `replace` is False, if the file cannot be written, or if the text does not load again as
    this profile. In the last case, the text is saved next to `path`, and `path` is not changed.
    """
    text, target = dump_profile(profile), Path(path)
    if not replace and target.is_file() and target.read_bytes() != text.encode():
        raise ProfileError(
            f"{target} exists already and says something else: pass replace=True, or write another "
            "file"
        )
    if (reason := _why_unreadable(text, profile)) is not None:
        rejected_path = target.with_name(f"{target.name[:100]}.unreadable")
        save_file(rejected_path, text, ProfileError)
        raise ProfileError(
            f"{target} was not written, because the profile would not load again ({reason}): its "
            f"text is in {rejected_path}; "
            "please report this as an error of skipsearch, with that file"
        )
    save_file(target, text, ProfileError)


def _why_unreadable(text: str, profile: Profile) -> str | None:
    """Return the reason why the text does not load as this profile; None if it does."""
    try:
        loaded = parse_profile(text.encode(), "its text")
    except ProfileError as error:
        return str(error)
    return None if loaded == profile else "it loads as another profile"
