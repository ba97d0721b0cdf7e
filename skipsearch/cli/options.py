"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from skipsearch.errors import OtherEngine, UntrustedFolder

if TYPE_CHECKING:
    from skipsearch.engine import Choice
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile

Device = Annotated[str, typer.Option(help="auto (a CUDA device if there is one, else the CPU), cpu, cuda, cuda:N, or mps (Apple's GPU, "
                                          "with the engine hf; untested).")]
Dtype = Annotated[str, typer.Option(help="Number format of the weights: float32, bfloat16, float16 or float64. auto: the profile's, "
                                         "else bfloat16 on a GPU and float32 on a CPU.")]
Quantization = Annotated[str | None, typer.Option(help="Load the weights in fewer bits: bitsandbytes-4bit, bitsandbytes-8bit, "
                                                       "torchao-4bit or torchao-8bit (by that library), or native-8bit (by the engine "
                                                       "native, on a CPU).")]
Engine = Annotated[str, typer.Option(help="What computes the model's passes: hf (the unmodified Hugging Face modules), lean (fused "
                                          "weights), native (C++ for CPUs, built once) or graph (CUDA graphs). auto takes the one that "
                                          "decodes fastest without drafting, of those that are ready here.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: as many as the profile was measured with on this "
                                                         "machine, else torch's choice.")]
Json = Annotated[bool, typer.Option("--json", help="Print data only, on stdout.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above it tokens are sampled.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0 means all.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


def open_model(name: str, device: str, dtype: str, engine: str, threads: int | None, quantization: str | None = None,
               wanted: str | None = None) -> ModelAdapter:
    """Load what the shared options describe, and say on stderr what was chosen. wanted: as of `settle`. Raises: ModelError."""
    return settle(load(name, device, dtype, engine, threads, quantization, wanted), engine, wanted)


def load(name: str, device: str, dtype: str, engine: str, threads: int | None, quantization: str | None = None,
         wanted: str | None = None) -> ModelAdapter:
    """The model, with `auto` not settled yet. wanted: as of `settle`, where it is known by now. Raises: ModelError."""
    import torch

    from skipsearch.cli.common import err
    from skipsearch.cli.progress import Bar
    from skipsearch.engine import current, load_model, native_is_wanted
    from skipsearch.engine.native import prepare
    from skipsearch.models.quantize import NATIVE
    from skipsearch.profile.whereabouts import remember

    if threads:
        torch.set_num_threads(threads)
    with Bar(err) as bar, said_plainly():
        compiling = bar.add_task("compiling for this CPU, once", total=None, visible=False)

        def tell(done: int, total: int) -> None:
            bar.update(compiling, completed=done, total=total, visible=True)

        of_hf = (engine, wanted) == ("auto", "hf") and quantization != NATIVE   # which holds the weights in another form
        model = load_model(name, device=device, dtype=dtype, quantization=quantization, engine="hf" if of_hf else engine,
                           progress=tell, settled=False)
        if engine == "auto" and current(wanted or "native") == "native" and native_is_wanted():
            prepare(model, tell)
    folder = Path(name).expanduser()
    if name != "demo" and model.spec.weights_sha256 is not None and folder.is_dir():
        remember(model.spec.weights_sha256, folder)
    return model


def settle(model: ModelAdapter, engine: str, wanted: str | None = None) -> ModelAdapter:
    """What `auto` drives a loaded model with, and a line on stderr about the model.

    wanted: the engine that a profile was measured with or a study begun with, which is taken where it is ready; the fastest one elsewhere.
    """
    from skipsearch.cli.common import err
    from skipsearch.machine import this_machine

    if engine == "auto":
        model = _wanted(model, wanted) or _fastest(model)
    spec = model.spec
    weights = f"{spec.quantization} weights, {spec.dtype_name}" if spec.quantization else spec.dtype_name
    err.print(f"{spec.id}: {spec.n_layers} layers, {weights} on {this_machine(spec.device).description}, engine {spec.engine}",
              style="dim")
    return model


def _wanted(model: ModelAdapter, engine: str | None) -> ModelAdapter | None:
    from skipsearch.engine import ready

    found = None if engine is None else ready(model, engine)
    if engine is not None and found is None:
        warn([f"the engine {engine} is not ready here"])
    return found


def _fastest(model: ModelAdapter) -> ModelAdapter:
    from skipsearch.cli.common import err
    from skipsearch.engine import fastest

    choice = fastest(model)
    if choice.seconds:
        err.print(in_words(choice), style="dim")
    return choice.model


def in_words(choice: Choice) -> str:
    """`engine graph: 1.62 times as fast as lean at plain decoding here; --engine lean to choose otherwise`"""
    chosen = choice.model.spec.engine
    other = min((engine for engine in choice.seconds if engine != chosen), key=lambda engine: choice.seconds[engine])
    ratio = choice.seconds[other] / choice.seconds[chosen]
    doubt = ", which may be noise" if ratio < 1 else ""
    return f"engine {chosen}: {ratio:.2f} times as fast as {other} at plain decoding here{doubt}; --engine {other} to choose otherwise"


def model_of(profile: Profile) -> str:
    """What `--model` calls the model that a profile was made for. Raises: ProfileError for a local one that is not known here."""
    from skipsearch.profile.whereabouts import name_of

    return name_of(profile.model)


def by_loader(quantization: str | None) -> str | None:
    """A quantization that loading does; any other is how the weights are stored."""
    from skipsearch.models.quantize import NAMES

    return quantization if quantization in NAMES else None


def warn(sentences: list[str]) -> None:
    from skipsearch.cli.common import err

    with err.heard():
        for sentence in sentences:
            err.print(f"warning: {sentence}", style="yellow")


@contextmanager
def said_plainly() -> Iterator[None]:
    """Our own warnings as one sentence on stderr, without a line of source; those of others as Python shows them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
                 line: str | None = None) -> None:
            if issubclass(category, UntrustedFolder | OtherEngine):
                warn([str(message)])
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def require(condition: bool, sentence: str) -> None:
    """A usage rule that the option parser cannot express; exit status 2."""
    if not condition:
        raise typer.BadParameter(sentence)
