"""`skipsearch tune`: search a recipe, measure it, write a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import (
    ChatTask,
    DraftModels,
    Json,
    LoadOptions,
    Seed,
    load_cli_model,
    require_usage,
    select_engine,
    split_names,
    unfold_options,
    warn,
)

if TYPE_CHECKING:
    from skipsearch.tasks import Task


@unfold_options
def tune(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="demo, an alias, a Hub id (org/name[@revision], org/name:Q4_K_M), a folder or a "
            "GGUF file."
        ),
    ],
    task: Annotated[
        str, typer.Option(help="A task's name, a folder with a task.yaml, or a file of prompts.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="A .jsonl to take the task's text from.")
    ] = None,
    chat: ChatTask = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Tune for requests that are sampled at this temperature; 0 is greedy. Default: "
            "the task's own, 0 for a .jsonl."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Tune for requests with this top-p. Default: the task's own."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Tune for requests with this top-k. Default: the task's own.")
    ] = None,
    drafters: Annotated[
        str,
        typer.Option(
            help="Which drafters to consider. lookup copies from the text so far; skip runs the "
            "model with fewer bits, fewer tokens of its vocabulary or fewer sub-layers; adapted, "
            "kangaroo, s3d and mtp are trained (see --modules), and mtp may be a head that the "
            "model ships; clasp, asd and swift choose masks while decoding. lookup,skip asks "
            "lookup first; lookup goes before any of the others too. draft-model is one of "
            "--draft-models. auto: lookup; skip; lookup,skip; what is in --modules; a head that "
            "the model ships; --draft-models."
        ),
    ] = "auto",
    modules: Annotated[
        Path | None,
        typer.Option(help="A folder of trained modules (from `skipsearch train`) to consider too."),
    ] = None,
    draft_models: DraftModels = None,
    searcher: Annotated[
        str,
        typer.Option(help="How masks are proposed; `skipsearch list searchers` lists the names."),
    ] = "auto",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for all stages together: 90s, 20m, 1.5h; a number alone is seconds. A "
            "longer budget judges more masks and measures more prompts. Default: 10m, or no limit "
            "with --trials."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Judge at most this many masks. Default: 200, or no limit with --budget."
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="How a mask is judged: replay predicts its speed from recorded text (fast); wall "
            "decodes with it and takes the time."
        ),
    ] = "replay",
    loading: LoadOptions,
    seed: Seed = 0,
    whole_layers: Annotated[
        bool,
        typer.Option("--whole-layers", help="Skip attention and MLP of a layer only together."),
    ] = False,
    never_skip: Annotated[
        str | None,
        typer.Option(
            help="Sub-layers that no draft may skip, such as attn:0,mlp:3 (layers count from 0)."
        ),
    ] = None,
    draft_memory: Annotated[
        str | None,
        typer.Option(
            help="The most memory for a draft's copy of the weights in fewer bits: 200MB, 2GB. 0: "
            "none, drafts read the weights as they are stored. Default: half of the free memory "
            "for all copies that are compared."
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="Where judged masks are kept: a journal file, or a database "
            "(postgresql://…) that several `tune` processes share. Default: a journal "
            "beside the profile."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted search from its study.")
    ] = False,
    remeasure_latency: Annotated[
        bool,
        typer.Option(
            "--remeasure-latency",
            help="Measure the latency table again, even if one from an earlier search is stored.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the profile. Default: "
            "profiles/<model>/<task>/<device>--<dtype>.yaml"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing profile and its journal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Example: skipsearch tune --model demo --task pycode

    Find the fastest lossless way to decode a task. Candidates are prompt lookup (drafts copied from
    the text so far), the model reading less of itself (weights in fewer bits, fewer tokens of the
    vocabulary, fewer sub-layers), and lookup followed by the latter. The winner is measured on
    hold-out prompts and written to a profile. If drafting does not pay, the profile says so.

    You can interrupt a search at any time: the same command with --resume continues it. With
    several GPUs, start one process on each, all with the same --study postgresql://…"""
    require_usage(
        not (resume and force), "--resume keeps the study and --force replaces it: give one of them"
    )
    from skipsearch.cli.consoles import err, print_json
    from skipsearch.cli.consoles import out as console
    from skipsearch.cli.tune_view import TuneView
    from skipsearch.core.files import check_writable
    from skipsearch.errors import ProfileError
    from skipsearch.profile import save_profile
    from skipsearch.profile.canonical import to_plain_data
    from skipsearch.profile.copy_modules import copy_modules
    from skipsearch.replay.workload import task_warnings
    from skipsearch.tasks import load_task, task_files
    from skipsearch.tasks.sources.data_files import is_data_file
    from skipsearch.tuning.driver import tune as run
    from skipsearch.tuning.settings import (
        check_drafters,
        check_objective,
        check_searcher,
        parse_draft_memory,
        parse_duration,
        parse_sublayers,
    )
    from skipsearch.tuning.storage import discard_journal, is_url, redact_url, study_file

    check_searcher(searcher)
    names = split_names(draft_models)
    check_drafters(drafters, modules, bool(names))
    check_objective(objective)
    parse_duration(budget)
    unskippable = parse_sublayers(never_skip)
    memory_limit = parse_draft_memory(draft_memory)
    chosen = _with_sampling(load_task(task, data=data, chat=chat), temperature, top_p, top_k)
    warn([*chosen.notes])

    def writable(target: Path) -> str:
        """Check that a profile can be written to `target`. Returns the study next to it."""
        journal = study or str(target.with_suffix(".journal"))
        resume_advice = (
            "continue its search with --resume, "
            if study is None and Path(journal).exists()
            else ""
        )
        check_writable(
            target,
            force or resume,
            ProfileError,
            way_out=resume_advice,
            inputs={
                "--task or --data": task_files(task, data=data),
                "--study": filter(None, [study_file(journal)]),
            },
        )
        return journal

    if out is not None:
        writable(out)  # before the model is loaded
    adapter = load_cli_model(model, loading)
    warn(task_warnings(chosen, adapter, is_file=is_data_file(task)))
    target = out or default_path(adapter, chosen.name)
    journal = writable(target)
    if force and not is_url(journal):
        discard_journal(Path(journal))
    adapter = select_engine(
        adapter, loading.engine, _study_engine(journal) if resume or is_url(journal) else None
    )
    err.print(
        f"every judged mask is kept in {redact_url(journal)}: --resume continues from there",
        style="dim",
    )
    with TuneView(err) as view, _resume_hint(journal, resume):
        profile = run(
            adapter,
            chosen,
            searcher=searcher,
            budget=budget,
            trials=trials,
            objective=objective,
            seed=seed,
            study=journal,
            resume=resume,
            whole_layers=whole_layers,
            on_event=view,
            remeasure=remeasure_latency,
            drafters=drafters,
            never_skip=unskippable,
            modules=modules,
            draft_memory=memory_limit,
            draft_models=names,
        )
    profile = copy_modules(profile, [modules] if modules else [], target)
    save_profile(profile, target, replace=True)
    if as_json:
        print_json({"file": str(target), "profile": to_plain_data(profile)})
    else:
        view.print_summary(console, profile, target)


def _with_sampling(
    task: Task, temperature: float | None, top_p: float | None, top_k: int | None
) -> Task:
    """Return the task with the options that the user gave. Raises: DecodeError; BadParameter."""
    from skipsearch.engine.sampler import SamplingParams

    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in options.items() if value is not None}
    sampling = SamplingParams(**task.sampling.model_dump() | given)  # checks the values
    require_usage(
        not given.keys() - {"temperature"} or not sampling.is_greedy,
        "--top-p and --top-k choose among tokens to sample: give --temperature, too",
    )
    return replace(task, sampling=task.sampling.model_copy(update=given))


@contextmanager
def _resume_hint(study: str, resume: bool) -> Iterator[None]:
    """Say how to continue after an error, if this search wrote a journal."""
    from skipsearch.cli.consoles import err
    from skipsearch.errors import SkipSearchError
    from skipsearch.tuning.storage import is_url

    is_own = not is_url(study) and (resume or not Path(study).exists())
    try:
        yield
    except SkipSearchError:
        if is_own and Path(study).exists():
            err.print(
                "the judged masks are kept: the same command with --resume continues from there, "
                "with --force it begins again",
                style="dim",
            )
        raise


def _study_engine(study: str) -> str | None:
    """Return the engine of the trials that a study already has.

    Trials on another engine could not be compared with them.
    """
    from skipsearch.report.study_reader import read_study_engine

    return read_study_engine(study)


def default_path(model: object, task: str) -> Path:
    """Return the path of the profile if `--out` is not given."""
    from skipsearch.core.machine import describe_machine
    from skipsearch.profile.paths import device_slug, repository_path

    spec = model.spec  # type: ignore[attr-defined]
    machine = describe_machine(spec.device)
    return repository_path(
        spec.id, task, device_slug(machine.name, machine.count), spec.dtype_name, spec.quantization
    )
