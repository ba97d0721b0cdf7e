"""Searchers by name. To add one: a file in this folder and a line here (or an entry point
`skipsearch.searchers`).
"""

from __future__ import annotations

from importlib.metadata import entry_points

from skipsearch.core.registry import resolve_name
from skipsearch.errors import SearchError
from skipsearch.searchers.base import Evidence, Searcher, SearchProblem

SEARCHERS: dict[str, str] = {
    "auto": "skipsearch.searchers.portfolio:Portfolio",
    "random": "skipsearch.searchers.random:Random",
    "first": "skipsearch.searchers.first:First",
    "middle": "skipsearch.searchers.middle:Middle",
    "last": "skipsearch.searchers.last:Last",
    "uniform": "skipsearch.searchers.uniform:Uniform",
    "sensitivity": "skipsearch.searchers.sensitivity:Sensitivity",
    "knapsack": "skipsearch.searchers.knapsack:Knapsack",
    "asd": "skipsearch.searchers.asd:ASDSearcher",
    "clasp": "skipsearch.searchers.clasp:CLaSpSearcher",
    "s3d": "skipsearch.searchers.s3d:S3DSearcher",
    "greedy": "skipsearch.searchers.greedy:Greedy",
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
    """Every searcher that `make_searcher` can build, third parties' included, sorted."""
    return tuple(sorted(searcher_table()))


def make_searcher(name: str, problem: SearchProblem) -> Searcher:
    """A fresh searcher over `problem`.

    Raises: SearchError if the name is unknown (with the nearest one), if a third party's searcher
    cannot be imported, or if the searcher needs evidence that the problem does not have."""
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
    """Where each searcher is, ours and the installed entry points'. Ours win, so that no package
    changes what a name in a profile means.
    """
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | SEARCHERS
