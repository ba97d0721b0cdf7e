"""`--profile` and `--model` of the commands that decode: a file, `auto` or `none`, and the model that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import by_loader, load, model_of, require, settle, warn
from skipsearch.profile.places import ANY

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile

ProfileChoice = Annotated[str, typer.Option(help="A file, `auto` (the best profile found for this machine) or `none` (plain decoding).")]
AutoTask = Annotated[str, typer.Option(help="Which task `--profile auto` looks for: a name, or the .jsonl or folder that a profile was "
                                            "tuned on.")]
AutoFolder = Annotated[Path | None, typer.Option(help="A folder that `--profile auto` searches first.")]


def open_both(profile: str, model: str | None, task: str, folder: Path | None, device: str, dtype: str, quantization: str | None,
              engine: str, threads: int | None) -> tuple[ModelAdapter, Profile | None]:
    """The model, driven by the engine that suits the profile, and the profile; None for plain decoding.

    Raises: SkipSearchError, before a model is loaded where that is possible.
    """
    require_model(profile, model)
    from skipsearch.profile import load_profile

    loaded = load_profile(profile) if profile not in ("auto", "none") else None
    named = model or (model_of(loaded) if loaded else "")
    if loaded is not None:
        if model is not None:
            _refuse_another(loaded, model)
        dtype, threads, quantization = as_measured(loaded, device, dtype, threads, quantization)
    adapter = load(named, device, dtype, engine, threads, quantization, loaded.engine if loaded else None)
    if profile == "auto":
        loaded = look_up(adapter, named, task, folder, own_threads=threads is None)
    return settle(adapter, engine, loaded.engine if loaded else None), loaded


def as_measured(profile: Profile, device: str, dtype: str, threads: int | None,
                quantization: str | None) -> tuple[str, int | None, str | None]:
    """(dtype, threads, quantization): what the user left open of them, as it was when the profile was measured.

    On another kind of device everything stays open, and on another machine the threads, since its cores are others.
    """
    from skipsearch.machine import this_machine
    from skipsearch.models.place import pick_device

    place, claimed, made = pick_device(device), profile.hardware, profile.model
    if claimed is None or claimed.kind != place.type:
        return dtype, threads, quantization
    if threads is None and claimed.name == this_machine(place).name:
        threads = claimed.threads
    return made.dtype or dtype if dtype == "auto" else dtype, threads, quantization or by_loader(made.quantization)


def task_of(profile: Profile, task: str | None) -> str:
    """The task that is named, or else the profile's own. Raises: TaskError if that is one of somebody's own, which only they can name."""
    from skipsearch.errors import TaskError
    from skipsearch.tasks import task_names

    if task is None and profile.task.name == ANY:
        raise TaskError("this profile is for any task: say with --task on which one to measure it")
    if task is None and profile.task.name not in task_names():
        raise TaskError(f"this profile was tuned on {profile.task.name!r}, which is no task that comes with skipsearch: give --task with "
                        "the .jsonl file or the folder that it was tuned on, or with another task")
    return task or profile.task.name


def _refuse_another(profile: Profile, named: str) -> None:
    """What the config of a model that lies here says against the profile, before its weights are read. Raises: ProfileError, ModelError."""
    from skipsearch.models.config import known_config
    from skipsearch.models.hub import locate
    from skipsearch.profile.match import ModelFacts, check

    if named == "demo" or Path(named).expanduser().is_dir():
        folder, identity, _ = locate(named)
        config = known_config(folder, named)
        check(profile, ModelFacts(identity, config.model_type, config.get_text_config(decoder=True).num_hidden_layers))


def require_model(profile: str, model: str | None) -> None:
    """Raises: BadParameter where nothing says which model is meant."""
    require(model is not None or profile != "auto", "--profile auto needs --model")
    require(model is not None or profile != "none", "give --model, or --profile FILE, which names its model")


def decoder_of(model: ModelAdapter, profile: Profile | None, exact: bool = False, remember: int = 0) -> Decoder:
    """Decodes as the profile says; one that nobody measured is guarded by what this machine's latency table says, where there is one.

    Raises: SkipSearchError.
    """
    from skipsearch.decoding import Decoder
    from skipsearch.evaluation.prices import prices_here

    return Decoder(model, profile, exact=exact, prices=None if profile is None else prices_here(profile, model), remember=remember)


def look_up(model: ModelAdapter, named: str, task: str, folder: Path | None, own_threads: bool = False) -> Profile | None:
    """What `--profile auto` finds, told on stderr with what it passed by.

    named: as the user named the model. own_threads: the number of threads is the profile's, where it was measured on this machine.
    Raises: TaskError for a task of one's own that cannot be read.
    """
    import torch

    from skipsearch.cli.common import err
    from skipsearch.decoding.matching import machine_facts, model_facts
    from skipsearch.profile.lookup import NONE, find_profile
    from skipsearch.tasks import task_name

    task = task_name(task)
    found = find_profile(model_facts(model.spec), machine_facts(model.spec), task, folder)
    for rung in found.rungs if found.profile is None else found.rungs[1:]:
        if rung.outcome != NONE:
            err.print(f"{rung}", style="dim")
    if found.profile is None:
        warn([f"no profile of {model.spec.id} {'for any task' if task == ANY else f'for the task {task}'} was found, so decoding is "
              f"plain; {_way_out(named, task, found.tasks)}"])
        return None
    if own_threads and (threads := as_measured(found.profile, str(model.spec.device), "auto", None, None)[1]):
        torch.set_num_threads(threads)
    return found.profile


def _way_out(named: str, task: str, tasks: Sequence[str]) -> str:
    if near := get_close_matches(task, tasks, n=1):
        return f"did you mean --task {near[0]}?"
    match tasks:
        case []:
            return f"`skipsearch tune --model {named} --task …` makes one"
        case [only]:
            return f"there is one for {only}: give --task {only}"
        case [*others, last]:
            return f"there are profiles for {', '.join(others)} and {last}: choose one with --task"
    raise AssertionError(tasks)


def say_verdict(profile: Profile | None) -> None:
    """What a user should know of a profile before its speed surprises them."""
    if profile is not None and profile.verdict == "plain":
        warn(["this profile says that nothing beat plain decoding where it was made, so decoding is plain"])
    if profile is not None and profile.verdict == "unmeasured":
        warn(["this profile was imported and never measured here: it may be slower than plain decoding"])
