"""`skipsearch bench`: side by side, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipsearch.cli.opening import as_measured, task_of
from skipsearch.cli.options import Device, Dtype, Engine, Json, Quantization, Threads, model_of, open_model, require, warn

if TYPE_CHECKING:
    from skipsearch.bench import Peer, Request
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile
    from skipsearch.tasks import Prompt

CONTEXT = 128   # tokens before the passes of --costs
OURS_ALONE = "--batch compares our own peers: leave hf-… and llama-cpp… out"


def bench(profile: Annotated[Path | None, typer.Option(help="A profile to measure; its model is used.")] = None,
          model: Annotated[str | None, typer.Option(help="The model, if there is no profile. synthetic:llama-2-13b (-7b, -70b, "
                                                         "llama-3-8b, phi-3-mini) or synthetic:24x512 means random weights of that "
                                                         "shape.")] = None,
          task: Annotated[str | None, typer.Option(help="Whose hold-out prompts to decode. Default: the profile's own task, or "
                                                        "pycode.")] = None,
          data: Annotated[Path | None, typer.Option(help="A .jsonl to take the task's text from.")] = None,
          peers: Annotated[str | None, typer.Option(help="What to compare, with commas between: plain; profile (also called recipe); "
                                                         "profile:lookup or profile:skip (one drafter of the profile alone); lookup (2 "
                                                         "tokens must match, up to 8 drafted); skip (every second sub-layer, "
                                                         "unsearched, 4 drafted); lookup+skip; each of these with @ENGINE for another "
                                                         "engine; hf-generate, hf-compile, hf-early-exit, hf-lookup; llama-cpp, llama-"
                                                         "cpp-lookup (pip install 'skipsearch[llama-cpp]'). Default: plain, profile, "
                                                         "hf-generate.")] = None,
          methods: Annotated[bool, typer.Option("--methods", help="Compare every drafting method, each with its best settings on the "
                                                                  "calibration prompts, instead of --peers.")] = False,
          modules: Annotated[list[Path] | None, typer.Option(help="With --methods: a folder of trained parts to include. May be "
                                                                  "repeated.")] = None,
          prompts: Annotated[int, typer.Option(min=1, help="Number of hold-out prompts.")] = 16,
          repeats: Annotated[int, typer.Option(min=1, help="How often each peer decodes each prompt.")] = 3,
          batch: Annotated[str | None, typer.Option(help="Decode this many requests side by side, such as 1,2,4,8, instead of one after"
                                                         " the other. Takes our own peers only; default: plain, profile.")] = None,
          save: Annotated[bool, typer.Option("--save", help="With --batch and --profile: write the result into the profile, so that "
                                                            "larger batches are decoded plainly where that is faster.")] = False,
          contexts: Annotated[str | None, typer.Option(help="Measure behind contexts of these lengths too, such as 128,1024,4096.")] = None,
          costs: Annotated[bool, typer.Option("--costs", help="Also measure β of half the sub-layers and v by rows, for each engine, "
                                                              "behind 128 tokens and each of --contexts.")] = False,
          exact: Annotated[bool, typer.Option("--exact", help="Run our peers with --exact, in passes of one fixed shape.")] = False,
          picture: Annotated[Path | None, typer.Option(help="Draw the result into a .png, .svg or .pdf file.")] = None,
          device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
          threads: Threads = None, as_json: Json = False) -> None:
    """Example: skipsearch bench --profile my-profile.yaml --peers plain,profile,plain@hf,hf-generate

    Compare ways to decode a task's hold-out prompts: plain, with a profile, with other engines, and with Hugging Face's generate. All
    decode greedily and take turns in one run, and ratios are paired by prompt. Speed excludes the first token. A legend below the tables
    explains the headings.
    """
    require(profile is not None or model is not None, "give --profile FILE or --model M")
    require(methods or not modules, "--modules goes with --methods")
    require(not (methods and (peers or profile or contexts or costs or picture or batch)),
            "--methods has its own peers: give --model and --task")
    if methods:
        _methods(model or "", task or "pycode", data, modules or [], prompts, (device, dtype, engine, threads, quantization), as_json)
        return
    lengths, sizes = _numbers(contexts, "--contexts", "128,1024,4096"), _numbers(batch, "--batch", "1,2,4,8")
    require(not (sizes and (lengths or costs or picture)), "--batch goes without --contexts, --costs and --picture")
    require(not sizes or not any(peer.strip().startswith(("hf-", "llama-cpp")) for peer in (peers or "").split(",")),
            OURS_ALONE)   # before a model is loaded
    require(not save or (bool(sizes) and profile is not None), "--save goes with --batch and --profile")
    from skipsearch.bench import PLAIN_WEIGHTS, TheirPeer, check_picture, cost_table, draw, llama_row, make_peers
    from skipsearch.bench import bench as run
    from skipsearch.cli.bench_view import print_costs, print_rows
    from skipsearch.cli.common import err, out, print_json
    from skipsearch.cli.progress import Bar
    from skipsearch.models.quantize import NATIVE
    from skipsearch.models.synthetic import is_synthetic
    from skipsearch.profile import load_profile

    if picture:
        check_picture(picture, {"--profile": [profile] if profile else [], "--data": [data] if data else []})
    loaded = load_profile(profile) if profile else None
    chosen = model or (model_of(loaded) if loaded else "")
    if loaded is not None:
        dtype, threads, quantization = as_measured(loaded, device, dtype, threads, quantization)
        task = task_of(loaded, task)   # before a model is loaded
    opened: dict[str, ModelAdapter] = {}

    def by_engine(name: str) -> ModelAdapter:
        if name == PLAIN_WEIGHTS:
            return open_model(chosen, device, dtype, "hf", threads)   # not held any longer than it is needed
        if name not in opened:
            adapter = open_model(chosen, device, dtype, name, threads, quantization, loaded.engine if loaded else None)
            opened[name] = opened.setdefault(adapter.spec.engine, adapter)
        return opened[name]

    main = by_engine(engine)
    if is_synthetic(chosen):
        warn([f"{chosen} has random weights: every figure below is of speed only, and its acceptance is made up"])
    usual = ["plain", *(["profile"] if loaded else []), *([] if sizes or quantization == NATIVE else ["hf-generate"])]
    names = [n.strip() for n in peers.split(",")] if peers else usual
    contenders = make_peers(names, engine, loaded, by_engine, exact)
    name, requests = _requests(main, task or "pycode", data, prompts)
    if sizes:
        _batches(contenders, requests, sizes, repeats, name, (profile, loaded) if save else None, as_json)
        return
    warn([f"a context of {c} tokens leaves no room for new ones: {main.spec.id} was made for {main.spec.context}, so it is left out"
          for c in lengths if main.spec.context and c + 32 > main.spec.context])
    with Bar(err) as bar:
        running = bar.add_task("decoding", total=None)
        rows = run(contenders, requests, repeats, lengths, lambda done, total: bar.update(running, completed=done, total=total))
    ours = {id(p.model): p.model for p in contenders if p.engine == p.model.spec.engine}
    llamas = {id(p.llama): p.llama for p in contenders if isinstance(p, TheirPeer) and p.llama is not None}   # its peers share one
    table = [row for context in sorted({CONTEXT, *lengths} if costs else ())
             for row in (*cost_table(list(ours.values()), context), *(llama_row(llama, context) for llama in llamas.values()))]
    title = ", ".join(filter(None, (main.spec.id, main.spec.dtype_name, main.spec.quantization, name)))
    title += " (random weights: speed only)" if is_synthetic(chosen) else ""
    if picture:
        draw(rows, title, picture)
    if as_json:
        print_json({"model": main.spec.id, "dtype": main.spec.dtype_name, "quantization": main.spec.quantization, "task": name,
                    "synthetic": is_synthetic(chosen), "exact": exact,
                    "rows": [row.as_dict() for row in rows], "costs": [row.as_dict() for row in table]})
        return
    print_rows(out, rows)
    print_costs(out, table)
    if any(llama.eight_bits for llama in llamas.values()):
        warn(["llama.cpp has the same weights as Q8_0, and rounds what goes into a matrix to 8 bits too, so its tokens may differ"])


def _batches(peers: Sequence[Peer], requests: Sequence[Request], sizes: list[int], repeats: int, task: str,
             save: tuple[Path | None, Profile | None] | None, as_json: bool) -> None:
    """The table of batches. save: where the profile lies, and the profile, if it is to say what was found."""
    from skipsearch.bench import batches as run
    from skipsearch.bench import with_batches
    from skipsearch.bench.peers import OurPeer
    from skipsearch.cli.bench_view import print_batches
    from skipsearch.cli.common import err, out, print_json
    from skipsearch.cli.progress import Bar
    from skipsearch.errors import ProfileError
    from skipsearch.profile import save_profile

    ours = [peer for peer in peers if isinstance(peer, OurPeer)]
    require(len(ours) == len(peers), OURS_ALONE)
    path, profile = save or (None, None)
    if profile is not None and (profile.measured is None or "profile" not in [peer.name for peer in ours]):
        raise ProfileError("--save needs a profile that was measured, and the peers plain and profile: `skipsearch tune` makes one")
    with Bar(err) as bar:
        running = bar.add_task("decoding side by side", total=None)
        rows = run(ours, requests, sizes, repeats, lambda done, total: bar.update(running, completed=done, total=total))
    if profile is not None and path is not None:
        save_profile(with_batches(profile, rows, "profile"), path, replace=True)
    if as_json:
        print_json({"model": ours[0].model.spec.id, "dtype": ours[0].model.spec.dtype_name, "task": task,
                    "rows": [row.as_dict() for row in rows]})
        return
    print_batches(out, rows)


def _methods(model: str, task: str, data: Path | None, modules: list[Path], prompts: int, how: tuple[Any, ...], as_json: bool) -> None:
    """The table of methods, as Markdown for people."""
    from skipsearch.bench.methods import as_markdown, with_conditions
    from skipsearch.bench.methods import methods as run
    from skipsearch.cli.common import err, out, print_json
    from skipsearch.cli.tune_view import TuneView
    from skipsearch.models.quantize import NATIVE
    from skipsearch.tasks import load_task

    chosen = load_task(task, data=data)
    warn([*chosen.notes])
    adapter = open_model(model, *how)
    device, dtype, _, threads, quantization = how
    theirs = None if adapter.spec.quantization == NATIVE else open_model(model, device, dtype, "hf", threads, quantization)
    with TuneView(err) as view:
        rows = run(adapter, chosen, modules, prompts, listen=view, theirs=theirs)
    if as_json:
        print_json(with_conditions(adapter, chosen.name, modules, rows))
        return
    out.print(as_markdown(rows), end="")


def _requests(model: ModelAdapter, task: str, data: Path | None, count: int) -> tuple[str, list[Request]]:
    """(what they are, requests): the task's, or random ones for a model that reads no text."""
    from skipsearch.bench import random_requests, task_requests
    from skipsearch.evaluation.prompts import shortened, workload
    from skipsearch.tasks import load_task

    if model.tokenizer is None:
        warn([f"{model.spec.id} has no tokenizer, so its prompts are random tokens"])
        return "random tokens", random_requests(model, count)
    chosen = load_task(task, data=data)
    warn([*chosen.notes, *shortened(chosen, model.spec)])
    held_out = _spread(chosen.holdout, count)
    return chosen.name, task_requests(model, workload(model, chosen, held_out), held_out)


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many prompts, as many of each category as there are; without categories the first ones."""
    waiting = {c: [p for p in prompts if p.category == c] for c in dict.fromkeys(p.category for p in prompts)}
    chosen: list[Prompt] = []
    while len(chosen) < min(count, len(prompts)):
        chosen += [rest.pop(0) for rest in waiting.values() if rest][:count - len(chosen)]
    return chosen


def _numbers(text: str | None, option: str, example: str) -> list[int]:
    found = [part.strip() for part in text.split(",")] if text else []
    require(all(part.isdigit() and int(part) > 0 for part in found),
            f"{option} is {text!r}; write numbers with commas between them, such as {example}")
    return [int(part) for part in found]
