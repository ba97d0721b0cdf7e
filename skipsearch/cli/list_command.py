"""`skipsearch list`: the names that other commands take and profiles hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from skipsearch.cli.options import Json, require_usage

KINDS = ("models", "tasks", "searchers", "engines", "drafters", "exits")


def catalogue(
    what: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    as_json: Json = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="models: remove the packed weights that are stored for later loads."
        ),
    ] = False,
) -> None:
    """Example: skipsearch list searchers

    List the names that commands take: models (aliases of Hub ids, and files whose packed weights
    are stored), tasks, searchers, engines; or the names that profiles hold: drafters, exits."""
    require_usage(what in KINDS, f"{what!r} is not one of {', '.join(KINDS)}")
    require_usage(what == "models" or not remove, f"--remove is for models, and not for {what}")
    if remove:
        _remove_weights(as_json)
        return
    from rich.table import Table

    from skipsearch.cli.consoles import out, print_json

    entries = list_entries(what)
    if as_json:
        print_json(entries)
        return
    more = next((list(note) for note in entries.values() if isinstance(note, dict)), [""])
    table = Table(what.removesuffix("s"), *more, box=None, pad_edge=False)
    for name, note in entries.items():
        table.add_row(name, *(note.values() if isinstance(note, dict) else [note]))
    out.print(table)


def list_entries(kind: str) -> dict[str, Any]:
    """Return a note on each entry of a kind, or several notes by their heading.

    kind: one of KINDS.
    """
    return dict(_LISTERS[kind]())


def _remove_weights(as_json: bool) -> None:
    from skipsearch.cli.consoles import out, print_json
    from skipsearch.engine.native import WeightCache

    cache = WeightCache()
    n_bytes = cache.remove_all()
    if as_json:
        print_json({"removed_bytes": n_bytes})
    else:
        out.print(f"removed {n_bytes / 1e9:.2f} GB of packed weights from {cache.folder}")


def _list_models() -> dict[str, str]:
    from skipsearch.engine.native import WeightCache
    from skipsearch.models.families.table import FAMILIES
    from skipsearch.models.loading.aliases import ALIASES, PACKAGED_MODELS

    known = f"models of the families {', '.join(sorted(FAMILIES))}"
    others = (
        "models of any other decoder-only class of transformers, read by structure and checked at "
        "load; `doctor --model` tells"
    )
    packaged = {
        name: f"a GGUF file in {len(model.parts)} Python package(s), first "
        f"{model.parts[0][0].partition('==')[0]}"
        for name, model in PACKAGED_MODELS.items()
    }
    stored = {
        str(entry.path): f"packed weights of {entry.model}, {entry.n_bytes / 1e9:.2f} GB, which "
        "--remove removes"
        for entry in WeightCache().list_entries()
    }
    names = {"demo": "the embedded model"} | packaged | ALIASES | stored
    return names | {"org/name, or a folder": known, "": others}


def _list_tasks() -> dict[str, str]:
    from skipsearch.tasks.load import manifest_path, read_manifest, task_names

    return {name: read_manifest(manifest_path(name)).description for name in task_names()}


def _first_lines(table: dict[str, str]) -> dict[str, str]:
    """Return the first line of each module's docstring, or why it cannot be imported."""
    from importlib import import_module

    notes = {}
    for name, target in sorted(table.items()):
        try:
            doc = (import_module(target.partition(":")[0]).__doc__ or "").strip().splitlines()
        except ImportError as error:
            doc = [f"cannot be imported: {error}"]
        notes[name] = doc[0].split("`: ", 1)[-1] if doc else ""
    return notes


def _list_searchers() -> dict[str, str]:
    from skipsearch.searchers import searcher_table

    return _first_lines(searcher_table())


def _list_engines() -> dict[str, str]:
    from skipsearch.engine.engines import ENGINES

    return ENGINES


def _list_drafters() -> dict[str, dict[str, str]]:
    """Return what each drafter does, its source, its requirements and its combinations."""
    from skipsearch.core.recipe import DRAFTERS
    from skipsearch.core.registry import resolve_name
    from skipsearch.errors import SkipSearchError

    rows = {}
    for name, what in _first_lines(DRAFTERS).items():
        about = resolve_name("drafter", name, DRAFTERS, SkipSearchError).info
        rows[name] = {
            "what it does": what,
            "source": about.source,
            "needs": about.requires,
            "goes with": about.combines_with,
        }
    return rows


def _list_exits() -> dict[str, str]:
    from skipsearch.core.recipe import EXITS

    return _first_lines(EXITS)


_LISTERS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "models": _list_models,
    "tasks": _list_tasks,
    "searchers": _list_searchers,
    "engines": _list_engines,
    "drafters": _list_drafters,
    "exits": _list_exits,
}
