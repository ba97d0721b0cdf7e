"""`skipsearch profile verify`: measure a profile here and say whether its claim holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import Device, Dtype, Engine, Json, Threads, open_model, require, warn

if TYPE_CHECKING:
    from skipsearch.profile import Profile
    from skipsearch.verification import Verification


def verify(file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
           model: Annotated[str | None, typer.Option(help="Which model; the profile's own if not given.")] = None,
           task: Annotated[str | None, typer.Option(help="Whose hold-out prompts; the profile's own task if not given.")] = None,
           prompts: Annotated[int | None, typer.Option(min=2, help="Hold-out prompts; all of the task's if not given.")] = None,
           device: Device = "auto", dtype: Dtype = "auto", engine: Engine = "auto", threads: Threads = None,
           write: Annotated[bool, typer.Option("--write", help="Fill an unmeasured profile in with what was measured.")] = False,
           strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 unless the claim holds.")] = False,
           as_json: Json = False) -> None:
    """Example: skipsearch profile verify my-profile.yaml

    Measure a profile again on this machine, on hold-out prompts interleaved with plain decoding, and say whether its claim holds here and
    what differs. Device, dtype, engine and threads are the claim's own where this machine has them. An unmeasured profile claims nothing:
    --write fills it in. In a profile repository that file gets the name of this device, beside the unmeasured one.
    """
    from skipsearch.profile import load_profile, save_profile
    from skipsearch.profile.places import ANY
    from skipsearch.tasks import load_task
    from skipsearch.verification import verify as run

    profile = load_profile(file)
    require(not write or profile.measured is None, "--write fills in unmeasured profiles, and this one has been measured: "
            "`skipsearch tune` makes one for this machine")
    require(task is not None or profile.task.name != ANY, "this profile is for any task: say with --task on which one to measure it")
    chosen = load_task(task or profile.task.name)
    warn([*chosen.notes])
    hardware = profile.hardware
    adapter = open_model(
        model or profile.model.id, _device(profile) if device == "auto" else device,
        profile.model.dtype or dtype if dtype == "auto" else dtype,
        profile.engine or engine if engine == "auto" else engine,
        threads or (hardware.threads if hardware else None))
    target = _target(file, adapter, chosen.name) if write else None
    from rich.progress import Progress

    from skipsearch.cli.common import err, out, print_json

    with Progress(console=err, disable=not err.is_terminal, transient=True) as bar:
        running = bar.add_task("decoding", total=None)
        found = run(adapter, profile, chosen, prompts, progress=lambda done, total: bar.update(running, completed=done, total=total))
    if target:
        save_profile(found.here, target)
    if as_json:
        print_json({"file": str(file), **found.as_dict(), "written": str(target) if target else None})
    else:
        out.print("\n".join([*_lines(found), *([f"written to {target}"] if target else [])]), markup=False)
    if strict and not found.holds:
        raise typer.Exit(1)


def _device(profile: Profile) -> str:
    import torch

    claimed = profile.hardware.kind if profile.hardware else "auto"
    return "auto" if claimed == "cuda" and not torch.cuda.is_available() else claimed


def _target(file: Path, adapter: object, task: str) -> Path:
    """Where the measured profile goes; asked before the measurement. Raises: ProfileError if another profile is there already."""
    from skipsearch.cli.tune import default_path
    from skipsearch.errors import ProfileError
    from skipsearch.profile.places import repository_of, user_folder

    repository = repository_of(file)
    if repository is None:
        return file
    if user_folder() / "pulled" in repository.absolute().parents:
        repository = user_folder()  # the next pull would replace what is written there
    target = repository / default_path(adapter, task)
    if target.exists():
        raise ProfileError(f"{target} exists already, a profile that was measured on such a device: verify that one, or move it away")
    return target


def _lines(found: Verification) -> list[str]:
    from skipsearch.profile.describe import device, speedup
    from skipsearch.verification import OUTCOMES

    claim, measured = found.claim, found.here.measured
    assert measured is not None
    lines = [f"claimed  {speedup(claim)}, {device(claim)}" if claim.measured else "claimed  nothing: the profile is unmeasured",
             f"here     {speedup(found.here)} on {measured.prompts} hold-out prompts of {found.here.task.name}, {device(found.here)}",
             f"time     {measured.ms_per_token.in_words(' ms')} a token, plain decoding {measured.baseline_ms_per_token.in_words(' ms')}",
             f"tokens   {found.tokens_in_words()}"]
    return [*lines, *(f"differs  {difference}" for difference in found.differences), OUTCOMES[found.outcome]]
