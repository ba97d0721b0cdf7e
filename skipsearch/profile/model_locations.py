"""Store the folders of local models on this machine.

Profiles are shared, so a profile names a local model by its folder's name and its weights' hash,
never by a path. A list in the user's data folder maps each hash to the folder that was loaded
last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skipsearch.core.files import save_file
from skipsearch.core.schema_types import DraftModelRef
from skipsearch.errors import ModelError, ProfileError
from skipsearch.profile.paths import user_folder
from skipsearch.profile.schema import ModelInfo

MAX_ENTRIES = 1000  # the folder that was used longest ago is dropped first


def record_location(weights_sha256: str, folder: Path) -> None:
    """Record that these weights lie in `folder`; do nothing if the list cannot be written."""
    locations = _read_locations()
    path = str(folder.absolute())  # a link may have a better name than what it leads to
    if locations.get(weights_sha256) == path:
        return
    locations.pop(weights_sha256, None)
    locations[weights_sha256] = path
    newest = dict(list(locations.items())[-MAX_ENTRIES:])
    with suppress(ProfileError):
        save_file(_locations_file(), json.dumps(newest, indent=1) + "\n", ProfileError)


def model_argument(model: ModelInfo) -> str:
    """Return the `--model` argument for the model of a profile.

    `demo`, a Hub id with its revision, or the folder of a local model. Raises: ProfileError if a
    local model was never loaded on this machine, or was moved.
    """
    if model.id == "demo" or "/" in model.id:
        return f"{model.id}@{model.revision}" if model.revision else model.id
    folder = _find_location(model.weights_sha256)
    if folder is not None and folder.exists():
        return str(folder)
    if Path(model.id).is_dir():
        return model.id
    raise ProfileError(
        f"this profile is for the local model {model.id!r}, and {_describe_absence(folder)}: say "
        "where it lies with --model FOLDER"
    )


def find_draft_model_argument(ref: DraftModelRef, folders: Sequence[Path]) -> str:
    """Return the name with which the draft model of a profile is loaded.

    `demo`, a Hub id with its revision, or a local file or folder: where it was loaded last, or in
    one of `folders`. Raises: ModelError if it is in none of these places.
    """
    if ref.id == "demo" or "/" in ref.id:
        return ref.id
    last = _find_location(ref.weights_sha256)
    places = [*([] if last is None else [last]), *(folder / ref.id for folder in folders)]
    place = next((place for place in places if place.exists()), None)
    if place is not None:
        return str(place)
    raise ModelError(
        f"the draft model is the local model {ref.id!r}, and {_describe_absence(last)}: put it "
        "into the folder of the profile, or keep it in memory until the decoder is made"
    )


def _find_location(weights_sha256: str | None) -> Path | None:
    """Return where a local model with these weights was loaded last; None if nowhere."""
    place = Path(_read_locations().get(weights_sha256 or "", ""))
    return place if place.is_absolute() else None


def _describe_absence(last: Path | None) -> str:
    if last is None:
        return "it has not been loaded on this machine yet"
    return f"it was last loaded from {last}, which is not there any more"


def _locations_file() -> Path:
    return user_folder() / "models.json"


def _read_locations() -> dict[str, str]:
    """Return the list; empty if it is missing or damaged."""
    try:
        locations = json.loads(_locations_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(locations, dict):
        return {}
    return {str(key): path for key, path in locations.items() if isinstance(path, str)}
