"""The options that several commands share, and functions that apply them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from skipsearch.errors import (
    EngineFallbackWarning,
    SpinningThreads,
    TokenizerWarning,
    UnpackedWeightsWarning,
    UntrustedCacheWarning,
    UnusedWeightsWarning,
)

if TYPE_CHECKING:
    from skipsearch.engine import EngineChoice
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile

# Python warnings that are printed as one sentence.
OWN_WARNINGS = (
    EngineFallbackWarning,
    SpinningThreads,
    TokenizerWarning,
    UnpackedWeightsWarning,
    UntrustedCacheWarning,
    UnusedWeightsWarning,
)

Device = Annotated[
    str,
    typer.Option(
        help="auto (a CUDA device if there is one, else the CPU), cpu, cuda, cuda:N, or mps "
        "(Apple's GPU, "
        "with the engine hf; untested)."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number format of the weights: float32, bfloat16, float16 or float64. auto: the "
        "profile's, "
        "else bfloat16 on a GPU and float32 on a CPU."
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Load the weights in fewer bits: bitsandbytes-4bit, bitsandbytes-8bit, "
        "torchao-4bit or torchao-8bit (by that library), or native-8bit, native-6bit, native-5bit "
        "or native-4bit (by the engine native, on a CPU)."
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        help="How the engine native rounds the inputs of quantised matrices: int8 (as llama.cpp "
        "does; the default), int16 (closer to the unrounded model, slower for drafts) or float "
        "(not at all; slower)."
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="What computes the model's passes: hf (the unmodified Hugging Face modules), lean "
        "(fused "
        "weights), native (C++ for CPUs, built once) or graph (CUDA graphs). auto takes the one "
        "that "
        "decodes fastest without drafting, of those that are ready here."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads. Default: as many as the profile was measured with on this "
        "machine, else torch's choice.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print data only, on stdout.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above it tokens are sampled.")]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the likeliest tokens that together have this probability."),
]
TopK = Annotated[
    int, typer.Option(help="Sample from this many of the likeliest tokens; 0 means all.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


def load_model_and_engine(
    name: str,
    device: str,
    dtype: str,
    engine: str,
    threads: int | None,
    quantization: str | None = None,
    preferred_engine: str | None = None,
) -> ModelAdapter:
    """Load the model that the shared options describe, and print on stderr what was chosen.

    preferred_engine: as for `select_engine`.

    Raises: ModelError.
    """
    return select_engine(
        load_cli_model(name, device, dtype, engine, threads, quantization, preferred_engine),
        engine,
        preferred_engine,
    )


def load_cli_model(
    name: str,
    device: str,
    dtype: str,
    engine: str,
    threads: int | None,
    quantization: str | None = None,
    preferred_engine: str | None = None,
) -> ModelAdapter:
    """Load the model. `select_engine` resolves `--engine auto` later.

    preferred_engine: as for `select_engine`, if already known.

    Raises: ModelError.
    """
    import torch

    from skipsearch.cli.consoles import err
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.engine import load_for_switching
    from skipsearch.models.loading.aliases import find_packaged_model
    from skipsearch.profile.model_locations import record_location

    if threads:
        torch.set_num_threads(threads)
    with ProgressBar(err) as bar, plain_warnings():
        compiling = bar.add_task("compiling for this CPU, once", total=None, visible=False)

        def report_progress(done: int, total: int) -> None:
            bar.update(compiling, completed=done, total=total, visible=True)

        model = load_for_switching(
            name, device, dtype, quantization, engine, preferred_engine, report_progress
        )
    folder = Path(find_packaged_model(name)).expanduser()
    if name != "demo" and model.spec.weights_sha256 is not None and folder.exists():
        record_location(model.spec.weights_sha256, folder)
    return model


def select_engine(
    model: ModelAdapter, engine: str, preferred_engine: str | None = None
) -> ModelAdapter:
    """Resolve `--engine auto` for a loaded model, and print a line about the model on stderr.

    preferred_engine: the engine of the profile's measurement or of the study's first trials. If it
    is ready here, it is chosen, otherwise the fastest one.
    """
    from skipsearch.cli.consoles import err
    from skipsearch.core.machine import describe_machine

    if engine == "auto":
        model = _try_engine(model, preferred_engine) or _pick_fastest(model)
    spec = model.spec
    weights = (
        f"{spec.quantization} weights, {spec.dtype_name}" if spec.quantization else spec.dtype_name
    )
    err.print(
        f"{spec.id}: {spec.n_layers} layers, {weights} on "
        f"{describe_machine(spec.device).description}, engine {spec.engine}",
        style="dim",
    )
    return model


def _try_engine(model: ModelAdapter, engine: str | None) -> ModelAdapter | None:
    """Return the model on this engine; None, with a warning, if the engine is not ready."""
    from skipsearch.engine import switch_engine

    switched = None if engine is None else switch_engine(model, engine)
    if engine is not None and switched is None:
        warn([f"the engine {engine} is not ready here"])
    return switched


def _pick_fastest(model: ModelAdapter) -> ModelAdapter:
    """Return the model on the fastest engine, and print a line if engines were timed."""
    from skipsearch.cli.consoles import err
    from skipsearch.engine import pick_fastest

    choice = pick_fastest(model)
    if choice.pass_seconds:
        err.print(describe_choice(choice), style="dim")
    return choice.model


def describe_choice(choice: EngineChoice) -> str:
    """Return a note on the choice of the engine.

    For example: `engine graph: 1.62 times as fast as lean at plain decoding here; --engine lean to
    choose otherwise`.
    """
    chosen = choice.model.spec.engine
    other = min(
        (engine for engine in choice.pass_seconds if engine != chosen),
        key=lambda engine: choice.pass_seconds[engine],
    )
    ratio = choice.pass_seconds[other] / choice.pass_seconds[chosen]
    doubt = ", which may be noise" if ratio < 1 else ""
    return (
        f"engine {chosen}: {ratio:.2f} times as fast as {other} at plain decoding here{doubt}; "
        f"--engine {other} to choose otherwise"
    )


def profile_model_argument(profile: Profile) -> str:
    """Return the `--model` argument for the model of a profile.

    Raises: ProfileError for a local model whose folder is not known here.
    """
    from skipsearch.profile.model_locations import model_argument

    return model_argument(profile.model)


def merge_activations(quantization: str | None, activations: str | None) -> str | None:
    """Return the name of a quantization with these activations.

    Raises: BadParameter for unknown activations.
    """
    from skipsearch.errors import ModelError
    from skipsearch.models.loading.quantize import join_activations

    try:
        return join_activations(quantization, activations)
    except ModelError as error:
        raise typer.BadParameter(str(error)) from None


def warn(sentences: list[str]) -> None:
    """Print warnings on stderr, with --quiet too."""
    from skipsearch.cli.consoles import err

    with err.even_if_quiet():
        for sentence in sentences:
            err.print(f"warning: {sentence}", style="yellow")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Run a block in which our own Python warnings are printed as one sentence on stderr.

    Other warnings are shown in Python's own way.
    """
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, OWN_WARNINGS):
                warn([str(message)])
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def require_usage(condition: bool, sentence: str) -> None:
    """Raise BadParameter (exit status 2) if `condition` is False.

    This is for rules that the option parser cannot express. sentence: says what the user should do.
    """
    if not condition:
        raise typer.BadParameter(sentence)
