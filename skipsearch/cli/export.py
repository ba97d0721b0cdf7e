"""`skipsearch export`: write a profile's skip drafter as a checkpoint for engines that draft with a
second model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.options import profile_model_argument, warn


def export(
    profile: Annotated[Path, typer.Option(help="The profile whose skip drafter is exported.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder to write, which must not exist.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the profile's own.")
    ] = None,
) -> None:
    """Example: skipsearch export --profile my-profile.yaml --out my-draft

    Write a profile's skip drafter as a checkpoint of its own, for vLLM, SGLang, TensorRT-LLM,
    llama.cpp or Transformers. The README in the folder has the commands, and says what of the
    profile a checkpoint cannot hold. Weights are copied as they are stored; no model is loaded."""
    from skipsearch.cli.consoles import err
    from skipsearch.cli.consoles import out as console
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.export import export_draft as run
    from skipsearch.profile import load_profile

    loaded = load_profile(profile)
    with ProgressBar(err) as bar:
        copying = bar.add_task("copying weights", total=None)
        warnings = run(
            loaded,
            model or profile_model_argument(loaded),
            out,
            lambda done, total: bar.update(copying, completed=done, total=total),
        )
    warn(warnings)
    console.print(f"{out}: {out / 'README.md'} says how to run it")
