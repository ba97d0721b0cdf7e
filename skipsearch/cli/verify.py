"""`skipsearch profile verify`: measure a profile here and say whether its claim holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.opening import task_of
from skipsearch.cli.options import Device, Dtype, Engine, Json, Quantization, Threads, by_loader, model_of, open_model, require, warn

if TYPE_CHECKING:
    from skipsearch.profile import Profile
    from skipsearch.verification import Verification


def verify(file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
           model: Annotated[str | None, typer.Option(help="The model. Default: the profile's own.")] = None,
           task: Annotated[str | None, typer.Option(help="Whose hold-out prompts to use. Default: the profile's own task.")] = None,
           prompts: Annotated[int | None, typer.Option(min=2, help="Number of hold-out prompts. Default: all of the task's.")] = None,
           device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
           threads: Threads = None,
           write: Annotated[bool, typer.Option("--write", help="Write the measurement into the profile, if it was unmeasured.")] = False,
           strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 unless the claim holds.")] = False,
           as_json: Json = False) -> None:
    """Example: skipsearch profile verify my-profile.yaml

    Measure a profile again on this machine, against plain decoding on hold-out prompts, and say whether its claim holds here and what
    differs. Device, dtype, quantization, engine and threads are as in the profile unless you set them, where this machine has such a
    device.

    An unmeasured profile claims nothing; --write fills its figures in. In a profile repository the measured profile becomes a new file,
    named after this device.
    """
    from skipsearch.profile import load_profile, save_profile
    from skipsearch.profile.modules import place_modules
    from skipsearch.profile.places import ANY
    from skipsearch.tasks import load_task
    from skipsearch.verification import verify as run

    profile = load_profile(file)
    require(not write or profile.measured is None, "--write fills in unmeasured profiles, and this one has been measured: "
            "`skipsearch tune` makes one for this machine")
    require(task is not None or profile.task.name != ANY, "this profile is for any task: say with --task on which one to measure it")
    chosen = load_task(task_of(profile, task))
    warn([*chosen.notes])
    adapter = open_model(model or model_of(profile), *_as_claimed(profile, device, dtype, engine, threads, quantization))
    target = _target(file, adapter, chosen.name) if write else None
    from skipsearch.cli.common import err, out, print_json
    from skipsearch.cli.progress import Bar

    with Bar(err) as bar:
        running = bar.add_task("decoding", total=None)
        found = run(adapter, profile, chosen, prompts, progress=lambda done, total: bar.update(running, completed=done, total=total))
    if target:
        save_profile(place_modules(found.here, profile.folders, target), target, replace=True)
    if as_json:
        print_json({"file": str(file), **found.as_dict(), "written": str(target) if target else None})
    else:
        out.print(*_lines(found), *([f"written to {target}"] if target else []), sep="\n")
    if strict and not found.holds:
        raise typer.Exit(1)


def _as_claimed(profile: Profile, device: str, dtype: str, engine: str, threads: int | None,
                quantization: str | None) -> tuple[str, str, str, int | None, str | None]:
    """What the user left open, as it was when the claim was made, where this machine has that kind of device."""
    import torch

    claimed, made = profile.hardware, profile.model
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if claimed is None or not here[claimed.kind]:
        return device, dtype, engine, threads, quantization
    if not (device == "auto" or device.startswith(claimed.kind)):
        return device, dtype, engine, threads, quantization
    device = claimed.kind if device == "auto" else device
    dtype = made.dtype or dtype if dtype == "auto" else dtype
    engine = profile.engine or engine if engine == "auto" else engine
    return device, dtype, engine, threads or claimed.threads, quantization or by_loader(made.quantization)


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

    claim, measured = found.claim, found.here.measured
    assert measured is not None
    lines = [f"claimed  {speedup(claim)}, {device(claim)}" if claim.measured else "claimed  nothing: the profile is unmeasured",
             f"here     {speedup(found.here)} on {measured.prompts} hold-out prompts of {found.here.task.name}, {device(found.here)}",
             f"time     {measured.ms_per_token.in_words(' ms')} a token, plain decoding {measured.baseline_ms_per_token.in_words(' ms')}",
             f"tokens   {found.tokens_in_words()}"]
    return [*lines, *(f"differs  {difference}" for difference in found.differences), found.sentence]
