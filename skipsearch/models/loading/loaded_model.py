"""A model as its files describe it, before an engine takes it over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipsearch.models.adapter import ModelSpec
from skipsearch.models.families.table import Family


@dataclass(frozen=True)
class LoadedModel:
    """A model of transformers, and what is known about it.

    Its matrices may still be in a file, as `StoredLinear` and `StoredEmbedding`.
    """

    model: Any  # nn.Module
    spec: ModelSpec
    family: Family
    tokenizer: Any  # None if the model has none
