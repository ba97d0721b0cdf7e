"""Run a training for the commands of `skipsearch train`, and print its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from skipsearch.cli.options import (
    Device,
    Json,
    LoadOptions,
    Seed,
    Threads,
    load_cli_model,
    require_usage,
    warn,
)

if TYPE_CHECKING:
    from skipsearch.drafters.trained.card import ModuleCard
    from skipsearch.models import ModelAdapter
    from skipsearch.training.corpus import Corpus
    from skipsearch.training.driver import TrainingPlan, TrainListener

    Planner = Callable[[ModelAdapter, Corpus, TrainListener], TrainingPlan]


@dataclass(frozen=True)
class TextOptions:
    """The options that say what a training reads, as `read_corpus` describes it."""

    task: Annotated[
        str | None, typer.Option(help="A task to train on; only its calibration split is used.")
    ] = None
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to train on: a file (.txt, .jsonl, …) or a folder of files. May be repeated."
        ),
    ] = None
    self_generated: Annotated[
        bool,
        typer.Option(
            "--self-generated",
            help="Train on text that the model writes itself. It continues beginnings from "
            "--data or --task, or starts from nothing.",
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the text that the model writes itself.")
    ] = 1.0
    tokens: Annotated[
        int, typer.Option(min=512, help="How many tokens the model writes itself.")
    ] = 400_000
    data_license: Annotated[
        str, typer.Option(help="Licence of the training text, for the module's card.")
    ] = "not stated"


@dataclass(frozen=True)
class HeadTextOptions(TextOptions):
    """The options that say which requests the model answers for a draft head."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Your prompts, as `tune --task FILE` reads them and `serve --log-prompts` writes "
            "them, or text: a file or a folder. May be repeated. Default: requests that skipsearch "
            "brings and that the model writes."
        ),
    ] = None
    self_generated: Annotated[
        bool,
        typer.Option(
            "--self-generated", help="The model continues beginnings of text files from --data."
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the model's answers. 0: the task's.")
    ] = 0.0
    tokens: Annotated[
        int, typer.Option(min=512, help="How many tokens of text there are at most.")
    ] = 400_000


@dataclass(frozen=True)
class RunOptions:
    """The options that say how long a training runs, in which steps, and on what."""

    steps_per_teacher_pass: ClassVar[int] = 3
    top_k: ClassVar[int] = 64  # tokens of the full model's distribution

    budget: Annotated[
        str | None, typer.Option(help="Time for the training: 90s, 20m, 1.5h. Default: 10m.")
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="The most training steps.")] = None
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Texts per step.")] = 16
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3
    extra_memory: Annotated[
        str,
        typer.Option(
            help="The most memory for a draft's own weights: 10% of the model's, 200MB, 2GB."
        ),
    ] = "25%"
    device: Device = "auto"
    dtype: Annotated[
        str, typer.Option(help="Number format of the passes. auto: bfloat16 where it is fast.")
    ] = "auto"
    threads: Threads = None
    seed: Seed = 0
    force: Annotated[
        bool,
        typer.Option("--force", help="Start again instead of continuing an interrupted training."),
    ] = False
    as_json: Json = False


@dataclass(frozen=True)
class HeadOptions(RunOptions):
    """The options for a head that reads hidden states, with defaults of its own."""

    steps_per_teacher_pass: ClassVar[int] = 1
    top_k: ClassVar[int] = 16  # which are stored for each token

    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for text, hidden states and training: 90s, 20m, 1.5h. Default: 10m."
        ),
    ] = None
    batch_size: Annotated[
        int, typer.Option(min=1, max=4096, help="Windows of 512 tokens per step.")
    ] = 1
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Train for the model in fewer bits: native-8bit, native-6bit, native-5bit or "
            "native-4bit. A GGUF file keeps its format."
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            help="How the engine native rounds the inputs of quantised matrices: int8 (the "
            "default), int16 or float."
        ),
    ] = None
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3
    bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of a weight in the module's file: 4, 5 or 8. Default: 16, or 32 if the "
            "model's weights have as many."
        ),
    ] = None


def run_training(
    make_plan: Planner,
    kind: str,
    model: str,
    folder: Path,
    texts: TextOptions,
    options: RunOptions,
    init_from: Path | None,
    head_draft_tokens: int | None = None,
    bits: int | None = None,
) -> None:
    """Train the draft that `make_plan` plans, and print its figures and the next command.

    kind: of the module that is trained. model: as for `--model`. folder: for the module.
    init_from: the module to continue from; None: a new one. head_draft_tokens: of a draft head;
    None: the draft is of another kind. bits: of a weight in the module's file; None: 16 or 32.

    Raises: BadParameter, ModelError, ModuleError, TaskError, SearchError.
    """
    require_usage(
        bool(head_draft_tokens or texts.task or texts.data or texts.self_generated),
        "say what to train on: --task, --data or --self-generated",
    )
    require_usage(
        0 < options.learning_rate < 1,
        f"--learning-rate {options.learning_rate} is no learning rate; try 0.001",
    )
    from skipsearch.cli.consoles import err, out, print_json
    from skipsearch.cli.train_view import TrainView
    from skipsearch.drafters.trained.card import BLOCKS_BY_BITS
    from skipsearch.drafters.trained.module_weights import check_card
    from skipsearch.tasks import load_task
    from skipsearch.training.corpus import read_corpus
    from skipsearch.training.driver import collect_head_corpus, train, with_limits
    from skipsearch.training.head_text import HeadRequests
    from skipsearch.training.trainer import TrainSettings
    from skipsearch.tuning.settings import parse_duration

    require_usage(bits in (None, *BLOCKS_BY_BITS), f"--bits {bits} is none of 4, 5 and 8")
    task = load_task(texts.task) if texts.task else None
    sampled = task.sampling.temperature if task else 0.0
    settings = with_limits(
        TrainSettings(
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=options.seed,
            top_k=options.top_k,
            steps_per_teacher_pass=options.steps_per_teacher_pass,
            temperature=max(TrainSettings.temperature, sampled),
        ),
        options.steps,
        parse_duration(options.budget),
    )
    warn([*task.notes] if task else [])
    card = _read_card(init_from)
    adapter = load_cli_model(model, _loading(model, options))
    if card is not None:  # before the model writes text for minutes
        check_card(card, kind, adapter.spec, str(init_from))
    data = texts.data or []
    with TrainView(err) as view:
        if head_draft_tokens:
            requests = HeadRequests(
                adapter, data, task, texts.self_generated, texts.temperature, options.seed
            )
            corpus, settings = collect_head_corpus(
                adapter,
                requests,
                folder,
                settings,
                texts.tokens,
                head_draft_tokens,
                texts.data_license,
                view,
                options.force,
            )
        else:
            corpus = read_corpus(
                adapter,
                data,
                task,
                texts.self_generated,
                options.seed,
                view,
                texts.tokens,
                texts.temperature,
                texts.data_license,
            )
        result = train(
            make_plan(adapter, corpus, view),
            corpus,
            folder,
            settings,
            options.extra_memory,
            view,
            options.force and not head_draft_tokens,
            BLOCKS_BY_BITS.get(bits) if bits else None,
        )
    before, after = result.alpha
    following = f"skipsearch tune --model {model} --task {texts.task or 'TASK'} --modules {folder}"
    if options.as_json:
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
    if after is not None:
        first = "" if before is None else f"{before:.3f} before, "
        out.print(f"α by replay, on validation text: {first}{after:.3f} after")
    out.print(
        f"{trained.steps} steps in {trained.seconds:.0f} s; share of all rows that name the "
        f"model's token: {trained.before:.3f} "
        f"before, {trained.after:.3f} after"
    )
    out.print(
        f"written to {result.path}: {result.n_parameters / 1e6:.3g} M values; with them a draft "
        f"takes {result.extra_bytes / 1e6:.3g} MB in addition to the model"
    )
    out.print(f"next: {following}")


def _read_card(init_from: Path | None) -> ModuleCard | None:
    """Return the card of the module to continue from; None: there is none. Raises: ModuleError."""
    from skipsearch.drafters.trained.module_files import read_module_header

    return None if init_from is None else read_module_header(init_from).card


def _loading(model: str, options: RunOptions) -> LoadOptions:
    """Return how a model is loaded: unmodified, or as it verifies if its weights are in blocks."""
    from skipsearch.models.loading.gguf_model import is_gguf
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.models.loading.placement import pick_device

    dtype = _fast_dtype(options.device) if options.dtype == "auto" else options.dtype
    if isinstance(options, HeadOptions):
        is_file = is_gguf(find_model_file(model)) and pick_device(options.device).type == "cpu"
        if is_file or options.quantization is not None:
            return LoadOptions(
                options.device,
                options.dtype,
                options.quantization,
                options.activations,
                engine="native",
                threads=options.threads,
            )
    return LoadOptions(options.device, dtype, engine="hf", threads=options.threads)


def _fast_dtype(device: str) -> str:
    """Return bfloat16 on a GPU and on CPUs that multiply it faster; float32 otherwise."""
    from skipsearch.models.loading.placement import pick_device
    from skipsearch.training.trainer import multiplies_bfloat16_faster

    on_cpu = pick_device(device).type == "cpu"
    return "bfloat16" if not on_cpu or multiplies_bfloat16_faster() else "float32"
