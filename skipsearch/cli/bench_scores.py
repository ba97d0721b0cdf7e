"""`skipsearch bench scores`: judge the answers of our systems, plain and drafted."""

from __future__ import annotations

from typing import Annotated

import typer

from skipsearch.cli.bench_options import (
    OUR_SYSTEMS,
    Exact,
    ModelName,
    ProfileFile,
    Prompts,
    TaskData,
    TaskName,
    load_bench_task,
    prepare_systems,
    require_own_systems,
)
from skipsearch.cli.options import Activations, Device, Dtype, Engine, Json, Quantization, Threads


def scores(
    profile: ProfileFile = None,
    model: ModelName = None,
    task: TaskName = None,
    data: TaskData = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help=f"What to compare, with commas between: {OUR_SYSTEMS}. Default: plain, profile."
        ),
    ] = None,
    prompts: Prompts = 32,
    samples: Annotated[
        int, typer.Option(min=1, help="Sampled answers to each prompt, beside the greedy one.")
    ] = 3,
    run_generated_code: Annotated[
        bool,
        typer.Option(
            "--run-generated-code",
            help="Allow programs that the model writes to run here (for humaneval): each in a "
            "process with limits of time and memory, without network, and without write access "
            "to your files. This stops accidents, not attacks: prefer a container.",
        ),
    ] = False,
    exact: Exact = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    engine: Engine = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Example: skipsearch bench scores --profile my-profile.yaml --task gsm8k --data gsm8k.jsonl

    Judge the answers to a task's hold-out prompts, plain and drafted: exact match (gsm8k), ROUGE
    (cnndm, xsum) or pass@1 (humaneval), greedily and with samples. Drafts must not change the
    scores. A task of your own names its metric under `score` in its task.yaml."""
    require_own_systems("bench scores", systems)
    from skipsearch.bench.score_table import score_systems
    from skipsearch.bench.scoring import make_scorer
    from skipsearch.bench.systems import SkipsearchSystem
    from skipsearch.cli.bench_view import print_scores
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.tasks import load_task

    if task is not None:
        make_scorer(load_task(task, data=data), run_generated_code)  # before a model is loaded
    setup = prepare_systems(
        profile,
        model,
        task,
        systems,
        exact,
        device,
        dtype,
        quantization,
        activations,
        engine,
        threads,
        add_hf_generate=False,
    )
    chosen, spec = load_bench_task(setup, data), setup.model.spec
    ours = [system for system in setup.systems if isinstance(system, SkipsearchSystem)]
    with ProgressBar(err) as bar:
        running = bar.add_task("answering", total=None)
        rows = score_systems(
            ours,
            chosen,
            prompts,
            samples,
            run_generated_code,
            lambda done, total: bar.update(running, completed=done, total=total),
        )
    if as_json:
        print_json(
            {
                "model": spec.id,
                "dtype": spec.dtype_name,
                "quantization": spec.quantization,
                "task": chosen.name,
                "rows": [row.as_dict() for row in rows],
            }
        )
        return
    print_scores(out, rows)
