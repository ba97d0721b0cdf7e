"""`skipsearch bench batch`: compare our systems by the number of requests side by side."""

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
    require_own_systems,
)
from skipsearch.cli.options import Json, LoadOptions, require_usage, unfold_options


@unfold_options
def batch(
    *,
    profile: ProfileFile = None,
    model: ModelName = None,
    sizes: Annotated[
        str, typer.Option(help="How many requests to decode side by side, with commas between.")
    ] = "1,2,4,8",
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="With --profile: write the result into it, so that larger batches are decoded "
            "plainly where that is faster.",
        ),
    ] = False,
    task: TaskName = None,
    data: TaskData = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help=f"What to compare, with commas between: {OUR_SYSTEMS}. Default: plain, profile."
        ),
    ] = None,
    prompts: Prompts = 16,
    repeats: Repeats = 3,
    exact: Exact = False,
    loading: LoadOptions,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench batch --profile my-profile.yaml --sizes 1,2,4,8 --save

    Compare drafting with plain decoding by the number of requests that are decoded side by side. A
    pass over many requests costs more than one over a single request, so drafting pays less in a
    batch. Only our own systems can be compared."""
    counts = parse_numbers(sizes, "--sizes", "1,2,4,8")
    require_own_systems("bench batch", systems)
    require_usage(not save or profile is not None, "--save goes with --profile")
    from skipsearch.bench import add_batch_speedups, run_batch_benchmark
    from skipsearch.bench.systems import SkipsearchSystem
    from skipsearch.cli.bench_view import print_batches
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.errors import ProfileError
    from skipsearch.profile import save_profile

    loaded = prepare_systems(profile, model, task, systems, exact, loading, add_hf_generate=False)
    setup = prepare_benchmark(loaded, data, prompts)
    ours = [system for system in setup.systems if isinstance(system, SkipsearchSystem)]
    saved = setup.profile if save else None
    if saved is not None and (
        saved.measured is None or "profile" not in [system.name for system in ours]
    ):
        raise ProfileError(
            "--save needs a profile that was measured, and the systems plain and profile: "
            "`skipsearch tune` makes one"
        )
    with ProgressBar(err) as bar:
        running = bar.add_task("decoding side by side", total=None)
        rows = run_batch_benchmark(
            ours,
            setup.requests,
            counts,
            repeats,
            lambda done, total: bar.update(running, completed=done, total=total),
        )
    if saved is not None and profile is not None:
        save_profile(add_batch_speedups(saved, rows, "profile"), profile, replace=True)
    if as_json:
        print_json(
            {
                "model": ours[0].model.spec.id,
                "dtype": ours[0].model.spec.dtype_name,
                "task": setup.prompts,
                "rows": [row.as_dict() for row in rows],
            }
        )
        return
    print_batches(out, rows)
