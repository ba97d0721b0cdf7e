"""Find the profile that fits best (`--profile auto`), and record every step of the search.

Order: model, task, device, dtype. The named task comes before `any`. Within a task, profiles of
this device come first and unmeasured recipes last; within a device, profiles of the same dtype come
first. Within a step, the earlier folder wins. If no task is named, profiles of the tasks that were
measured on this device come before profiles of other devices and unmeasured ones: `chat` first,
then the task that was measured on most prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.compatibility import MachineFacts, ModelFacts, compatibility_warnings
from skipsearch.profile.load import load_profile
from skipsearch.profile.paths import (
    ANY,
    ProfileFolder,
    device_slug,
    model_folder,
    search_folders,
    weights_slug,
)
from skipsearch.profile.schema import Profile

CHAT = "chat"  # the task of conversations
NO_PROFILE = "none"  # outcome of a step that found no file


@dataclass(frozen=True, slots=True)
class SearchStep:
    """A step of the search and its outcome, in words."""

    criterion: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.criterion}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """The outcome of a search for a profile."""

    profile: Profile | None  # None: no step found one
    path: Path | None
    warnings: tuple[str, ...]
    steps: tuple[SearchStep, ...]  # every step that was tried
    tasks: tuple[str, ...] = ()  # tasks that have profiles of this model, if none was found


@dataclass(frozen=True, slots=True)
class ListedProfile:
    """A file in a searched folder: a profile, or the reason why it cannot be loaded."""

    source: ProfileFolder
    path: Path
    profile: Profile | None
    error: str | None


def find_profile(
    model: ModelFacts, machine: MachineFacts, task: str = ANY, folder: Path | None = None
) -> ProfileMatch:
    """Return the best profile for this model, task and machine.

    The folders of `search_folders(folder)` are searched. A file that cannot be read or is for
    another architecture is skipped, and its step says why. Raises: ProfileError if `folder` is not
    a folder.
    """
    sources = [source.folder for source in search_folders(folder)]
    homes = [source / model_folder(model.id) for source in sources]
    homes = [home for home in homes if home.is_dir()]
    steps = [
        SearchStep(f"model {model.id}", f"in {len(homes) or 'none'} of {len(sources)} folders")
    ]
    files = [path for home in homes for path in sorted(home.glob("*/*--*.yaml"))]
    match = _first_match(files, model, machine, task, steps)
    if match is not None:
        return match
    renamed = _find_same_weights(sources, homes, model)
    if renamed:
        names = ", ".join(dict.fromkeys(path.parts[-3] for path in renamed))
        steps.append(SearchStep("a model of another name with the same weights", names))
        match = _first_match(renamed, model, machine, task, steps)
    tasks = tuple(sorted({path.parent.name for path in [*files, *renamed]}))
    return match or ProfileMatch(None, None, (), tuple(steps), tasks)


def _first_match(
    files: list[Path], model: ModelFacts, machine: MachineFacts, task: str, steps: list[SearchStep]
) -> ProfileMatch | None:
    """Return the first usable profile in order of preference; append each attempt to `steps`."""
    for criterion, candidates in _candidates_by_criterion(files, model, machine, task):
        refusals = []
        for path in candidates:
            try:
                profile = load_profile(path)
                warnings = compatibility_warnings(profile, model, machine)
            except ProfileError as error:
                refusals.append(f"refused {path} ({error})")
                continue
            if path.parent.name not in (task, ANY):
                warnings = [
                    f"no task was named, so this is the profile for {path.parent.name}, "
                    f"{_describe_choice(files, machine)}; --task names another",
                    *warnings,
                ]
            usable = len(candidates) - len(refusals)  # all files of a step rank equally
            first = f", the first of {usable} in the order of the folders" if usable > 1 else ""
            steps.append(SearchStep(criterion, "; ".join([*refusals, f"using {path}{first}"])))
            return ProfileMatch(profile, path, tuple(warnings), tuple(steps))
        steps.append(SearchStep(criterion, "; ".join(refusals) or NO_PROFILE))
    return None


def _find_same_weights(folders: list[Path], searched: list[Path], model: ModelFacts) -> list[Path]:
    """Return profiles of the same weights under another name, outside the folders `searched`.

    A local model has the name of its folder, which the user may rename.
    """
    if model.weights_sha256 is None:
        return []
    matches = []
    for folder in folders:
        for path in sorted(folder.glob("*/*/*--*.yaml")):
            if path.parents[1] not in searched:
                with suppress(ProfileError):
                    if load_profile(path).model.weights_sha256 == model.weights_sha256:
                        matches.append(path)
    return matches


def _candidates_by_criterion(
    files: list[Path], model: ModelFacts, machine: MachineFacts, task: str
) -> Iterator[tuple[str, list[Path]]]:
    """Yield (criterion, files that meet it), best first; `files` keep their order."""
    device = device_slug(machine.name, machine.count)
    dtype = weights_slug(model.dtype, model.quantization)

    def mismatch(path: Path) -> tuple[bool, bool] | None:
        """Return (another device, another dtype); None if the recipe was never measured."""
        file_device, _, file_dtype = path.stem.rpartition("--")
        return None if file_device == ANY else (file_device != device, file_dtype != dtype)

    def describe(mismatched: tuple[bool, bool] | None) -> str:
        if mismatched is None:
            return "unmeasured"
        other_device, other_dtype = mismatched
        return (
            f"{'another' if other_device else 'this'} device, "
            f"{'another dtype' if other_dtype else dtype}"
        )

    this_device = [(False, False), (False, True)]
    other_devices = [(True, False), (True, True), None]
    order = [(task, key) for key in [*this_device, *other_devices]] if task != ANY else []
    order += [(ANY, key) for key in this_device]
    if task == ANY:
        order += [(name, key) for name in _rank_tasks(files, machine) for key in this_device]
    order += [(ANY, key) for key in other_devices]
    for name, key in order:
        matches = [path for path in files if (path.parent.name, mismatch(path)) == (name, key)]
        yield f"task {name}, {describe(key)}", matches


def _rank_tasks(files: list[Path], machine: MachineFacts) -> list[str]:
    """Return the tasks that were measured on this device, `chat` first, then by prompts."""
    device = device_slug(machine.name, machine.count)
    n_prompts = dict[str, int]()
    for path in files:
        task = path.parent.name
        if task != ANY and path.stem.rpartition("--")[0] == device:
            with suppress(ProfileError):  # the search itself says why it is not used
                n_prompts.setdefault(task, 0)
                measured = load_profile(path).measured
                n_prompts[task] = max(n_prompts[task], measured.prompts if measured else 0)
    return sorted(n_prompts, key=lambda task: (task != CHAT, -n_prompts[task], task))


def _describe_choice(files: list[Path], machine: MachineFacts) -> str:
    """Return why the first of the measured tasks was taken."""
    first, *others = _rank_tasks(files, machine)
    if not others:
        return "the only task that was measured on this device"
    reason = "which suits most conversations" if first == CHAT else "measured on most prompts"
    return f"{reason} (also measured on this device: {', '.join(others)})"


def list_profiles(folder: Path | None = None) -> Iterator[ListedProfile]:
    """Yield every profile of the folders that are searched.

    Raises: ProfileError if `folder` is not a folder.
    """
    for source in search_folders(folder):
        for path in sorted(source.folder.glob("*/*/*.yaml")):
            try:
                yield ListedProfile(source, path, load_profile(path), None)
            except ProfileError as error:
                yield ListedProfile(source, path, None, str(error))
