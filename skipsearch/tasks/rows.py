"""Records of a source and their columns: renamed, joined to one line, and filtered as a manifest
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source. id is unique within its source; where says for an error which record
    it is.
    """

    id: str
    location: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowPools:
    """What a source has read. holdout None: there is one pool, and the two halves are cut from
    it.
    """

    calibration: Sequence[Row]
    holdout: Sequence[Row] | None


def select_rows(rows: Sequence[Row], manifest: Manifest) -> list[Row]:
    """Rows with the manifest's names for columns, those of other categories left out.

    Raises: TaskError if the rows have categories and none is wanted.
    """
    renamed = [Row(row.id, row.location, _rename_columns(row.columns, manifest)) for row in rows]
    wanted = manifest.categories
    kept = [
        row for row in renamed if wanted is None or row.columns.get("category") in (None, *wanted)
    ]
    if renamed and not kept:
        found = sorted({str(row.columns["category"]) for row in renamed})
        raise TaskError(
            f"{renamed[0].location}: no row is of a category that task {manifest.name} takes "
            f"({', '.join(wanted or ()) or 'none'}); there are {', '.join(found)}"
        )
    return kept


def take_first_turn(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Spec-Bench and MT-bench give a list of turns. Only the first is a prompt: the second needs
    the model's own answer.
    """
    turns = columns.get("turns")
    if "prompt" in columns or not turns:
        return columns
    return {**columns, "prompt": turns[0] if isinstance(turns, list) else turns}


def _rename_columns(columns: Mapping[str, Any], manifest: Manifest) -> Mapping[str, Any]:
    theirs = {name: ours for ours, name in manifest.columns.items() if ours not in columns}
    renamed = {theirs.get(name, name): value for name, value in columns.items()}
    joined = {
        name: " ".join(value.split("\n"))
        for name, value in renamed.items()
        if name in manifest.single_line and isinstance(value, str)
    }
    return take_first_turn(renamed | joined)
