"""Options that the commands of `bench` share, and the systems and requests that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.open_model import resolve_task
from skipsearch.cli.options import (
    LoadOptions,
    load_model_and_engine,
    profile_model_argument,
    require_usage,
    warn,
)

if TYPE_CHECKING:
    from skipsearch.bench import BenchRequest, System
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile
    from skipsearch.tasks import Prompt, Task

OUR_SYSTEMS = (
    "plain; profile; profile:lookup or profile:skip (one drafter of the profile alone); lookup (2 "
    "tokens must match, up to 8 drafted); skip (every second sub-layer, unsearched, 4 drafted); "
    "lookup+skip; each of these with @ENGINE for another engine; FILE.yaml, another profile of the "
    "model"
)

ProfileFile = Annotated[Path | None, typer.Option(help="A profile to measure; its model is used.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="The model, if there is no profile. synthetic:llama-2-13b (-7b, -70b, "
        "llama-3-8b, phi-3-mini) or synthetic:24x512 means random weights of that "
        "shape."
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        help="Whose hold-out prompts to decode. Default: the profile's own task, or pycode."
    ),
]
TaskData = Annotated[Path | None, typer.Option(help="A .jsonl to take the task's text from.")]
Prompts = Annotated[int, typer.Option(min=1, help="Number of hold-out prompts.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often each system decodes each prompt.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Run our systems with --exact, in passes of one fixed shape."),
]


@dataclass(frozen=True)
class SystemSetup:
    """The systems of a benchmark."""

    model: ModelAdapter
    has_random_weights: bool
    profile: Profile | None
    systems: list[System]
    task: str  # as the user gave it, or of the profile


@dataclass(frozen=True)
class BenchSetup(SystemSetup):
    """The systems of a benchmark, and the requests that each of them decodes."""

    prompts: str  # name of the task, or what the prompts are instead
    requests: list[BenchRequest]


def prepare_systems(
    profile: Path | None,
    model: str | None,
    task: str | None,
    systems: str | None,
    exact: bool,
    loading: LoadOptions,
    add_hf_generate: bool,
) -> SystemSetup:
    """Load the model and make the systems that the options describe.

    add_hf_generate: compare with hf-generate too, if `systems` is None and the weights allow it.

    Raises: BadParameter without a profile and a model; ProfileError; ModelError; DecodeError for an
        unknown system.
    """
    require_usage(profile is not None or model is not None, "give --profile FILE or --model M")
    from skipsearch.bench import PLAIN_WEIGHTS, make_systems
    from skipsearch.models.loading.gguf_model import is_gguf
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.models.loading.quantize import is_native_quantization
    from skipsearch.models.synthetic import is_synthetic
    from skipsearch.profile import load_profile

    loaded = load_profile(profile) if profile else None
    chosen = model or (profile_model_argument(loaded) if loaded else "")
    if loaded is not None:
        loading = loading.with_profile(loaded)
        task = resolve_task(loaded, task)  # before a model is loaded
    plain_weights = replace(
        loading, engine="hf", quantization=None, activations=None, kv_cache_dtype=None
    )
    opened: dict[str, ModelAdapter] = {}

    def by_engine(name: str) -> ModelAdapter:
        if name == PLAIN_WEIGHTS:
            # Not kept in `opened`, to free its memory after use.
            return load_model_and_engine(chosen, plain_weights)
        if name not in opened:
            adapter = load_model_and_engine(
                chosen, replace(loading, engine=name), loaded.engine if loaded else None
            )
            opened[name] = opened.setdefault(adapter.spec.engine, adapter)
        return opened[name]

    main = by_engine(loading.engine)
    if is_synthetic(chosen):
        warn(
            [
                f"{chosen} has random weights: every figure below is of speed only, and its "
                "acceptance is made up"
            ]
        )
    add_hf_generate = add_hf_generate and not is_native_quantization(main.spec.quantization)
    usual = [
        "plain",
        *(["profile"] if loaded else []),
        *(["hf-generate"] if add_hf_generate else []),
    ]
    names = [n.strip() for n in systems.split(",")] if systems else usual
    file = find_model_file(chosen)
    contenders = make_systems(
        names, loading.engine, loaded, by_engine, exact, Path(file) if is_gguf(file) else None
    )
    return SystemSetup(main, is_synthetic(chosen), loaded, contenders, task or "pycode")


def prepare_benchmark(setup: SystemSetup, data: Path | None, n_requests: int) -> BenchSetup:
    """Return the set-up with the requests of its task. Raises: TaskError."""
    name, requests = _make_requests(setup, data, n_requests)
    return BenchSetup(**vars(setup), prompts=name, requests=requests)


def _make_requests(
    setup: SystemSetup, data: Path | None, n_requests: int
) -> tuple[str, list[BenchRequest]]:
    """Return (name of the prompts, requests).

    They are the task's hold-out prompts, or random token ids for a model without a tokenizer.
    """
    from skipsearch.bench import make_random_requests, make_task_requests
    from skipsearch.replay.workload import make_workload

    model = setup.model
    if model.tokenizer is None:
        warn([f"{model.spec.id} has no tokenizer, so its prompts are random tokens"])
        return "random tokens", make_random_requests(model, n_requests)
    chosen = load_bench_task(setup, data)
    held_out = balance_categories(chosen.holdout, n_requests)
    return chosen.name, make_task_requests(model, make_workload(model, chosen, held_out), held_out)


def load_bench_task(setup: SystemSetup, data: Path | None) -> Task:
    """Load the task, and warn of what it means for this model. Raises: TaskError.

    If the profile is for prompts in the chat template, the prompts of a file are put into it, too.
    """
    from skipsearch.replay.workload import task_warnings
    from skipsearch.tasks import load_task

    is_chat = setup.profile is not None and setup.profile.task.is_chat
    chosen, model = load_task(setup.task, data=data, chat=is_chat), setup.model
    warn([*chosen.notes, *task_warnings(chosen, model)])
    return chosen


def balance_categories(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, equally many of each category; the first if there is no category."""
    waiting = {
        c: [p for p in prompts if p.category == c]
        for c in dict.fromkeys(p.category for p in prompts)
    }
    chosen: list[Prompt] = []
    while len(chosen) < min(count, len(prompts)):
        chosen += [rest.pop(0) for rest in waiting.values() if rest][: count - len(chosen)]
    return chosen


def parse_numbers(text: str, option: str, example: str) -> list[int]:
    """Parse numbers separated by commas. Raises: BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    require_usage(
        all(part.isdigit() and int(part) > 0 for part in parts),
        f"{option} is {text!r}; write numbers with commas between them, such as {example}",
    )
    return [int(part) for part in parts]


def require_own_systems(command: str, systems: str | None) -> None:
    """Raise BadParameter if a system is not one of ours; before a model is loaded."""
    require_usage(
        not any(
            system.strip().startswith(("hf-", "llama-cpp")) for system in (systems or "").split(",")
        ),
        f"`{command}` compares our own systems: leave hf-… and llama-cpp… out",
    )
