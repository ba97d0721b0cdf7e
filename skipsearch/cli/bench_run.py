"""`skipsearch bench run`: compare systems, one request at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from skipsearch.cli.bench_options import (
    OUR_SYSTEMS,
    Exact,
    ModelName,
    ProfileFile,
    Prompts,
    Repeats,
    TaskData,
    TaskName,
    parse_numbers,
    prepare_benchmark,
    prepare_systems,
)
from skipsearch.cli.options import Json, LoadOptions, unfold_options, warn

COSTS_CONTEXT_TOKENS = 128  # tokens before the passes of --costs


@unfold_options
def run(
    *,
    profile: ProfileFile = None,
    model: ModelName = None,
    task: TaskName = None,
    data: TaskData = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help=f"What to compare, with commas between: {OUR_SYSTEMS}; hf-generate, hf-compile, "
            "hf-early-exit, hf-lookup; llama-cpp, llama-cpp-lookup ("
            "CMAKE_ARGS=-DGGML_NATIVE=ON pip install 'skipsearch[llama-cpp]'). Times are compared "
            "with the first one. Default: plain, profile, and hf-generate unless the weights are "
            "quantised."
        ),
    ] = None,
    prompts: Prompts = 16,
    repeats: Repeats = 3,
    contexts: Annotated[
        str | None,
        typer.Option(help="Measure after contexts of these lengths too, such as 128,1024,4096."),
    ] = None,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Also measure β of half the sub-layers and v by number of tokens, for each "
            "engine, after 128 tokens and each of --contexts.",
        ),
    ] = False,
    exact: Exact = False,
    loading: LoadOptions,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench run --profile my-profile.yaml --systems
    plain,profile,plain@hf,hf-generate

    Compare ways to decode a task's hold-out prompts: plain, with a profile, with other engines, and
    with Hugging Face's generate. All decode greedily and take turns in one run, and ratios are
    paired by prompt. Speed excludes the first token. A legend below the tables explains the
    headings."""
    lengths = parse_numbers(contexts, "--contexts", "128,1024,4096") if contexts else []
    from skipsearch.bench import (
        ExternalSystem,
        measure_cost_table,
        measure_llama_costs,
        run_benchmark,
    )
    from skipsearch.cli.bench_view import print_costs, print_rows
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar

    loaded = prepare_systems(profile, model, task, systems, exact, loading, add_hf_generate=True)
    setup = prepare_benchmark(loaded, data, prompts)
    spec = setup.model.spec
    warn(
        [
            f"a context of {c} tokens leaves no room for new ones: {spec.id} was made for "
            f"{spec.context_length}, so it is left out"
            for c in lengths
            if spec.context_length and c + 32 > spec.context_length
        ]
    )
    with ProgressBar(err) as bar:
        running = bar.add_task("decoding", total=None)
        rows = run_benchmark(
            setup.systems,
            setup.requests,
            repeats,
            lengths,
            lambda done, total: bar.update(running, completed=done, total=total),
        )
    ours = {id(p.model): p.model for p in setup.systems if p.engine == p.model.spec.engine}
    llamas = {
        id(p.llama): p.llama
        for p in setup.systems
        if isinstance(p, ExternalSystem) and p.llama is not None
    }  # all llama.cpp systems share one
    table = [
        row
        for context in sorted({COSTS_CONTEXT_TOKENS, *lengths} if costs else ())
        for row in (
            *measure_cost_table(list(ours.values()), context),
            *(measure_llama_costs(llama, context) for llama in llamas.values()),
        )
    ]
    if as_json:
        print_json(
            {
                "model": spec.id,
                "dtype": spec.dtype_name,
                "quantization": spec.quantization,
                "task": setup.prompts,
                "synthetic": setup.has_random_weights,
                "exact": exact,
                "rows": [row.as_dict() for row in rows],
                "costs": [row.as_dict() for row in table],
            }
        )
        return
    print_rows(out, rows)
    print_costs(out, table)
    if any(llama.rounds_inputs for llama in llamas.values()):
        warn(
            [
                "llama.cpp has the same weights, and rounds the inputs of a matrix to 8 bits in a "
                "way of its own, so its tokens may differ"
            ]
        )
