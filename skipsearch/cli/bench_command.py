"""`skipsearch bench`: compare systems in one interleaved run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipsearch.cli.open_model import defaults_from_profile, resolve_task
from skipsearch.cli.options import (
    Activations,
    Device,
    Dtype,
    Engine,
    Json,
    Quantization,
    Threads,
    load_model_and_engine,
    merge_activations,
    profile_model_argument,
    require_usage,
    warn,
)

if TYPE_CHECKING:
    from skipsearch.bench import BenchRequest, System
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile
    from skipsearch.tasks import Prompt

COSTS_CONTEXT_TOKENS = 128  # tokens before the passes of --costs
OWN_SYSTEMS_ONLY = "--batch compares our own systems: leave hf-… and llama-cpp… out"


def bench(
    profile: Annotated[
        Path | None, typer.Option(help="A profile to measure; its model is used.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model, if there is no profile. synthetic:llama-2-13b (-7b, -70b, "
            "llama-3-8b, phi-3-mini) or synthetic:24x512 means random weights of that "
            "shape."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Whose hold-out prompts to decode. Default: the profile's own task, or pycode."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A .jsonl to take the task's text from.")
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help="What to compare, with commas between: plain; profile (also called recipe); "
            "profile:lookup or profile:skip (one drafter of the profile alone); lookup (2 "
            "tokens must match, up to 8 drafted); skip (every second sub-layer, "
            "unsearched, 4 drafted); lookup+skip; each of these with @ENGINE for another "
            "engine; hf-generate, hf-compile, hf-early-exit, hf-lookup; llama-cpp, llama-"
            "cpp-lookup (pip install 'skipsearch[llama-cpp]'). Default: plain, profile, "
            "hf-generate."
        ),
    ] = None,
    methods: Annotated[
        bool,
        typer.Option(
            "--methods",
            help="Compare every drafting method, each with its best settings on the "
            "calibration prompts, instead of --systems.",
        ),
    ] = False,
    modules: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --methods: a folder of trained modules to include. May be repeated."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of hold-out prompts.")] = 16,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often each system decodes each prompt.")
    ] = 3,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Decode this many requests side by side, such as 1,2,4,8, instead of one after"
            " the other. Takes our own systems only; default: plain, profile."
        ),
    ] = None,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="With --batch and --profile: write the result into the profile, so that "
            "larger batches are decoded plainly where that is faster.",
        ),
    ] = False,
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
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Run our systems with --exact, in passes of one fixed shape."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the result into a .png, .svg or .pdf file.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    engine: Engine = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench --profile my-profile.yaml --systems
    plain,profile,plain@hf,hf-generate

    Compare ways to decode a task's hold-out prompts: plain, with a profile, with other engines, and
    with Hugging Face's generate. All decode greedily and take turns in one run, and ratios are
    paired by prompt. Speed excludes the first token. A legend below the tables explains the
    headings."""
    quantization = merge_activations(quantization, activations)
    require_usage(profile is not None or model is not None, "give --profile FILE or --model M")
    require_usage(methods or not modules, "--modules goes with --methods")
    require_usage(
        not (methods and (systems or profile or contexts or costs or picture or batch)),
        "--methods has its own systems: give --model and --task",
    )
    if methods:
        _print_methods_table(
            model or "",
            task or "pycode",
            data,
            modules or [],
            prompts,
            (device, dtype, engine, threads, quantization),
            as_json,
        )
        return
    lengths, sizes = (
        _parse_numbers(contexts, "--contexts", "128,1024,4096"),
        _parse_numbers(batch, "--batch", "1,2,4,8"),
    )
    require_usage(
        not (sizes and (lengths or costs or picture)),
        "--batch goes without --contexts, --costs and --picture",
    )
    require_usage(
        not sizes
        or not any(
            system.strip().startswith(("hf-", "llama-cpp")) for system in (systems or "").split(",")
        ),
        OWN_SYSTEMS_ONLY,
    )  # before a model is loaded
    require_usage(
        not save or (bool(sizes) and profile is not None), "--save goes with --batch and --profile"
    )
    from skipsearch.bench import (
        PLAIN_WEIGHTS,
        ExternalSystem,
        check_plot_file,
        make_systems,
        measure_cost_table,
        measure_llama_costs,
        plot_rows,
    )
    from skipsearch.bench import run_benchmark as run
    from skipsearch.cli.bench_view import print_costs, print_rows
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.models.loading.aliases import find_packaged_model
    from skipsearch.models.loading.gguf_model import is_gguf
    from skipsearch.models.loading.quantize import is_native_quantization
    from skipsearch.models.synthetic import is_synthetic
    from skipsearch.profile import load_profile

    if picture:
        check_plot_file(
            picture, {"--profile": [profile] if profile else [], "--data": [data] if data else []}
        )
    loaded = load_profile(profile) if profile else None
    chosen = model or (profile_model_argument(loaded) if loaded else "")
    if loaded is not None:
        dtype, threads, quantization = defaults_from_profile(
            loaded, device, dtype, threads, quantization
        )
        task = resolve_task(loaded, task)  # before a model is loaded
    opened: dict[str, ModelAdapter] = {}

    def by_engine(name: str) -> ModelAdapter:
        if name == PLAIN_WEIGHTS:
            # Not kept in `opened`, to free its memory after use.
            return load_model_and_engine(chosen, device, dtype, "hf", threads)
        if name not in opened:
            adapter = load_model_and_engine(
                chosen,
                device,
                dtype,
                name,
                threads,
                quantization,
                loaded.engine if loaded else None,
            )
            opened[name] = opened.setdefault(adapter.spec.engine, adapter)
        return opened[name]

    main = by_engine(engine)
    if is_synthetic(chosen):
        warn(
            [
                f"{chosen} has random weights: every figure below is of speed only, and its "
                "acceptance is made up"
            ]
        )
    usual = [
        "plain",
        *(["profile"] if loaded else []),
        *([] if sizes or is_native_quantization(main.spec.quantization) else ["hf-generate"]),
    ]
    names = [n.strip() for n in systems.split(",")] if systems else usual
    file = find_packaged_model(chosen)
    contenders = make_systems(
        names, engine, loaded, by_engine, exact, Path(file) if is_gguf(file) else None
    )
    name, requests = _make_requests(main, task or "pycode", data, prompts)
    if sizes:
        _print_batch_table(
            contenders, requests, sizes, repeats, name, (profile, loaded) if save else None, as_json
        )
        return
    warn(
        [
            f"a context of {c} tokens leaves no room for new ones: {main.spec.id} was made for "
            f"{main.spec.context_length}, so it is left out"
            for c in lengths
            if main.spec.context_length and c + 32 > main.spec.context_length
        ]
    )
    with ProgressBar(err) as bar:
        running = bar.add_task("decoding", total=None)
        rows = run(
            contenders,
            requests,
            repeats,
            lengths,
            lambda done, total: bar.update(running, completed=done, total=total),
        )
    ours = {id(p.model): p.model for p in contenders if p.engine == p.model.spec.engine}
    llamas = {
        id(p.llama): p.llama
        for p in contenders
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
    title = ", ".join(
        filter(None, (main.spec.id, main.spec.dtype_name, main.spec.quantization, name))
    )
    title += " (random weights: speed only)" if is_synthetic(chosen) else ""
    if picture:
        plot_rows(rows, title, picture)
    if as_json:
        print_json(
            {
                "model": main.spec.id,
                "dtype": main.spec.dtype_name,
                "quantization": main.spec.quantization,
                "task": name,
                "synthetic": is_synthetic(chosen),
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


def _print_batch_table(
    systems: Sequence[System],
    requests: Sequence[BenchRequest],
    sizes: list[int],
    repeats: int,
    task: str,
    save_to: tuple[Path | None, Profile | None] | None,
    as_json: bool,
) -> None:
    """Run the benchmark of batch sizes and print its table, or JSON.

    save_to: path of the profile and the profile, if the result is to be saved in it.
    """
    from skipsearch.bench import add_batch_speedups
    from skipsearch.bench import run_batch_benchmark as run
    from skipsearch.bench.systems import SkipsearchSystem
    from skipsearch.cli.bench_view import print_batches
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.errors import ProfileError
    from skipsearch.profile import save_profile

    ours = [system for system in systems if isinstance(system, SkipsearchSystem)]
    require_usage(len(ours) == len(systems), OWN_SYSTEMS_ONLY)
    path, profile = save_to or (None, None)
    if profile is not None and (
        profile.measured is None or "profile" not in [system.name for system in ours]
    ):
        raise ProfileError(
            "--save needs a profile that was measured, and the systems plain and profile: "
            "`skipsearch tune` makes one"
        )
    with ProgressBar(err) as bar:
        running = bar.add_task("decoding side by side", total=None)
        rows = run(
            ours,
            requests,
            sizes,
            repeats,
            lambda done, total: bar.update(running, completed=done, total=total),
        )
    if profile is not None and path is not None:
        save_profile(add_batch_speedups(profile, rows, "profile"), path, replace=True)
    if as_json:
        print_json(
            {
                "model": ours[0].model.spec.id,
                "dtype": ours[0].model.spec.dtype_name,
                "task": task,
                "rows": [row.as_dict() for row in rows],
            }
        )
        return
    print_batches(out, rows)


def _print_methods_table(
    model: str,
    task: str,
    data: Path | None,
    modules: list[Path],
    n_prompts: int,
    model_options: tuple[Any, ...],
    as_json: bool,
) -> None:
    """Run the comparison of all methods and print it as Markdown, or as JSON."""
    from skipsearch.bench.method_table import compare_methods as run
    from skipsearch.bench.method_table import to_markdown, to_report_data
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.tune_view import TuneView
    from skipsearch.models.loading.quantize import is_native_quantization
    from skipsearch.tasks import load_task

    chosen = load_task(task, data=data)
    warn([*chosen.notes])
    adapter = load_model_and_engine(model, *model_options)
    device, dtype, _, threads, quantization = model_options
    theirs = (
        None
        if is_native_quantization(adapter.spec.quantization)
        else load_model_and_engine(model, device, dtype, "hf", threads, quantization)
    )
    with TuneView(err) as view:
        rows = run(adapter, chosen, modules, n_prompts, on_event=view, hf_model=theirs)
    if as_json:
        print_json(to_report_data(adapter, chosen.name, modules, rows))
        return
    out.print(to_markdown(rows), end="")


def _make_requests(
    model: ModelAdapter, task: str, data: Path | None, n_requests: int
) -> tuple[str, list[BenchRequest]]:
    """Return (name of the prompts, requests).

    They are the task's hold-out prompts, or random token ids for a model without a tokenizer.
    """
    from skipsearch.bench import make_random_requests, make_task_requests
    from skipsearch.replay.workload import context_warnings, make_workload, template_warnings
    from skipsearch.tasks import load_task

    if model.tokenizer is None:
        warn([f"{model.spec.id} has no tokenizer, so its prompts are random tokens"])
        return "random tokens", make_random_requests(model, n_requests)
    chosen = load_task(task, data=data)
    warn([*chosen.notes, *context_warnings(chosen, model.spec), *template_warnings(chosen, model)])
    held_out = _balance_categories(chosen.holdout, n_requests)
    return chosen.name, make_task_requests(model, make_workload(model, chosen, held_out), held_out)


def _balance_categories(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, equally many of each category; the first if there is no category."""
    waiting = {
        c: [p for p in prompts if p.category == c]
        for c in dict.fromkeys(p.category for p in prompts)
    }
    chosen: list[Prompt] = []
    while len(chosen) < min(count, len(prompts)):
        chosen += [rest.pop(0) for rest in waiting.values() if rest][: count - len(chosen)]
    return chosen


def _parse_numbers(text: str | None, option: str, example: str) -> list[int]:
    """Parse numbers separated by commas. Raises: BadParameter."""
    parts = [part.strip() for part in text.split(",")] if text else []
    require_usage(
        all(part.isdigit() and int(part) > 0 for part in parts),
        f"{option} is {text!r}; write numbers with commas between them, such as {example}",
    )
    return [int(part) for part in parts]
