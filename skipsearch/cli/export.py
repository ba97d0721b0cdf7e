"""`skipsearch export`: a profile's skip drafter as a checkpoint for engines that draft with a second model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.options import model_of, warn


def export(profile: Annotated[Path, typer.Option(help="The profile whose skip drafter is wanted.")],
           format: Annotated[str, typer.Option(help="hf: whole layers, any engine. deci: sub-layers, as DeciLM (Nemotron-NAS). "
                                                "custom-generate: the whole profile, for transformers' generate, no weights.")],
           out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not exist.")],
           model: Annotated[str | None, typer.Option(help="Which model; the profile's own if not given.")] = None) -> None:
    """Example: skipsearch export --profile my-profile.yaml --format hf --out my-draft

    Write a profile's skip drafter as a checkpoint of its own, for vLLM, SGLang, TensorRT-LLM, llama.cpp or Transformers. Its README
    has the commands, and says what of the profile no checkpoint can hold. The weights are copied as they are stored; nothing is loaded.
    custom-generate writes a folder instead with which `model.generate(…, custom_generate=FOLDER, trust_remote_code=True)` drafts.
    """
    from skipsearch.cli.common import err
    from skipsearch.cli.common import out as console
    from skipsearch.cli.progress import Bar
    from skipsearch.export import export as run
    from skipsearch.export.custom_generate import CUSTOM_GENERATE
    from skipsearch.profile import load_profile

    loaded = load_profile(profile)
    with Bar(err) as bar:
        copying = bar.add_task("copying weights", total=None)
        named = "" if format == CUSTOM_GENERATE else model or model_of(loaded)
        warnings = run(loaded, named, format, out, lambda done, total: bar.update(copying, completed=done, total=total))
    warn(warnings)
    console.print(f"{out}: {out / 'README.md'} says how to run it")
