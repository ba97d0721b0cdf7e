"""Searchers by name. To add one: a file in this folder and a line here (or an entry point `skipsearch.searchers`)."""

from __future__ import annotations

from skipsearch.searchers.base import Costs, Evidence, Searcher, SearchProblem

SEARCHERS: dict[str, str] = {}

__all__ = ["SEARCHERS", "Costs", "Evidence", "SearchProblem", "Searcher"]
