"""Where profiles are kept: the path of each inside a repository, and the folders that are searched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.schema import Profile

ENVIRONMENT = "SKIPSEARCH_PROFILE_PATH"
ANY = "any"  # the task, device or dtype of a profile that is for no particular one


def profile_path(profile: Profile) -> Path:
    """Where it belongs in a repository: profiles/<org>--<model>/<task>/<device-slug>--<dtype>.yaml, quantised weights behind the dtype.

    An unmeasured profile is for no device; where its dtype is not known either it is called any--any.yaml.
    """
    hardware, model = profile.hardware, profile.model
    device = device_slug(hardware.name, hardware.count) if hardware else ANY
    return place(model.id, profile.task.name, device, model.dtype, model.quantization)


def place(model_id: str, task: str, device: str, dtype: str | None, quantization: str | None) -> Path:
    """The same, of the parts. device: a slug."""
    return Path("profiles", model_folder(model_id), task, f"{device}--{weights_slug(dtype, quantization)}.yaml")


def model_folder(model_id: str) -> str:
    """`org/name` is org--name; `demo` is itself; a path to a local folder is that folder's name."""
    parts = [part for part in model_id.split("/") if part]
    is_hub_id = len(parts) == 2 and not model_id.startswith(("/", "~", "."))
    return _slug("--".join(parts) if is_hub_id else "".join(parts[-1:]))


def device_slug(name: str, count: int = 1) -> str:
    """`NVIDIA H200` is nvidia-h200, two of them 2x-nvidia-h200."""
    return _slug(f"{count}x {name}" if count > 1 else name).lower()


def weights_slug(dtype: str | None, quantization: str | None) -> str:
    """bfloat16; bfloat16-native-8bit, where the weights are quantised: a profile of these is for another model."""
    return _slug("-".join(filter(None, (dtype, quantization)))) if dtype or quantization else ANY


def _slug(text: str) -> str:
    """Safe as the name of one file or folder, anywhere; never `.`, `..` or hidden."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "unknown"


@dataclass(frozen=True, slots=True)
class Source:
    """A folder that holds <org>--<model>/<task>/*.yaml, and what to call it."""

    folder: Path
    label: str


def user_folder() -> Path:
    """The user's own data: `profiles/` for theirs, `pulled/` for repositories that `profile pull` fetched."""
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "skipsearch"


def sources(folder: Path | None = None) -> list[Source]:
    """The folders to search, first one first: `folder` (--profiles), the environment's, ./profiles, where `tune` writes, the user's, pulled
    ones, a checkout's, those of the embedded model.

    Raises: ProfileError if `folder` is given and is not a folder.
    """
    if folder is not None and not folder.is_dir():
        raise ProfileError(f"--profiles {folder} is not a folder; name one that holds profiles/ or <org>--<model>/<task>/*.yaml")
    found = [Source(_inside(folder), str(folder))] if folder is not None else []
    found += [Source(_inside(Path(entry)), entry) for entry in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if entry]
    checkout = Path(__file__).parents[2]
    if Path("profiles").is_dir() and Path.cwd().resolve() != checkout.resolve():   # a checkout's own come last
        found.append(Source(Path("profiles"), "./profiles"))
    found.append(Source(user_folder() / "profiles", "user"))
    found += [Source(pulled / "profiles", _origin(pulled)) for pulled in _folders(user_folder() / "pulled")]
    if (checkout / "pyproject.toml").is_file():  # beside an installed package, profiles/ would be somebody else's
        found.append(Source(checkout / "profiles", "this checkout"))
    # Apart from these, since `tune` in a checkout writes there.
    embedded = Path(__file__).parents[1] / "demo" / "profiles"
    if embedded.is_dir():
        found.append(Source(embedded, "embedded"))
    return found


def profile_files(folder: Path) -> Iterator[Path]:
    """Every *.yaml under a folder or, if it is a repository, under its profiles/."""
    yield from sorted(_inside(folder).rglob("*.yaml"))


def misplaced(path: Path, profile: Profile) -> str | None:
    """One sentence if a file under a folder called profiles is not where its content says it belongs."""
    root = repository_of(path)
    if root is None:
        return None
    here, there = path.absolute().relative_to(root), profile_path(profile)
    return None if here == there else f"{path}: its content belongs at {there}; rename it, so that `--profile auto` finds it"


def repository_of(path: Path) -> Path | None:
    """The folder whose profiles/ a file is in; None if it is in none."""
    return next((parent.parent for parent in path.absolute().parents if parent.name == "profiles"), None)


def _inside(folder: Path) -> Path:
    return folder / "profiles" if (folder / "profiles").is_dir() else folder


def _origin(pulled: Path) -> str:
    """URL@commit of a pulled repository, as its pull wrote down."""
    try:
        source = json.loads((pulled / "source.json").read_text(encoding="utf-8"))
        return f"{source['url']}@{source['commit'][:12]}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"pulled {pulled.name}"


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
