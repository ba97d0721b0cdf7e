"""Copy the trained modules of a profile to the folder where its readers look for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skipsearch.core.files import save_file
from skipsearch.core.recipe import DrafterSpec
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.module_files import find_module_file, read_module_header
from skipsearch.errors import ModuleError, ProfileError
from skipsearch.profile.paths import find_repository
from skipsearch.profile.schema import Profile

MODULES_FOLDER = "modules"  # next to a profile; in a repository, next to the tasks of its model


def copy_modules(profile: Profile, sources: Sequence[Path], target: Path) -> Profile:
    """Copy a profile's modules for the file `target`; return the profile with their new paths.

    Each module is taken from the first folder of `sources` that has it. In a repository, all tasks
    of the model share the copy; elsewhere, the copy is next to the profile. Raises: ModuleError,
    ProfileError.
    """
    home = target.absolute().parent
    shared = home.parent if find_repository(target) is not None else home
    copied_refs = {
        ref: _copy_module(ref, sources, home, shared) for ref in profile.measured_recipe.modules
    }
    recipes = {
        key: tuple(_with_copied_module(drafter, copied_refs) for drafter in getattr(profile, key))
        for key in ("drafters", "lost")
    }
    return (profile.model_copy(update=recipes) if copied_refs else profile).located_in(home)


def module_problem(profile: Profile) -> str | None:
    """Return a sentence about the first module that does not fit the profile; None if all do."""
    for ref in profile.measured_recipe.modules:
        try:
            card = read_module_header(find_module_file(ref, profile.module_folders)).card
        except ModuleError as error:
            return str(error)
        trained_for, profiled = card.base.weights_sha256, profile.model.weights_sha256
        if None not in (trained_for, profiled) and trained_for != profiled:
            return f"the module {ref.file} was trained for other weights than the profile is for"
    return None


def _copy_module(
    ref: ModuleRef, sources: Sequence[Path], profile_folder: Path, shared_folder: Path
) -> ModuleRef:
    in_modules = ref.model_copy(update={"file": f"{MODULES_FOLDER}/{Path(ref.file).name}"})
    for present in (ref, in_modules):
        with suppress(ModuleError):
            find_module_file(present, (profile_folder, profile_folder.parent))
            return present
    path = find_module_file(ref, sources)
    # With the hash in its name, a later training of the same name does not replace it.
    name = f"{path.stem[:60]}-{ref.sha256[:8]}.safetensors"
    save_file(shared_folder / MODULES_FOLDER / name, path.read_bytes(), ProfileError)
    return ref.model_copy(update={"file": f"{MODULES_FOLDER}/{name}"})


def _with_copied_module(
    drafter: DrafterSpec, copied_refs: dict[ModuleRef, ModuleRef]
) -> DrafterSpec:
    module = getattr(drafter, "module", None)
    return drafter if module is None else drafter.model_copy(update={"module": copied_refs[module]})
