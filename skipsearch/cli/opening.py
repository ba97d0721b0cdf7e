"""`--profile` and `--model` of the commands that decode: a file, `auto` or `none`, and the model that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import load, model_of, require, settle, warn

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile

ProfileChoice = Annotated[str, typer.Option(help="A file, `auto` (the best one found for this machine) or `none`.")]
AutoTask = Annotated[str, typer.Option(help="Which task `--profile auto` looks for.")]
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
    if loaded is not None and model is not None:
        _refuse_another(loaded, model)
    adapter = load(named, device, dtype, engine, threads, quantization, loaded.engine if loaded else None)
    if profile == "auto":
        loaded = look_up(adapter, named, task, folder)
    return settle(adapter, engine, loaded.engine if loaded else None), loaded


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


def look_up(model: ModelAdapter, named: str, task: str, folder: Path | None) -> Profile | None:
    """What `--profile auto` finds, told on stderr with every rung of the ladder. named: as the user named the model."""
    from skipsearch.cli.common import err
    from skipsearch.decoding.matching import machine_facts, model_facts
    from skipsearch.profile.lookup import find_profile

    found = find_profile(model_facts(model.spec), machine_facts(model.spec), task, folder)
    for rung in found.rungs:
        err.print(f"  {rung}", style="dim")
    if found.profile is None:
        way_out = f"`--task {found.tasks[0]}` takes the one for {' or '.join(found.tasks)}" if found.tasks else \
            f"`skipsearch tune --model {named} --task …` makes one"
        warn([f"no profile for {model.spec.id} and task {task} was found, so decoding is plain; {way_out}"])
    return found.profile


def say_verdict(profile: Profile | None) -> None:
    """What a user should know of a profile before its speed surprises them."""
    if profile is not None and profile.verdict == "plain":
        warn(["this profile says that nothing beat plain decoding where it was made, so decoding is plain"])
    if profile is not None and profile.verdict == "unmeasured":
        warn(["this profile was imported and never measured here: it may be slower than plain decoding"])
