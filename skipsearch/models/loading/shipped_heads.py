"""Find the draft heads that a checkpoint ships: multi-token prediction (MTP) layers.

transformers drops their tensors, because its classes do not run them. In safetensors files they are
under `mtp.`, or they are layers after the last one that the config counts (DeepSeek-V3, GLM-4.5);
in GGUF files they are under `nextn`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from skipsearch.models import synthetic
from skipsearch.models.loading.aliases import find_packaged_model
from skipsearch.models.loading.gguf_file import read_gguf
from skipsearch.models.loading.gguf_model import find_gguf, is_gguf
from skipsearch.models.loading.hub import resolve_model
from skipsearch.models.loading.weight_files import list_stored_tensors, list_weight_files

_MTP = re.compile(r"(?:^|\.)mtp[._]|\.nextn\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def ships_draft_head(model_name: str, n_layers: int) -> bool:
    """Return whether the files of a model have tensors of draft heads.

    n_layers: layers that the model runs. Raises: ModelError if the files cannot be read.
    """
    if synthetic.is_synthetic(model_name):
        return False
    return has_head_tensors(_list_tensor_names(find_packaged_model(model_name)), n_layers)


def has_head_tensors(names: Iterable[str], n_layers: int) -> bool:
    """Return whether one of these tensors belongs to a draft head."""
    return any(
        _MTP.search(name) or any(int(layer) >= n_layers for layer in _LAYER.findall(name))
        for name in names
    )


def _list_tensor_names(model_name: str) -> list[str]:
    if is_gguf(model_name):
        return list(read_gguf(find_gguf(model_name)).tensors)
    folder, _, _ = resolve_model(model_name)
    return [tensor.name for tensor in list_stored_tensors(list_weight_files(folder, model_name))]
