"""The options that several commands share, and functions that apply them."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

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
    from skipsearch.decoding.request import RequestOptions
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


def check_threads(threads: int | None) -> int | None:
    """Return a number of threads. Raises: BadParameter if this machine has fewer CPUs.

    torch dies if it cannot start its threads, and more than there are CPUs gain nothing.
    """
    if threads is not None and threads > (n_cpus := os.cpu_count() or threads):
        raise typer.BadParameter(
            f"{threads} threads, and this machine has {n_cpus} CPUs: ask for at most as many"
        )
    return threads


Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=check_threads,
        help="CPU threads. Default: as many as the profile was measured with on this "
        "machine, else torch's choice.",
    ),
]
ChatTask = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Put each prompt into the model's chat template, as chat and serve do. A task such as "
        "chat does so without this option.",
    ),
]
DraftModels = Annotated[
    str | None,
    typer.Option(
        help="Smaller models with the same tokens that may draft: names as for --model, with "
        "commas between them. What they may leave out is searched, too."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print data only, on stdout.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


def split_names(names: str | None) -> list[str]:
    """Return the names of an option that takes several, with commas between them."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


@dataclass(frozen=True)
class LoadOptions:
    """The options that say how a model is loaded."""

    device: Device = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format of the weights: float32, bfloat16, float16 or float64. auto: the "
            "profile's, else bfloat16 on a GPU and float32 on a CPU."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Load the weights in fewer bits: bitsandbytes-4bit, bitsandbytes-8bit, "
            "torchao-4bit or torchao-8bit (by that library), or native-8bit, native-6bit, "
            "native-5bit or native-4bit (by the engine native, on a CPU)."
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            help="How the engine native rounds the inputs of quantised matrices: int8 (as "
            "llama.cpp does; the default), int16 (closer to the unrounded model, slower for "
            "drafts) or float (not at all; slower)."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="How the engine native stores K/V of quantised weights: auto (in the dtype; the "
            "default) or int8 (a fourth of float32's memory, faster after long contexts; as "
            "llama.cpp's q8_0)."
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="What computes the model's passes: hf (the unmodified Hugging Face modules), lean "
            "(fused weights), native (C++ for CPUs, built once) or graph (CUDA graphs). auto takes "
            "the one that decodes fastest without drafting, of those that are ready here."
        ),
    ] = "auto"
    threads: Threads = None
    weight_cache: Annotated[
        bool,
        typer.Option(
            help="Store the packed weights of a GGUF file in the cache folder, so that it loads "
            "faster the next time."
        ),
    ] = True

    @property
    def weights(self) -> str | None:
        """The quantization with activations and K/V, under the name that profiles have for them.

        Raises: BadParameter for a format that does not exist or contradicts the quantization.
        """
        from skipsearch.errors import ModelError
        from skipsearch.models.loading.quantize import join_rounding

        try:
            return join_rounding(self.quantization, self.activations, self.kv_cache_dtype)
        except ModelError as error:
            raise typer.BadParameter(str(error)) from None

    def with_profile(self, profile: Profile) -> LoadOptions:
        """Return the options with the profile's values where the user set none.

        `defaults_from_profile` has the rules. Raises: BadParameter, ModelError.
        """
        from skipsearch.decoding.as_measured import defaults_from_profile

        dtype, threads, weights = defaults_from_profile(
            profile, self.device, self.dtype, self.threads, self.weights
        )
        return replace(
            self,
            dtype=dtype,
            threads=threads,
            quantization=weights,
            activations=None,
            kv_cache_dtype=None,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """The options that say how tokens are drawn."""

    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above it tokens are sampled.")
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens that together have this probability."),
    ] = 1.0
    top_k: Annotated[
        int, typer.Option(help="Sample from this many of the likeliest tokens; 0 means all.")
    ] = 0
    seed: Seed = 0

    def for_request(self) -> RequestOptions:
        """Return the options as a request has them. Raises: DecodeError for an invalid value."""
        from skipsearch.engine.sampler import SamplingParams

        SamplingParams(self.temperature, self.top_p, self.top_k)
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }


def unfold_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which each dataclass parameter is replaced by its fields.

    Each field is an option. `--help` lists them where the parameter is, in the order of the fields.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
        for option in (
            inspect.signature(groups[parameter.name], eval_str=True).parameters.values()
            if parameter.name in groups
            else [parameter]
        )
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def load_model_and_engine(
    name: str, loading: LoadOptions, preferred_engine: str | None = None
) -> ModelAdapter:
    """Load the model that the shared options describe, and print on stderr what was chosen.

    preferred_engine: as for `select_engine`.

    Raises: ModelError; BadParameter.
    """
    model = load_cli_model(name, loading, preferred_engine)
    return select_engine(model, loading.engine, preferred_engine)


def load_cli_model(
    name: str, loading: LoadOptions, preferred_engine: str | None = None
) -> ModelAdapter:
    """Load the model. `select_engine` resolves `--engine auto` later.

    preferred_engine: as for `select_engine`, if already known.

    Raises: ModelError; BadParameter.
    """
    import torch

    from skipsearch.cli.consoles import err
    from skipsearch.cli.progress import ProgressBar
    from skipsearch.engine import load_for_switching
    from skipsearch.engine.native import WeightCache
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.profile.model_locations import record_location

    if loading.threads:
        torch.set_num_threads(loading.threads)
    with ProgressBar(err) as bar, plain_warnings():
        compiling = bar.add_task("compiling for this CPU, once", total=None, visible=False)

        def report_progress(done: int, total: int) -> None:
            bar.update(compiling, completed=done, total=total, visible=True)

        model = load_for_switching(
            name,
            loading.device,
            loading.dtype,
            loading.weights,
            loading.engine,
            preferred_engine,
            report_progress,
            WeightCache(partial(err.print, style="dim")) if loading.weight_cache else None,
        )
    folder = Path(find_model_file(name)).expanduser()
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
