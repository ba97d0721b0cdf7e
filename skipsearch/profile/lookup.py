"""`--profile auto`: down a ladder from the profile that fits best to one that fits at all, telling what each rung held.

Model → task → device → dtype: the wanted task before `any`; within a task this device before others, and recipes that were never
measured last; within a device the same dtype first. On one rung the earlier folder wins. Where no task is named and only one was measured
on this device, its profile comes before those that were never measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import ProfileError
from skipsearch.profile.load import load_profile
from skipsearch.profile.match import MachineFacts, ModelFacts, check
from skipsearch.profile.places import ANY, Source, device_slug, model_folder, sources, weights_slug
from skipsearch.profile.schema import Profile

NONE = "none"   # what came of a rung that no file stands on


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder and what came of it, in words."""

    wanted: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.wanted}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class Found:
    """The profile to use, its file and its warnings, or None where no rung held one; every rung that was tried; then also the tasks that
    there are profiles of this model for."""

    profile: Profile | None
    path: Path | None
    warnings: tuple[str, ...]
    rungs: tuple[Rung, ...]
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in one of the searched folders: a profile, or why it is none."""

    source: Source
    path: Path
    profile: Profile | None
    fault: str | None


def find_profile(model: ModelFacts, machine: MachineFacts, task: str = ANY, folder: Path | None = None) -> Found:
    """The best profile for this model, task and machine in the folders that are searched, `folder` first if given.

    A file that cannot be read or is for another architecture is passed by, and its rung says why.
    Raises: ProfileError if `folder` is not a folder.
    """
    rungs: list[Rung] = []
    searched = [(source.folder / model_folder(model.id)) for source in sources(folder)]
    homes = [home for home in searched if home.is_dir()]
    rungs.append(Rung(f"model {model.id}", f"in {len(homes) or 'none'} of {len(searched)} folders"))
    files = [path for home in homes for path in sorted(home.glob("*/*--*.yaml"))]
    found = _climb(files, model, machine, task, rungs)
    if found is not None:
        return found
    elsewhere = _of_these_weights([source.folder for source in sources(folder)], homes, model)
    if elsewhere:
        rungs.append(Rung("a model of another name with the same weights", ", ".join(dict.fromkeys(p.parts[-3] for p in elsewhere))))
        found = _climb(elsewhere, model, machine, task, rungs)
    return found or Found(None, None, (), tuple(rungs), tuple(sorted({path.parent.name for path in [*files, *elsewhere]})))


def _climb(files: list[Path], model: ModelFacts, machine: MachineFacts, task: str, rungs: list[Rung]) -> Found | None:
    """What the ladder over these files holds; what was tried is added to `rungs`."""
    for wanted, candidates in _ladder(files, model, machine, task):
        refusals = []
        for path in candidates:
            try:
                profile = load_profile(path)
                warnings = check(profile, model, machine)
            except ProfileError as error:
                refusals.append(f"refused {path} ({error})")
                continue
            if path.parent.name not in (task, ANY):
                warnings = [f"no task was named, so this is the profile for {path.parent.name}, the only task that was measured on this "
                            "device; --task names another", *warnings]
            others = len(candidates) - len(refusals) - 1   # a rung says nothing about which of its files is better
            first = f", the first of {others + 1} in the order of the folders" if others else ""
            rungs.append(Rung(wanted, "; ".join([*refusals, f"using {path}{first}"])))
            return Found(profile, path, tuple(warnings), tuple(rungs))
        rungs.append(Rung(wanted, "; ".join(refusals) or NONE))
    return None


def _of_these_weights(folders: list[Path], known: list[Path], model: ModelFacts) -> list[Path]:
    """Profiles that were made for the same weights under another name: a local model is named by its folder, which may be renamed."""
    if model.weights_sha256 is None:
        return []
    found = []
    for path in (path for folder in folders for path in sorted(folder.glob("*/*/*--*.yaml")) if path.parents[1] not in known):
        with suppress(ProfileError):
            if load_profile(path).model.weights_sha256 == model.weights_sha256:
                found.append(path)
    return found


def _ladder(files: list[Path], model: ModelFacts, machine: MachineFacts, task: str) -> Iterator[tuple[str, list[Path]]]:
    """(what this rung wants, the files on it), best first; `files` are in the order in which their folders are searched."""
    here, dtype = device_slug(machine.name, machine.count), weights_slug(model.dtype, model.quantization)

    def fit(path: Path) -> str:
        made_on, _, made_in = path.stem.rpartition("--")
        if made_on == ANY:
            return "unmeasured"
        return f"{'this' if made_on == here else 'another'} device, {dtype if made_in == dtype else 'another dtype'}"

    rungs = [f"{device} device, {kind}" for device in ("this", "another") for kind in (dtype, "another dtype")] + ["unmeasured"]

    def on(name: str, wanted: list[str]) -> Iterator[tuple[str, list[Path]]]:
        of_task = [path for path in files if path.parent.name == name]
        return ((f"task {name}, {rung}", [path for path in of_task if fit(path) == rung]) for rung in wanted)

    if task != ANY:
        yield from on(task, rungs)
    yield from on(ANY, rungs[:2])
    measured_here = {path.parent.name for path in files if fit(path).startswith("this")} - {ANY}
    if task == ANY and len(measured_here) == 1:
        yield from on(measured_here.pop(), rungs[:2])
    yield from on(ANY, rungs[2:])


def list_profiles(folder: Path | None = None) -> Iterator[Listed]:
    """Every profile in the folders that are searched. Raises: ProfileError if `folder` is not a folder."""
    for source in sources(folder):
        for path in sorted(source.folder.glob("*/*/*.yaml")):
            try:
                yield Listed(source, path, load_profile(path), None)
            except ProfileError as error:
                yield Listed(source, path, None, str(error))
