"""`skipsearch doctor`: check whether this installation works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from skipsearch.cli.options import Json, plain_warnings


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Look at this model too: demo, an alias, a Hub id, a folder or a GGUF file."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device for --model: auto, cpu, cuda or mps.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Dtype for --model: auto, float32, bfloat16 or float16.")
    ] = "auto",
    draft_model: Annotated[
        str | None,
        typer.Option(help="A smaller model: can it draft for --model, and what does it take?"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Example: skipsearch doctor --model Qwen/Qwen2.5-0.5B

    Show what this machine is, which versions are installed, and whether the embedded model loads
    and decodes losslessly. The exit status is 1 if it does not. With --model, also show how that
    model is read, which parts were checked against its own forward pass, which engine runs it, and
    why no faster one does."""
    from rich.table import Table

    from skipsearch.cli.consoles import out, print_json
    from skipsearch.errors import SkipSearchError

    findings, healthy = {}, True
    for name, look in _CHECKS.items():
        try:
            findings[name] = look()
        except (SkipSearchError, OSError, ImportError) as problem:
            findings[name], healthy = f"FAILED: {problem}", False
    if model is not None:
        from skipsearch.cli.doctor_model import describe_model

        try:
            with plain_warnings():
                findings |= describe_model(model, device, dtype, draft_model)
        except SkipSearchError as problem:
            findings["model"], healthy = f"FAILED: {problem}", False
    if as_json:
        print_json({"healthy": healthy, **findings})
    else:
        table = Table("what", "found", box=None, pad_edge=False)
        for name, finding in findings.items():
            style = "red" if finding.startswith("FAILED") else None
            table.add_row(name, finding, style=style)
        out.print(table)
    if not healthy:
        raise typer.Exit(1)


def _check_versions() -> str:
    import platform
    from importlib.metadata import version

    packages = ("torch", "transformers", "optuna", "botorch", "gpytorch", "pydantic", "safetensors")
    return ", ".join(
        [f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    )


def _check_machine() -> str:
    from skipsearch.core.machine import describe_machine
    from skipsearch.engine.native.build import INSTRUCTION_SETS, best_instruction_set
    from skipsearch.models.loading.placement import pick_device

    machine, kernels = describe_machine(pick_device("auto")), best_instruction_set()
    vnni = " (with VNNI)" if INSTRUCTION_SETS[kernels].has_vnni else ""
    return f"{machine.description}, CPU kernels for {kernels}{vnni}"


def _check_read_rate() -> str:
    """Return how fast the machine reads its memory."""
    if _is_busy():
        return "not timed, because other programs keep the cores busy"
    import torch

    from skipsearch.models.loading.placement import pick_device
    from skipsearch.timing.read_rate import measure_read_rate

    device = pick_device("auto")
    threads = "" if device.type == "cuda" else f" on {torch.get_num_threads()} threads"
    rate = measure_read_rate(device)
    return (
        f"a loop reads {rate / 1e9:.1f} GB/s{threads}, so plain decoding of a model of 1 GB gives "
        f"at most {rate / 1e9:.0f} tokens a second"
    )


def _check_load() -> str:
    import os

    from skipsearch.core.machine import load_average

    busy, cores = load_average(), os.cpu_count() or 1
    if busy is None:
        return "unknown"
    noisy = ": timings will be noisy" if _is_busy() else ""
    return f"{busy:.1f} of {cores} cores busy{noisy}"


def _is_busy() -> bool:
    """Return whether other programs take more than half of the cores."""
    import os

    from skipsearch.core.machine import load_average

    return (load_average() or 0.0) > 0.5 * (os.cpu_count() or 1)


def _check_memory() -> str:
    import shutil

    from skipsearch.models.loading.placement import available_host_memory

    memory, disk = available_host_memory() / 2**30, shutil.disk_usage(".").free / 2**30
    return f"{memory:.1f} GiB of memory and {disk:.0f} GiB of disk free"


def _check_quantization() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from skipsearch.models.loading.quantize import NATIVE_QUANTIZATIONS, QUANTIZATIONS

    versions = {}
    for library in dict.fromkeys(library for library, _ in QUANTIZATIONS.values()):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return ", ".join(
        [
            *(f"{library} {state}" for library, state in versions.items()),
            f"{', '.join(NATIVE_QUANTIZATIONS)} by the engine native on a CPU",
        ]
    )


def _check_demo() -> str:
    from skipsearch.core.mask import SkipMask
    from skipsearch.decoding import Decoder
    from skipsearch.errors import SkipSearchError
    from skipsearch.models import load_adapter

    model = load_adapter("demo", device="cpu")
    ids = model.tokenizer("def main(argv=None):")["input_ids"]
    mask = SkipMask.from_layers(
        model.spec.n_layers, range(model.spec.n_layers // 2, model.spec.n_layers - 2)
    )
    plain, drafted = Decoder(model).generate(ids, 24), Decoder(model, mask).generate(ids, 24)
    if plain.tokens != drafted.tokens:
        raise SkipSearchError(
            "drafting changed the tokens of the embedded model: please report this with the "
            "versions above"
        )
    return (
        f"decodes losslessly, {drafted.stats.accepted} of {drafted.stats.drafted} drafted tokens "
        "accepted"
    )


def _check_draft_formats() -> str:
    """Return β of drafts of the embedded model in each number format on this machine."""
    if _is_busy():
        return "not timed, because other programs keep the cores busy"
    from skipsearch.core.reading import READ_ALL, Reading
    from skipsearch.engine import load_model
    from skipsearch.engine.reduced_model import list_draft_weights, release_draft_copies
    from skipsearch.timing.reading_costs import measure_format_costs

    model = load_model("demo", device="cpu")  # on the engine native if it was built before
    formats = list_draft_weights(model)
    if len(formats) == 1:
        return "drafts in fewer bits need the engine native, which `tune` builds"
    costs = measure_format_costs(model, 64, [Reading(weights) for weights in formats])
    release_draft_copies(model, ())
    whole = costs[READ_ALL].sublayers + costs[READ_ALL].overhead
    betas = ", ".join(
        f"{reading} {(c.sublayers + c.overhead) / whole:.2f}"
        for reading, c in costs.items()
        if not reading.is_everything
    )
    return f"a draft step over one in {model.spec.dtype_name}, embedded model: {betas}"


_CHECKS: dict[str, Callable[[], str]] = {
    "versions": _check_versions,
    "machine": _check_machine,
    "load": _check_load,
    "free": _check_memory,
    "memory speed": _check_read_rate,
    "quantization": _check_quantization,
    "embedded model": _check_demo,
    "draft formats": _check_draft_formats,
}
