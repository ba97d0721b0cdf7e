"""`skipsearch bench methods`: compare every drafting method at its best settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.bench_options import Prompts, TaskData, prepare_systems
from skipsearch.cli.options import (
    ChatTask,
    DraftModels,
    Json,
    LoadOptions,
    require_usage,
    split_names,
    unfold_options,
    warn,
)

PROGRAMS = ("hf-generate", "hf-early-exit", "hf-lookup", "llama-cpp", "llama-cpp-lookup")


@unfold_options
def methods(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="demo, an alias, a Hub id (org/name[@revision], org/name:Q4_K_M), a folder or a "
            "GGUF file."
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            help="A task: settings are chosen on its calibration prompts, and its hold-out prompts "
            "are decoded."
        ),
    ] = "pycode",
    data: TaskData = None,
    chat: ChatTask = False,
    modules: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of trained modules to include. May be repeated."),
    ] = None,
    draft_models: DraftModels = None,
    prompts: Prompts = 16,
    budget: Annotated[
        str,
        typer.Option(
            help="Time of each search for a mask, and of each race of settings: 90s, 2m; a number "
            "alone is seconds."
        ),
    ] = "30s",
    programs: Annotated[
        str | None,
        typer.Option(
            help=f"Other programs that take part: any of {', '.join(PROGRAMS)}, or none. Default: "
            "hf-generate and hf-early-exit; for a GGUF file or weights in native bits, llama-cpp "
            "if it is installed."
        ),
    ] = None,
    loading: LoadOptions,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench methods --model demo --task pycode

    Compare every drafting method with plain decoding, each with its best settings on the
    calibration prompts. All decode the same hold-out prompts and take turns in one run. The result
    is a table in Markdown."""
    names = [] if programs == "none" else split_names(programs)
    unknown = [name for name in names if name not in PROGRAMS]
    require_usage(
        not unknown, f"--programs has {', '.join(unknown)}; it knows {', '.join(PROGRAMS)} and none"
    )
    from skipsearch.bench import ExternalSystem
    from skipsearch.bench.method_table import compare_methods, to_markdown, to_report_data
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.tune_view import TuneView
    from skipsearch.tasks import load_task
    from skipsearch.tuning.settings import parse_duration

    search_s = parse_duration(budget)
    assert search_s is not None
    chosen = load_task(task, data=data, chat=chat)
    warn([*chosen.notes])
    names = names if programs else list_usual_programs(model, loading.quantization)
    setup = prepare_systems(
        None, model, task, ",".join(["plain", *names]), False, loading, add_hf_generate=False
    )
    with TuneView(err) as view:
        rows = compare_methods(
            setup.model,
            chosen,
            modules or [],
            prompts,
            on_event=view,
            programs=[system for system in setup.systems if isinstance(system, ExternalSystem)],
            search_s=search_s,
            draft_models=split_names(draft_models),
        )
    if as_json:
        print_json(to_report_data(setup.model, chosen.name, modules or [], rows))
        return
    out.print_block(to_markdown(rows).rstrip())


def list_usual_programs(model: str, quantization: str | None) -> list[str]:
    """Return the programs that can run these weights as they are stored."""
    from skipsearch.models.loading.gguf_model import is_gguf
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.models.loading.quantize import is_native_quantization

    if is_gguf(find_model_file(model)) or is_native_quantization(quantization):
        return ["llama-cpp"] if find_spec("llama_cpp") else []
    return ["hf-generate", "hf-early-exit"]
