"""Puts the trained parts that a profile names where readers of the profile look for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skipsearch.errors import ModuleError
from skipsearch.fields import ModuleRef
from skipsearch.modules.files import find, read_header
from skipsearch.profile.dump import save_bytes
from skipsearch.profile.places import repository_of
from skipsearch.profile.schema import Profile
from skipsearch.recipe import DrafterSpec

FOLDER = "modules"   # beside a profile, or beside the tasks of its model in a repository


def place_modules(profile: Profile, sources: Sequence[Path], target: Path) -> Profile:
    """The profile as it is to be written to `target`, its modules copied there out of the first of the folders `sources` that has them.

    In a repository they go where all tasks of the model share them, else beside the profile. Raises: ModuleError, ProfileError.
    """
    home = target.absolute().parent
    shared = home.parent if repository_of(target) is not None else home
    moved = {ref: _placed(ref, sources, home, shared) for ref in profile.candidate.modules}
    recipes = {key: tuple(_renamed(drafter, moved) for drafter in getattr(profile, key)) for key in ("drafters", "lost")}
    return (profile.model_copy(update=recipes) if moved else profile).at(home)


def missing(profile: Profile) -> str | None:
    """One sentence about the first module of a profile that is not where it should be, or is not the one that is meant; None if all are."""
    for ref in profile.candidate.modules:
        try:
            card = read_header(find(ref, profile.folders)).card
        except ModuleError as error:
            return str(error)
        made_for, here = card.base.weights_sha256, profile.model.weights_sha256
        if None not in (made_for, here) and made_for != here:
            return f"the module {ref.file} was trained for other weights than the profile is for"
    return None


def _placed(ref: ModuleRef, sources: Sequence[Path], home: Path, shared: Path) -> ModuleRef:
    for there in (ref, ref.model_copy(update={"file": f"{FOLDER}/{Path(ref.file).name}"})):
        with suppress(ModuleError):
            find(there, (home, home.parent))
            return there   # it need not be copied
    path = find(ref, sources)
    name = f"{path.stem[:60]}-{ref.sha256[:8]}.safetensors"   # so that the next training of that name does not take its place
    save_bytes(path.read_bytes(), shared / FOLDER / name)
    return ref.model_copy(update={"file": f"{FOLDER}/{name}"})


def _renamed(drafter: DrafterSpec, moved: dict[ModuleRef, ModuleRef]) -> DrafterSpec:
    module = getattr(drafter, "module", None)
    return drafter if module is None else drafter.model_copy(update={"module": moved[module]})
