"""Rows of a source: columns renamed, joined to one line, and filtered as a manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source.

    id: unique within the source.
    location: file and line, for error messages.
    """

    id: str
    location: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowPools:
    """The rows that were read from a source.

    holdout: None if there is one pool, which both splits come from.
    """

    calibration: Sequence[Row]
    holdout: Sequence[Row] | None


def select_rows(rows: Sequence[Row], manifest: Manifest) -> list[Row]:
    """Return the rows of the manifest's categories, and those without a category.

    Their columns have the manifest's names. If the manifest names no categories, all rows are
    returned.

    Raises: TaskError if no row has a wanted category.
    """
    renamed = [Row(row.id, row.location, _rename_columns(row.columns, manifest)) for row in rows]
    wanted = manifest.categories
    selected = [
        row for row in renamed if wanted is None or row.columns.get("category") in (None, *wanted)
    ]
    if renamed and not selected:
        present = sorted({str(row.columns["category"]) for row in renamed})
        raise TaskError(
            f"{renamed[0].location}: no row is of a category that task {manifest.name} takes "
            f"({', '.join(wanted or ()) or 'none'}); there are {', '.join(present)}"
        )
    return selected


def take_first_turn(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns with the first of several turns as `prompt`.

    Spec-Bench and MT-bench have lists of turns. The second turn needs the model's own answer, so it
    is not used.
    """
    turns = columns.get("turns")
    if "prompt" in columns or not turns:
        return columns
    return {**columns, "prompt": turns[0] if isinstance(turns, list) else turns}


def _rename_columns(columns: Mapping[str, Any], manifest: Manifest) -> Mapping[str, Any]:
    """Return the columns under the manifest's names, with spaces for line breaks in `single_line`.

    If there is no prompt, the first of several turns becomes the prompt.
    """
    our_names = {name: ours for ours, name in manifest.columns.items() if ours not in columns}
    renamed = {our_names.get(name, name): value for name, value in columns.items()}
    joined = {
        name: " ".join(value.split("\n"))
        for name, value in renamed.items()
        if name in manifest.single_line and isinstance(value, str)
    }
    return take_first_turn(renamed | joined)
