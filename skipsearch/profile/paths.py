"""The path of each profile in a repository, and the folders that are searched for profiles."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipsearch.core.schema_types import to_name
from skipsearch.errors import ProfileError
from skipsearch.profile.schema import Profile

PATH_VARIABLE = "SKIPSEARCH_PROFILE_PATH"
ANY = "any"  # task, device or dtype of a profile that fits any


def profile_path(profile: Profile) -> Path:
    """Return the path in a repository: profiles/<org>--<model>/<task>/<device>--<dtype>.yaml.

    A quantisation of the weights follows the dtype. The device of an unmeasured profile is `any`,
    and so is a dtype that is not known.
    """
    hardware, model = profile.hardware, profile.model
    device = device_slug(hardware.name, hardware.count) if hardware else ANY
    return repository_path(model.id, profile.task.name, device, model.dtype, model.quantization)


def repository_path(
    model_id: str, task: str, device: str, dtype: str | None, quantization: str | None
) -> Path:
    """Return the path for these parts. device: a slug, as `device_slug` makes it."""
    return Path(
        "profiles",
        model_folder(model_id),
        task,
        f"{device}--{weights_slug(dtype, quantization)}.yaml",
    )


def model_folder(model_id: str) -> str:
    """Return org--name for `org/name`, and the folder's name for the path of a local model."""
    parts = [part for part in model_id.split("/") if part]
    is_hub_id = len(parts) == 2 and not model_id.startswith(("/", "~", "."))
    return to_name("--".join(parts) if is_hub_id else "".join(parts[-1:]))


def device_slug(name: str, count: int = 1) -> str:
    """Return nvidia-h200 for `NVIDIA H200`, and 2x-nvidia-h200 for two of them."""
    return to_name(f"{count}x {name}" if count > 1 else name).lower()


def weights_slug(dtype: str | None, quantization: str | None) -> str:
    """Return `bfloat16`, or `bfloat16-native-8bit` for quantised weights."""
    return to_name("-".join(filter(None, (dtype, quantization)))) if dtype or quantization else ANY


@dataclass(frozen=True, slots=True)
class ProfileFolder:
    """A folder that is searched for profiles."""

    folder: Path  # holds <org>--<model>/<task>/*.yaml
    label: str  # its name in lists


def user_folder() -> Path:
    """Return the user's data folder.

    It holds `profiles/`, `pulled/` (the repositories of `profile pull`) and `models.json`.
    """
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "skipsearch"


def search_folders(folder: Path | None = None) -> list[ProfileFolder]:
    """Return the folders to search, in their order.

    They are: `folder` (--profiles), the folders in SKIPSEARCH_PROFILE_PATH, ./profiles (where
    `tune` writes), the user's folder, pulled repositories, the profiles of a checkout, and those of
    the embedded model. Raises: ProfileError if `folder` is given and is not a folder.
    """
    if folder is not None and not folder.is_dir():
        raise ProfileError(
            f"--profiles {folder} is not a folder; name one that holds profiles/ or "
            "<org>--<model>/<task>/*.yaml"
        )
    folders = [ProfileFolder(_profiles_dir(folder), str(folder))] if folder is not None else []
    folders += [
        ProfileFolder(_profiles_dir(Path(entry)), entry)
        for entry in os.environ.get(PATH_VARIABLE, "").split(os.pathsep)
        if entry
    ]
    checkout = Path(__file__).parents[2]
    # If the package is a checkout, the checkout's profiles come last.
    if Path("profiles").is_dir() and Path.cwd().resolve() != checkout.resolve():
        folders.append(ProfileFolder(Path("profiles"), "./profiles"))
    folders.append(ProfileFolder(user_folder() / "profiles", "user"))
    folders += [
        ProfileFolder(pulled / "profiles", _read_origin(pulled))
        for pulled in _list_folders(user_folder() / "pulled")
    ]
    # A profiles/ folder next to an installed package belongs to another program.
    if (checkout / "pyproject.toml").is_file():
        folders.append(ProfileFolder(checkout / "profiles", "this checkout"))
    # Not in the checkout's profiles/, because `tune` writes there.
    embedded = Path(__file__).parents[1] / "demo" / "profiles"
    if embedded.is_dir():
        folders.append(ProfileFolder(embedded, "embedded"))
    return folders


def profile_files(folder: Path) -> Iterator[Path]:
    """Yield every *.yaml under a folder or, if it is a repository, under its profiles/."""
    yield from sorted(_profiles_dir(folder).rglob("*.yaml"))


def explain_misplaced(path: Path, profile: Profile) -> str | None:
    """Return one sentence if a file of a repository is not at the path for its content."""
    root = find_repository(path)
    if root is None:
        return None
    expected = profile_path(profile)
    if path.absolute().relative_to(root) == expected:
        return None
    return (
        f"{path}: its content belongs at {expected}; rename it, so that `--profile auto` finds it"
    )


def find_repository(path: Path) -> Path | None:
    """Return the folder whose profiles/ a file is in; None if it is in none."""
    return next(
        (parent.parent for parent in path.absolute().parents if parent.name == "profiles"), None
    )


def _profiles_dir(folder: Path) -> Path:
    return folder / "profiles" if (folder / "profiles").is_dir() else folder


def _read_origin(pulled: Path) -> str:
    """Return URL@commit of a pulled repository, as `profile pull` recorded it."""
    try:
        source = json.loads((pulled / "source.json").read_text(encoding="utf-8"))
        return f"{source['url']}@{source['commit'][:12]}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"pulled {pulled.name}"


def _list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(
            entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        return []
