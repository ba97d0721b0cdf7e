"""Where the models of profiles lie on this machine.

A profile names a local model by its folder's name and its weights' hash, never by a path, because it is shared. So this user's data folder
keeps a list: the hash of the weights -> the folder that they were last loaded from.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.dump import save_text
from skipsearch.profile.places import user_folder
from skipsearch.profile.schema import ModelInfo

MOST = 1000   # folders that are remembered; the one that was used longest ago is forgotten first


def remember(weights_sha256: str, folder: Path) -> None:
    """Write down that these weights lie in `folder`. Where that cannot be written, nothing is remembered."""
    known = _read()
    place = str(folder.resolve())
    if known.get(weights_sha256) == place:
        return
    known.pop(weights_sha256, None)
    known[weights_sha256] = place
    with suppress(ProfileError):
        save_text(json.dumps(dict(list(known.items())[-MOST:]), indent=1) + "\n", _file())


def name_of(model: ModelInfo) -> str:
    """What `--model` calls the model of a profile: `demo`, a Hub id with its revision, or the folder that a local model lies in.

    Raises: ProfileError for a local model that was never loaded on this machine, or has been moved away.
    """
    if model.id == "demo" or "/" in model.id:
        return f"{model.id}@{model.revision}" if model.revision else model.id
    folder = Path(_read().get(model.weights_sha256 or "", ""))
    if folder.is_absolute() and folder.is_dir():
        return str(folder)
    if Path(model.id).is_dir():
        return model.id
    gone = f"it was last loaded from {folder}, which is not there any more" if folder.is_absolute() else \
        "it has not been loaded on this machine yet"
    raise ProfileError(f"this profile is for the local model {model.id!r}, and {gone}: say where it lies with --model FOLDER")


def _file() -> Path:
    return user_folder() / "models.json"


def _read() -> dict[str, str]:
    """What was written down; nothing where the list is missing or damaged."""
    try:
        known = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(key): place for key, place in known.items() if isinstance(place, str)} if isinstance(known, dict) else {}
