"""`skipsearch bench methods`: compare every drafting method at its best settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.bench_options import Prompts, TaskData
from skipsearch.cli.options import Json, LoadOptions, load_model_and_engine, unfold_options, warn


@unfold_options
def methods(
    *,
    model: Annotated[
        str, typer.Option(help="demo, an alias, a Hub id (org/name[@revision]) or a folder.")
    ],
    task: Annotated[
        str,
        typer.Option(
            help="A task: settings are chosen on its calibration prompts, and its hold-out prompts "
            "are decoded."
        ),
    ] = "pycode",
    data: TaskData = None,
    modules: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of trained modules to include. May be repeated."),
    ] = None,
    prompts: Prompts = 16,
    loading: LoadOptions,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench methods --model demo --task pycode

    Compare every drafting method with plain decoding, each with its best settings on the
    calibration prompts. All decode the same hold-out prompts and take turns in one run. The result
    is a table in Markdown."""
    from skipsearch.bench.method_table import compare_methods, to_markdown, to_report_data
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.tune_view import TuneView
    from skipsearch.models.loading.quantize import is_native_quantization
    from skipsearch.tasks import load_task

    chosen = load_task(task, data=data)
    warn([*chosen.notes])
    adapter = load_model_and_engine(model, loading)
    theirs = (
        None
        if is_native_quantization(adapter.spec.quantization)
        else load_model_and_engine(model, replace(loading, engine="hf"))
    )
    with TuneView(err) as view:
        rows = compare_methods(
            adapter, chosen, modules or [], prompts, on_event=view, hf_model=theirs
        )
    if as_json:
        print_json(to_report_data(adapter, chosen.name, modules or [], rows))
        return
    out.print_block(to_markdown(rows).rstrip())
