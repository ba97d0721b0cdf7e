"""Open what `--profile` (a file, `auto` or `none`) and `--model` name.

The commands that decode use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipsearch.cli.options import (
    LoadOptions,
    load_cli_model,
    profile_model_argument,
    require_usage,
    select_engine,
    warn,
)
from skipsearch.profile.paths import ANY

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile
    from skipsearch.profile.compatibility import ModelFacts

ProfileChoice = Annotated[
    str,
    typer.Option(
        help="A file, `auto` (the best profile found for this machine) or `none` (plain decoding)."
    ),
]


@dataclass(frozen=True)
class ProfileSearch:
    """The options that say what `--profile auto` looks for."""

    task: Annotated[
        str,
        typer.Option(
            help="Which task `--profile auto` looks for: a name, or the .jsonl or folder that a "
            "profile was tuned on."
        ),
    ] = ANY
    profiles: Annotated[
        Path | None, typer.Option(help="A folder that `--profile auto` searches first.")
    ] = None


def load_model_and_profile(
    profile: str, model: str | None, search: ProfileSearch, loading: LoadOptions
) -> tuple[ModelAdapter, Profile | None]:
    """Return (the model on the engine that suits the profile, the profile).

    The profile is None for plain decoding. Raises: SkipSearchError, before the model is loaded if
    possible.
    """
    require_model(profile, model)
    from skipsearch.profile import load_profile

    loaded = load_profile(profile) if profile not in ("auto", "none") else None
    named = model or (profile_model_argument(loaded) if loaded else "")
    if loaded is not None:
        if model is not None:
            _require_same_model(loaded, model)
        loading = loading.with_profile(loaded)
    if (profile, loading.dtype, loading.weights) == ("auto", "auto", None):
        loading = replace(loading, dtype=find_auto_dtype(named, search, loading.device))
    adapter = load_cli_model(named, loading, loaded.engine if loaded else None)
    if profile == "auto":
        loaded = find_profile_for(adapter, named, search, profile_threads=loading.threads is None)
    adapter = select_engine(adapter, loading.engine, loaded.engine if loaded else None)
    if profile == "auto" and loaded is not None and adapter.spec.engine != loaded.engine:
        loaded = _drop_unless_it_runs(loaded, adapter)
    return adapter, loaded


def _drop_unless_it_runs(profile: Profile, model: ModelAdapter) -> Profile | None:
    """Return the profile; None, with a warning, if its drafts cannot run on the model's engine."""
    from skipsearch.decoding import Decoder
    from skipsearch.errors import ModelError

    try:
        Decoder(model, profile)
    except ModelError as error:
        warn([f"the drafts of this profile cannot run here, so decoding is plain: {error}"])
        return None
    return profile


def find_auto_dtype(model_name: str, search: ProfileSearch, device: str) -> str:
    """Return the dtype of the profile that `--profile auto` finds for this type of device.

    Without one, or if the model cannot be opened, return `auto`. No weights are read, so the
    profile is one for a model of this name and shape.
    """
    from skipsearch.core.machine import describe_machine
    from skipsearch.decoding.as_measured import defaults_from_profile
    from skipsearch.errors import SkipSearchError
    from skipsearch.models.loading.placement import pick_device
    from skipsearch.profile.compatibility import MachineFacts
    from skipsearch.profile.find import find_profile
    from skipsearch.tasks import task_name

    try:
        place = pick_device(device)
        machine = describe_machine(place)
        default = "float32" if place.type == "cpu" else "bfloat16"
        profile = find_profile(
            _read_model_facts(model_name, default),
            MachineFacts(machine.kind, machine.name, machine.count),
            task_name(search.task),
            search.profiles,
        ).profile
    except SkipSearchError:  # loading the model or the task says why
        return "auto"
    if profile is None:
        return "auto"
    return defaults_from_profile(profile, device, "auto", None, None)[0]


def _read_model_facts(model_name: str, dtype: str) -> ModelFacts:
    """Return what a model's config says. Raises: ModelError."""
    from skipsearch.models.loading.config import load_config
    from skipsearch.models.loading.gguf_model import identify_gguf, is_gguf
    from skipsearch.models.loading.hub import resolve_model
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.profile.compatibility import ModelFacts

    file = find_model_file(model_name)
    if is_gguf(file):
        identity, family, n_layers, quantization = identify_gguf(file)
        return ModelFacts(identity, family, n_layers, dtype=dtype, quantization=quantization)
    folder, identity, _ = resolve_model(model_name, weights=False)
    config = load_config(folder, model_name)
    n_layers = config.get_text_config(decoder=True).num_hidden_layers
    return ModelFacts(identity, config.model_type, n_layers, dtype=dtype)


def resolve_task(profile: Profile, task: str | None) -> str:
    """Return the task that the user named, or else the profile's own.

    Raises: TaskError if the profile's task does not come with skipsearch, so that the user has to
    name it.
    """
    from skipsearch.errors import TaskError
    from skipsearch.tasks import task_names

    if task is None and profile.task.name == ANY:
        raise TaskError("this profile is for any task: say with --task on which one to measure it")
    if task is None and profile.task.name not in task_names():
        raise TaskError(
            f"this profile was tuned on {profile.task.name!r}, which is no task that comes with "
            "skipsearch: give --task with "
            "the .jsonl file or the folder that it was tuned on, or with another task"
        )
    return task or profile.task.name


def _require_same_model(profile: Profile, model_name: str) -> None:
    """Check a profile against the config of a local model, before its weights are read.

    Raises: ProfileError, ModelError.
    """
    from skipsearch.profile.compatibility import compatibility_warnings

    if model_name == "demo" or Path(model_name).expanduser().is_dir():
        facts = _read_model_facts(model_name, profile.model.dtype or "float32")
        compatibility_warnings(profile, facts)


def require_model(profile: str, model: str | None) -> None:
    """Raise BadParameter if neither --model nor a profile names the model."""
    require_usage(model is not None or profile != "auto", "--profile auto needs --model")
    require_usage(
        model is not None or profile != "none",
        "give --model, or --profile FILE, which names its model",
    )


def make_decoder(
    model: ModelAdapter, profile: Profile | None, exact: bool = False, remember_tokens: int = 0
) -> Decoder:
    """Return a decoder for the profile.

    Its guard pauses drafters that cost more than they save, by the costs in the profile.
    Raises: SkipSearchError.
    """
    from skipsearch.decoding import Decoder

    return Decoder(model, profile, exact=exact, remember_tokens=remember_tokens)


def find_profile_for(
    model: ModelAdapter, model_name: str, search: ProfileSearch, profile_threads: bool = False
) -> Profile | None:
    """Return the profile that `--profile auto` finds, and print on stderr what it rejected.

    model_name: as the user named the model.
    profile_threads: use the profile's number of threads if it was measured on this machine.

    Raises: TaskError for a task of the user's own that cannot be read.
    """
    import torch

    from skipsearch.cli.consoles import err
    from skipsearch.decoding.as_measured import defaults_from_profile
    from skipsearch.decoding.match_model import collect_machine_facts, collect_model_facts
    from skipsearch.profile.find import NO_PROFILE, find_profile
    from skipsearch.tasks import task_name

    task = task_name(search.task)
    match = find_profile(
        collect_model_facts(model.spec), collect_machine_facts(model.spec), task, search.profiles
    )
    for step in match.steps[1:] if match.profile or match.tasks else match.steps:
        if step.outcome != NO_PROFILE:
            err.print(f"{step}", style="dim")
    if match.profile is None:
        warn(
            [
                f"no profile of {model.spec.id} "
                f"{'is for every task' if task == ANY else f'is for the task {task}'}, so decoding "
                f"is plain; {_suggest_task(model_name, task, match.tasks)}"
            ]
        )
        return None
    if profile_threads and (
        threads := defaults_from_profile(match.profile, str(model.spec.device), "auto", None, None)[
            1
        ]
    ):
        torch.set_num_threads(threads)
    return match.profile


def _suggest_task(model_name: str, task: str, tasks: Sequence[str]) -> str:
    """Return advice for a search that found no profile for the task."""
    if near := get_close_matches(task, tasks, n=1):
        return f"did you mean --task {near[0]}?"
    match tasks:
        case []:
            return f"`skipsearch tune --model {model_name} --task …` makes one"
        case [only]:
            return f"there is one for {only}: give --task {only}"
        case [*others, last]:
            return f"there are profiles for {', '.join(others)} and {last}: choose one with --task"
    raise AssertionError(tasks)


def warn_about_verdict(
    profile: Profile | None, sampling: Mapping[str, Any] | None = None, use: str = "is used with"
) -> None:
    """Warn of a profile that decodes plainly, was never measured, or was made for other sampling.

    sampling: temperature, top_p and top_k of the requests, as far as they have them. use: what the
    warning says of these.
    """
    from pydantic import ValidationError

    from skipsearch.profile.compatibility import sampling_warnings
    from skipsearch.profile.schema import ProfileSampling

    if profile is not None and sampling is not None:
        values = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **sampling}
        with suppress(ValidationError):  # the server names a value that is none
            used = ProfileSampling(**{name: values[name] for name in ProfileSampling.model_fields})
            warn(sampling_warnings(profile, used, use))
    if profile is not None and profile.verdict == "plain":
        warn(
            [
                "this profile says that nothing beat plain decoding where it was made, so decoding "
                "is plain"
            ]
        )
    if profile is not None and profile.verdict == "unmeasured":
        warn(
            [
                "this profile was imported and never measured here: it may be slower than plain "
                "decoding"
            ]
        )
