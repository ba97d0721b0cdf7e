"""Searchers by name.

To add a searcher, write a file in this folder and a line in `SEARCHERS`. A searcher in another
package needs an entry point `skipsearch.searchers`.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from skipsearch.core.registry import resolve_name
from skipsearch.errors import SearchError
from skipsearch.searchers.base import Evidence, Searcher, SearchProblem

SEARCHERS: dict[str, str] = {
    "auto": "skipsearch.searchers.portfolio:Portfolio",
    "random": "skipsearch.searchers.random:Random",
    "middle": "skipsearch.searchers.middle:Middle",
    "uniform": "skipsearch.searchers.uniform:Uniform",
    "sensitivity": "skipsearch.searchers.sensitivity:Sensitivity",
    "knapsack": "skipsearch.searchers.knapsack:Knapsack",
    "asd": "skipsearch.searchers.asd:ASDSearcher",
    "clasp": "skipsearch.searchers.clasp:CLaSpSearcher",
    "s3d": "skipsearch.searchers.s3d:S3DSearcher",
    "exchange": "skipsearch.searchers.local_search:LocalSearch",
    "evolution": "skipsearch.searchers.evolution:Evolution",
    "tpe": "skipsearch.searchers.tpe:TPE",
    "gp": "skipsearch.searchers.gp:GP",
}

ENTRY_POINT_GROUP = "skipsearch.searchers"

__all__ = [
    "ENTRY_POINT_GROUP",
    "SEARCHERS",
    "Evidence",
    "SearchProblem",
    "Searcher",
    "make_searcher",
    "searcher_names",
    "searcher_table",
]


def searcher_names() -> tuple[str, ...]:
    """Return the sorted names of all searchers, including those of other packages."""
    return tuple(sorted(searcher_table()))


def make_searcher(name: str, problem: SearchProblem) -> Searcher:
    """Make a new searcher for `problem`.

    Raises: SearchError if the name is unknown (it suggests the nearest name), if the searcher of
    another package cannot be imported, or if the problem lacks evidence that the searcher needs.
    """
    table = searcher_table()
    try:
        build = resolve_name("searcher", name, table, SearchError)
    except (ImportError, AttributeError) as cause:
        origin = f"searcher {name!r} ({table[name]})"
        raise SearchError(
            f"{origin} cannot be imported: {cause}; reinstall or remove its package"
        ) from cause
    searcher: Searcher = build(problem)
    return searcher


def searcher_table() -> dict[str, str]:
    """Return "module:class" of each searcher, including those of installed entry points.

    An entry point cannot replace one of our names, so a name in a profile keeps its meaning.
    """
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | SEARCHERS


@cache
def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group.

    Packages stay as they are while a process runs, and listing them takes tens of milliseconds.
    """
    return metadata.entry_points(group=group)
