"""Find and load the draft heads that a checkpoint ships: multi-token prediction (MTP) layers.

transformers' model classes drop their tensors. In safetensors files they are under `mtp.`
(Qwen3-Next, Qwen3.5), or they are layers after the last one that the config counts (DeepSeek-V3,
GLM-4.5); in GGUF files they are under `nextn`. transformers' class for such layers, `MtpModel`,
holds the loaded head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from skipsearch.errors import ModelError
from skipsearch.models import synthetic
from skipsearch.models.loading.gguf_file import read_gguf
from skipsearch.models.loading.gguf_model import find_gguf, is_gguf
from skipsearch.models.loading.hub import resolve_model
from skipsearch.models.loading.model_files import find_model_file
from skipsearch.models.loading.weight_files import list_stored_tensors, list_weight_files
from skipsearch.models.third_party import first_line_of, silence_transformers

_MTP = re.compile(r"(?:^|\.)mtp[._]|\.nextn\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Families whose heads can be loaded, by where their tensors are.
_IN_MTP = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_AFTER_LAST_LAYER = frozenset({"deepseek_v3", "glm4_moe"})


def ships_draft_head(model_name: str, n_layers: int) -> bool:
    """Return whether the files of a model have tensors of draft heads.

    n_layers: layers that the model runs. Raises: ModelError if the files cannot be read.
    """
    if synthetic.is_synthetic(model_name):
        return False
    return has_head_tensors(_list_tensor_names(find_model_file(model_name)), n_layers)


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


def can_load_head(family: str) -> bool:
    """Return whether the draft heads of a family can be loaded."""
    return family in _IN_MTP | _AFTER_LAST_LAYER


def has_shipped_head(model: Any) -> bool:
    """Return whether the files of transformers' model have tensors of draft heads.

    Raises: ModelError if they cannot be read, as those of a model that was made in memory.
    """
    config, stored_head = model.config, getattr(model, "stored_head", None)
    n_layers: int = config.get_text_config().num_hidden_layers
    if stored_head is not None:
        has_head: bool = stored_head.has_head(n_layers)
        return has_head
    return ships_draft_head(config.name_or_path, n_layers)


def load_shipped_head(model: Any, family: str) -> nn.Module:
    """Load the first draft head of a model, as transformers' `MtpModel` of one layer.

    model: transformers' model, which was loaded from a folder or a GGUF file. The head shares its
    embedding, its rotary embedding and its output matrix. Raises: ModelError if there is no such
    head, or if it does not fit the model.
    """
    try:
        from transformers.modeling_layers import MtpModel

        stored_head = getattr(model, "stored_head", None)
        with _expect_one_head(model, family), silence_transformers():
            if stored_head is not None:
                head = stored_head.load(model, lambda: MtpModel(model, 1))
            else:
                device = model.get_output_embeddings().weight.device
                head = MtpModel.from_pretrained(model, device_map={"": device})
    except Exception as error:  # any error of transformers
        raise ModelError(
            f"the draft head of {model.config.name_or_path} cannot be loaded "
            f"({first_line_of(error)}): draft without it"
        ) from None
    loaded: nn.Module = head.eval().requires_grad_(False)
    return loaded


@contextmanager
def _expect_one_head(model: Any, family: str) -> Iterator[None]:
    """Give a model what `MtpModel` reads of it: the config and the names of its first head.

    The layer of a head has full attention in all families that are known.
    """
    config = model.config.get_text_config()
    layer = rf"model\.layers\.{config.num_hidden_layers}\."
    pattern = r"^mtp\.(?!layers\.[1-9])" if family in _IN_MTP else layer
    with ExitStack() as changes:
        changes.enter_context(_changed(model, "_keys_to_ignore_on_load_unexpected", [pattern]))
        changes.enter_context(_changed(config, "num_mtp_layers", 1))
        if getattr(config, "layer_types", None) is not None:
            changes.enter_context(_changed(config, "mtp_layer_types", ["full_attention"]))
        if (mlp_types := getattr(config, "mlp_layer_types", None)) is not None:
            changes.enter_context(_changed(config, "mtp_mlp_layer_types", mlp_types[-1:]))
        yield


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object for some time."""
    missing = object()
    before = getattr(owner, name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
