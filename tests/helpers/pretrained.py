"""Pretrained models that packages carry: where their files lie, and the marks of their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipsearch.models.loading.aliases import MODELS_FOLDER, PACKAGED_MODELS


def packaged_file(alias: str) -> Path:
    """Return the path that a model's file has in this checkout, whether it was fetched or not."""
    return Path(__file__).parents[2] / MODELS_FOLDER / PACKAGED_MODELS[alias].file


def marks_of(alias: str, mark: pytest.MarkDecorator, command: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need a model, which `command` fetches."""
    file = packaged_file(alias)
    reason = f"{file.name} is not in {MODELS_FOLDER}: {command}"
    return [
        mark,
        pytest.mark.xdist_group("native"),
        pytest.mark.skipif(not file.is_file(), reason=reason),
    ]
