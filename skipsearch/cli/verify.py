"""`skipsearch profile verify`: measure a profile here and report whether its claim holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.open_model import resolve_task
from skipsearch.cli.options import (
    Json,
    LoadOptions,
    load_model_and_engine,
    profile_model_argument,
    require_usage,
    unfold_options,
    warn,
)

if TYPE_CHECKING:
    from skipsearch.profile import Profile
    from skipsearch.tuning.verification import Verification


@unfold_options
def verify(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the profile's own.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Whose hold-out prompts to use, such as the .jsonl file that was tuned on. "
            "Default: the profile's own task, if it comes with skipsearch."
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of hold-out prompts, at most. Default: all of the task's. Fewer are "
            "measured if they suffice for ±5 %.",
        ),
    ] = None,
    loading: LoadOptions,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write the measurement into the profile, if it was unmeasured."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 unless the claim holds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Example: skipsearch profile verify my-profile.yaml

    Measure a profile again on this machine, against plain decoding on hold-out prompts, and say
    whether its claim holds here and what differs. Device, dtype, quantization, engine and threads
    are as in the profile unless you set them, where this machine has such a device.

    An unmeasured profile claims nothing; --write fills its figures in. In a profile repository the
    measured profile becomes a new file, named after this device."""
    from skipsearch.profile import load_profile, save_profile
    from skipsearch.profile.copy_modules import copy_modules
    from skipsearch.profile.paths import ANY
    from skipsearch.tasks import TaskSampling, load_task
    from skipsearch.tuning.verification import verify as run

    profile = load_profile(file)
    require_usage(
        not write or profile.measured is None,
        "--write fills in unmeasured profiles, and this one has been measured: "
        "`skipsearch tune` makes one for this machine",
    )
    require_usage(
        task is not None or profile.task.name != ANY,
        "this profile is for any task: say with --task on which one to measure it",
    )
    chosen = load_task(resolve_task(profile, task), chat=profile.task.is_chat)
    if chosen.name == profile.task.name:  # `tune --temperature` may have changed the task's own
        made = profile.task.sampling.model_dump()
        chosen = replace(chosen, sampling=TaskSampling(**made))
    warn([*chosen.notes])
    adapter = load_model_and_engine(
        model or profile_model_argument(profile), _defaults_from_claim(profile, loading)
    )
    target = _output_path(file, adapter, chosen.name) if write else None
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar

    with ProgressBar(err) as bar:
        running = bar.add_task("decoding", total=None)
        result = run(
            adapter,
            profile,
            chosen,
            prompts,
            progress=lambda done, total: bar.update(running, completed=done, total=total),
        )
    if target:
        save_profile(
            copy_modules(result.remeasured, profile.module_folders, target), target, replace=True
        )
    if as_json:
        print_json(
            {"file": str(file), **result.as_dict(), "written": str(target) if target else None}
        )
    else:
        out.print(*_format_lines(result), *([f"written to {target}"] if target else []), sep="\n")
    if strict and not result.holds:
        raise typer.Exit(1)


def _defaults_from_claim(profile: Profile, loading: LoadOptions) -> LoadOptions:
    """Return the options of a verification: those of the profile where the user set none.

    On another type of device than the profile's, nothing is taken from the profile. Unlike other
    commands, a verification takes the number of threads from a profile of another CPU, too.
    """
    import torch

    claimed = profile.hardware
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if claimed is None or not available[claimed.kind]:
        return loading
    if loading.device == "auto":
        loading = replace(loading, device=claimed.kind)
    if not loading.device.startswith(claimed.kind):
        return loading
    engine = profile.engine or "auto" if loading.engine == "auto" else loading.engine
    threads = loading.threads or claimed.threads
    return replace(loading, engine=engine, threads=threads).with_profile(profile)


def _output_path(file: Path, adapter: object, task: str) -> Path:
    """Return the path where the measured profile will be written; call this before the measurement.

    Raises: ProfileError if another profile exists at this path.
    """
    from skipsearch.cli.tune import default_path
    from skipsearch.errors import ProfileError
    from skipsearch.profile.paths import find_repository, user_folder

    repository = find_repository(file)
    if repository is None:
        return file
    if user_folder() / "pulled" in repository.absolute().parents:
        repository = user_folder()  # the next pull would replace what is written there
    target = repository / default_path(adapter, task)
    if target.exists():
        raise ProfileError(
            f"{target} exists already, a profile that was measured on such a device: verify that "
            "one, or move it away"
        )
    return target


def _format_lines(verification: Verification) -> list[str]:
    """Return the result of a verification as lines of text."""
    from skipsearch.profile.show import describe_device, describe_prompts, format_speedup

    claim, measured = verification.claim, verification.remeasured.measured
    assert measured is not None
    lines = [
        f"claimed  {format_speedup(claim)}, {describe_device(claim)}"
        if claim.measured
        else "claimed  nothing: the profile is unmeasured",
        f"here     {format_speedup(verification.remeasured)} on "
        f"{describe_prompts(measured)} of {verification.remeasured.task.name}, "
        f"{describe_device(verification.remeasured)}",
        f"time     {measured.ms_per_token.format_with_unit(' ms')} a token, plain decoding "
        f"{measured.baseline_ms_per_token.format_with_unit(' ms')}",
        f"tokens   {verification.describe_losslessness()}",
    ]
    return [
        *lines,
        *(
            ["answers  the claim is of their beginnings: they ended at the first repeated 6-gram"]
            if verification.measures_beginnings
            else []
        ),
        *(f"differs  {difference}" for difference in verification.differences),
        verification.sentence,
    ]
