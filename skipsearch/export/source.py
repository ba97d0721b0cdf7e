"""The checkpoint that a draft is cut out of: files on disk, nothing loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipsearch.errors import ExportError
from skipsearch.models.config import known_config
from skipsearch.models.families import Family, family_of
from skipsearch.models.files import config_hash, read_config, weight_files, weights_hash
from skipsearch.models.hub import locate
from skipsearch.models.quantize import stored_quantization
from skipsearch.profile.match import ModelFacts


@dataclass(frozen=True)
class Source:
    """data: config.json as it stands. config: as transformers reads it. family: its row of the families table."""

    folder: Path
    id: str
    revision: str | None
    data: dict[str, Any]
    config: Any
    family: Family
    weights: list[Path]

    def facts(self, weights: bool) -> ModelFacts:
        """weights: with their hash, for which files outside the Hub's cache are read from end to end."""
        return ModelFacts(id=self.id, family=self.config.model_type, n_layers=self.n_layers, revision=self.revision,
                          config_sha256=config_hash(self.config), weights_sha256=weights_hash(self.weights) if weights else None)

    @property
    def n_layers(self) -> int:
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def target(self) -> str:
        """What another engine loads the model by: its Hub id, or its folder."""
        return self.id if "/" in self.id else str(self.folder)

    def layer_of(self, tensor: str) -> tuple[int, str, str] | None:
        """(layer, what stands before its number, what stands behind it) of a stored tensor's name; None outside the layers.

        A base model saved by itself lacks the first part of the path (`h.0.` for `transformer.h.0.`).
        """
        *outer, last = self.family.layers.split(".")
        path = "".join(f"(?:{part}\\.)?" for part in outer)
        found = re.match(rf"({path}{last}\.)(\d+)\.(.+)", tensor)
        return (int(found[2]), found[1], found[3]) if found else None


def open_source(name: str) -> Source:
    """The checkpoint of a model's name; a Hub id is downloaded where the cache does not have it.

    Raises: ModelError, as `load_model` does; ExportError for quantised weights.
    """
    folder, identity, revision = locate(name)
    data = read_config(folder, name)
    config = known_config(folder, name)
    family = family_of(config)
    if family.by_structure:
        raise ExportError(f"{name} is a {config.model_type} model, driven by its structure: nothing says under which names its layers are "
                          "stored; export a model of a family of the table")
    quantization = stored_quantization(config)
    if quantization is not None:
        raise ExportError(f"{name} is stored as {quantization}, whose layers belong to its quantiser: export the model that it was made "
                          "from, and quantise the draft after that")
    files = weight_files(folder, name)
    if files[0].suffix != ".safetensors":
        raise ExportError(f"{name} holds its weights as PyTorch files, and an export copies safetensors: load the model with transformers "
                          "once and save_pretrained it")
    return Source(folder, identity, revision, data, config, family, files)
