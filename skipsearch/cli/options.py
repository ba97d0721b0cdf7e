"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from skipsearch.errors import UntrustedFolder

if TYPE_CHECKING:
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16, float16 or float64.")]
Quantization = Annotated[str | None, typer.Option(help="Load the weights as bitsandbytes-4bit, bitsandbytes-8bit, torchao-4bit or "
                                                       "torchao-8bit, by that library.")]
Engine = Annotated[str, typer.Option(help="auto (lean where it applies, else hf), hf (the unmodified Hugging Face modules), lean (fused "
                                          "weights), compiled (for this CPU) or graph (CUDA graphs).")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch; its own choice if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print data only, on stdout.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]


def open_model(name: str, device: str, dtype: str, engine: str, threads: int | None, quantization: str | None = None) -> ModelAdapter:
    """Load what the shared options describe, and say on stderr what was chosen. Raises: ModelError."""
    import torch
    from rich.progress import Progress

    from skipsearch.cli.common import err
    from skipsearch.engine import load_model
    from skipsearch.machine import this_machine

    if threads:
        torch.set_num_threads(threads)
    with Progress(console=err, disable=not err.is_terminal, transient=True) as bar, said_plainly():
        compiling = bar.add_task("compiling for this CPU, once", total=None, visible=False)
        model = load_model(name, device=device, dtype=dtype, quantization=quantization, engine=engine,
                           progress=lambda done, total: bar.update(compiling, completed=done, total=total, visible=True))
    spec = model.spec
    weights = f"{spec.quantization} weights, {spec.dtype_name}" if spec.quantization else spec.dtype_name
    err.print(f"{spec.id}: {spec.n_layers} layers, {weights} on {this_machine(spec.device).description}, engine {spec.engine}",
              style="dim")
    return model


def model_of(profile: Profile) -> str:
    """What `--model` calls the model that a profile was made for."""
    return f"{profile.model.id}@{profile.model.revision}" if profile.model.revision else profile.model.id


def warn(sentences: list[str]) -> None:
    from skipsearch.cli.common import err

    for sentence in sentences:
        err.print(f"warning: {sentence}", style="yellow")


@contextmanager
def said_plainly() -> Iterator[None]:
    """Our own warnings as one sentence on stderr, without a line of source; those of others as Python shows them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
                 line: str | None = None) -> None:
            if issubclass(category, UntrustedFolder):
                warn([str(message)])
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def require(condition: bool, sentence: str) -> None:
    """A usage rule that the option parser cannot express; exit status 2."""
    if not condition:
        raise typer.BadParameter(sentence)


