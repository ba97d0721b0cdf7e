"""`skipsearch train`: train the weights of a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import Device, Json, Seed, Threads, load_cli_model, require_usage, warn

if TYPE_CHECKING:
    from skipsearch.core.mask import SkipMask

METHODS = ("adapted", "kangaroo", "s3d")


def train(
    method: Annotated[str, typer.Argument(help=f"What to train: {', '.join(METHODS)}.")],
    model: Annotated[
        str, typer.Option(help="demo, an alias, a Hub id (org/name[@revision]) or a folder.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the trained module, and for the state of an interrupted training."
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="A task to train on; only its calibration split is used.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to train on: a file (.txt, .jsonl, …) or a folder of files. May be repeated."
        ),
    ] = None,
    self_generated: Annotated[
        bool,
        typer.Option(
            "--self-generated",
            help="Train on text that the model writes itself. It continues beginnings from "
            "--data or --task, or starts from nothing.",
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="For adapted: a profile whose mask is trained. Default: search for a thin mask."
        ),
    ] = None,
    draft_sublayers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the draft. For adapted: sub-layers, default one in eight. For "
            "s3d: layers, default one in three.",
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="For adapted: a module to continue from. With a smaller --draft-sublayers, the "
            "sub-"
            "layers that matter least are dropped."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train low-rank changes of this rank. For adapted: instead of whole "
            "copies. For s3d: in addition to its embeddings.",
        ),
    ] = None,
    exit_layer: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For kangaroo: how many layers run before its adapter. Default: one in eight.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            help="For kangaroo: attention (an attention sub-layer and a norm) or layer (also an "
            "MLP)."
        ),
    ] = "attention",
    budget: Annotated[
        str | None, typer.Option(help="Time for the training: 90s, 20m, 1.5h. Default: 10m.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The most training steps.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Texts per step.")] = 16,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="How many tokens ahead drafts are trained. Default: 5 for adapted, 4 for s3d.",
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the text that the model writes itself.")
    ] = 1.0,
    tokens: Annotated[
        int, typer.Option(min=512, help="How many tokens the model writes itself.")
    ] = 400_000,
    data_license: Annotated[
        str, typer.Option(help="Licence of the training text, for the module's card.")
    ] = "not stated",
    extra_memory: Annotated[
        str,
        typer.Option(
            help="The most memory for a draft's own weights: 10% of the model's, 200MB, 2GB."
        ),
    ] = "25%",
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="Number format of the passes. auto: bfloat16 where it is fast.")
    ] = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Start again instead of continuing an interrupted training."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Example: skipsearch train adapted --model demo --task pycode --out modules/

    Train a thin draft that is right more often: some of the model's own sub-layers (adapted), an
    adapter after its first layers (kangaroo), or embeddings that let one pass draft several tokens
    (s3d). Only drafts use what is trained; the tokens stay the model's own. `tune --modules` then
    compares it with all other drafts.

    You can interrupt a training: the same command continues it. On several GPUs: accelerate launch
    -m skipsearch.cli.main train …"""
    require_usage(method in METHODS, f"{method!r} cannot be trained; {', '.join(METHODS)} can")
    require_usage(
        bool(task or data or self_generated),
        "say what to train on: --task, --data or --self-generated",
    )
    require_usage(
        not (profile and draft_sublayers),
        "--profile brings a mask and --draft-sublayers looks for one: give one of them",
    )
    require_usage(
        not init_from or (method == "adapted" and not profile),
        "--init-from is for adapted, and brings its mask: leave --profile out",
    )
    require_usage(form in ("attention", "layer"), f"--form {form!r} is attention or layer")
    require_usage(
        0 < learning_rate < 1, f"--learning-rate {learning_rate} is no learning rate; try 0.001"
    )
    from skipsearch.cli.consoles import err, print_json
    from skipsearch.cli.consoles import out as console
    from skipsearch.cli.train_view import TrainView
    from skipsearch.tasks import load_task
    from skipsearch.training.corpus import read_corpus
    from skipsearch.training.distributed import join_process_group
    from skipsearch.training.driver import plan_adapted, plan_kangaroo, plan_s3d, with_limits
    from skipsearch.training.driver import train as run
    from skipsearch.training.trainer import TrainSettings
    from skipsearch.tuning.settings import parse_duration

    chosen = load_task(task) if task else None
    sampled = chosen.sampling.temperature if chosen else 0.0
    settings = with_limits(
        TrainSettings(
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            temperature=max(TrainSettings.temperature, sampled),
        ),
        steps,
        parse_duration(budget),
    )
    warn([*chosen.notes] if chosen else [])
    mask, group = _mask_from_profile(profile), join_process_group(device)
    adapter = load_cli_model(
        model, device, _fast_dtype(device) if dtype == "auto" else dtype, "hf", threads
    )
    with TrainView(err, silent=not group.is_main) as view:
        text = read_corpus(
            adapter,
            data or [],
            chosen,
            self_generated,
            seed,
            view,
            tokens,
            temperature,
            data_license,
        )
        if method == "kangaroo":
            lessons = plan_kangaroo(adapter, exit_layer or max(1, adapter.spec.n_layers // 8), form)
        elif method == "s3d":
            lessons = plan_s3d(adapter, draft_sublayers, draft_tokens or 4, rank, seed)
        else:
            lessons = plan_adapted(
                adapter, text, mask, draft_sublayers, rank, draft_tokens or 5, seed, view, init_from
            )
        result = run(lessons, text, out, settings, extra_memory, view, force, group)
    if result is None:  # the main process prints the result
        return
    before, after = result.alpha
    following = f"skipsearch tune --model {model} --task {task or 'TASK'} --modules {out}"
    if as_json:
        print_json(
            {
                "file": str(result.path),
                "card": result.card.model_dump(mode="json"),
                "parameters": result.n_parameters,
                "extra_bytes": result.extra_bytes,
                "alpha": {"before": before, "after": after},
                "next": following,
            }
        )
        return
    trained = result.card.trained
    if before is not None and after is not None:
        console.print(f"α by replay, on validation text: {before:.3f} before, {after:.3f} after")
    console.print(
        f"{trained.steps} steps in {trained.seconds:.0f} s; share of all rows that name the "
        f"model's token: {trained.before:.3f} "
        f"before, {trained.after:.3f} after"
    )
    console.print(
        f"written to {result.path}: {result.n_parameters / 1e6:.3g} M values; with them a draft "
        "takes "
        f"{result.extra_bytes / 1e6:.3g} MB beside the model as {adapter.spec.dtype_name}"
    )
    console.print(f"next: {following}")


def _mask_from_profile(profile: Path | None) -> SkipMask | None:
    """Return the mask of a profile to train. Raises: ModuleError if it skips nothing."""
    from skipsearch.errors import ModuleError
    from skipsearch.profile import load_profile

    if profile is None:
        return None
    mask = load_profile(profile).mask
    if not mask.n_skipped:
        raise ModuleError(
            f"{profile}: this profile skips nothing, so there is no mask to train: leave --profile "
            "out"
        )
    return mask


def _fast_dtype(device: str) -> str:
    """Return bfloat16 on a GPU and on CPUs that multiply it in hardware; float32 otherwise."""
    import torch

    from skipsearch.models.loading.placement import pick_device

    on_cpu = pick_device(device).type == "cpu"
    return "bfloat16" if not on_cpu or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
