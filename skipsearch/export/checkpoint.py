"""The checkpoint of the full model, from which a draft is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipsearch.errors import ExportError
from skipsearch.models.families.table import Family, family_of
from skipsearch.models.loading.config import load_config
from skipsearch.models.loading.hub import resolve_model
from skipsearch.models.loading.quantize import read_stored_quantization
from skipsearch.models.loading.weight_files import (
    hash_config,
    hash_weight_files,
    list_weight_files,
    read_config,
)
from skipsearch.profile.compatibility import ModelFacts


@dataclass(frozen=True)
class Checkpoint:
    """A model's files on disk. No weights are loaded."""

    folder: Path
    id: str  # Hub id, or the name of a local folder
    revision: str | None
    config_json: dict[str, Any]  # config.json unchanged
    config: Any  # the same, as transformers reads it
    family: Family  # its row of the families table
    weights: list[Path]  # safetensors files

    def model_facts(self, hash_weights: bool) -> ModelFacts:
        """Return the model's facts, for a comparison with a profile.

        hash_weights: also hash the weights. Files outside the Hub's cache must be read for it.
        """
        return ModelFacts(
            id=self.id,
            family=self.config.model_type,
            n_layers=self.n_layers,
            revision=self.revision,
            config_sha256=hash_config(self.config),
            weights_sha256=hash_weight_files(self.weights) if hash_weights else None,
        )

    @property
    def n_layers(self) -> int:
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def model_argument(self) -> str:
        """The name by which another engine loads the model: its Hub id, or its folder."""
        return self.id if "/" in self.id else str(self.folder)

    def split_layer_name(self, tensor: str) -> tuple[int, str, str] | None:
        """Split a stored tensor's name into (layer, text before its number, text after the dot).

        None for a tensor outside the layers. The path of a tensor may lack its first part, if a
        base model was saved alone (`h.0.` for `transformer.h.0.`).
        """
        *outer, last = self.family.layers.split(".")
        path = "".join(f"(?:{part}\\.)?" for part in outer)
        match = re.match(rf"({path}{last}\.)(\d+)\.(.+)", tensor)
        return (int(match[2]), match[1], match[3]) if match else None


def open_checkpoint(name: str) -> Checkpoint:
    """Find the checkpoint of a model, and download it if it is a Hub id that is not cached.

    Raises: ModelError as `load_model` does; ExportError if no draft can be made from it.
    """
    folder, identity, revision = resolve_model(name)
    data = read_config(folder, name)
    config = load_config(folder, name)
    family = family_of(config)
    if family.is_generic:
        raise ExportError(
            f"{name} is a {config.model_type} model, driven by its structure: nothing says under "
            "which names its layers are "
            "stored; export a model of a family of the table"
        )
    quantization = read_stored_quantization(config)
    if quantization is not None:
        raise ExportError(
            f"{name} is stored as {quantization}, whose layers belong to its quantiser: export the "
            "model that it was made "
            "from, and quantise the draft after that"
        )
    files = list_weight_files(folder, name)
    if files[0].suffix != ".safetensors":
        raise ExportError(
            f"{name} holds its weights as PyTorch files, and an export copies safetensors: load "
            "the model with transformers "
            "once and save_pretrained it"
        )
    return Checkpoint(folder, identity, revision, data, config, family, files)
