"""Convert a draft to an ordinary Hugging Face checkpoint with fewer layers, numbered from 0.

Every engine that supports the family can load it. A mask that skips only the attention or only the
MLP of a layer cannot be exported in this form. The config keys to renumber, with layer numbers or
an entry for each layer, are those of transformers' configuration classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ExportError
from skipsearch.export.checkpoint import Checkpoint

_SLIDING_WINDOW_CAVEAT = (
    "llama.cpp tells layers with a sliding window by their number and not by `layer_types`. Here "
    "it takes some for others, and "
    "drafts worse than the other engines.",
)


@dataclass(frozen=True)
class Conversion:
    """The changes that turn a checkpoint into a draft."""

    config: dict[str, Any]  # the new config.json
    rename_tensor: Callable[[str], str | None]  # stored name -> new name; None: left out
    caveats: tuple[str, ...] = ()  # sentences for the README's llama.cpp section


def convert_to_hf(source: Checkpoint, mask: SkipMask) -> Conversion:
    """Return the conversion that removes the layers of `mask`.

    Raises: ExportError if the mask skips only a part of a layer, or all layers, or if a layer's
    output depends on its number.
    """
    _require_whole_layers(mask)
    reason = _layer_number_dependence(source)
    if reason:
        raise ExportError(
            f"no ordinary checkpoint of {source.id} with fewer layers computes what the draft "
            f"does: {reason}"
        )
    layers = [i for i in range(mask.n_layers) if i not in mask.attn]
    new_number = {old: new for new, old in enumerate(layers)}

    def rename(tensor: str) -> str | None:
        parts = source.split_layer_name(tensor)
        if parts is None:
            return tensor
        layer, prefix, suffix = parts
        return f"{prefix}{new_number[layer]}.{suffix}" if layer in new_number else None

    config = _reduced_config(source, layers)
    return Conversion(
        config,
        rename,
        caveats=_SLIDING_WINDOW_CAVEAT if len(set(config.get("layer_types", ()))) > 1 else (),
    )


def _require_whole_layers(mask: SkipMask) -> None:
    half = sorted(set(mask.attn) ^ set(mask.mlp))
    if half:
        part = "attention but not the MLP" if half[0] in mask.attn else "MLP but not the attention"
        raise ExportError(
            f"the mask skips the {part} of layer {half[0]}, and an ordinary checkpoint has whole "
            "layers only: make a profile with `skipsearch tune --whole-layers`"
        )
    if len(mask.attn) == mask.n_layers:
        raise ExportError(
            f"the mask skips all {mask.n_layers} layers, and a checkpoint needs at least one"
        )


def _layer_number_dependence(source: Checkpoint) -> str | None:
    if source.config.get_text_config(decoder=True) is not source.config:
        return (
            "it is the text part of a model that also sees images, and the rest would have to come "
            "along"
        )
    if getattr(source.config, "scale_attn_by_inverse_layer_idx", False):
        return (
            "it divides attention scores by the number of the layer "
            "(scale_attn_by_inverse_layer_idx), and numbers change"
        )
    return None


def _reduced_config(source: Checkpoint, layers: list[int]) -> dict[str, Any]:
    """Return config.json for these layers. Keys that name no layers are unchanged."""
    data, config = copy.deepcopy(source.config_json), source.config
    data[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    types = getattr(config, "layer_types", None) or []
    # Write the types: without the key, they follow a pattern of layer numbers, which no longer
    # fits.
    if "layer_types" in data or len(set(types)) > 1:
        data["layer_types"] = [types[i] for i in layers]
    if getattr(config, "no_rope_layers", None):  # one flag for each layer (SmolLM3)
        data["no_rope_layers"] = [config.no_rope_layers[i] for i in layers]
    if "max_window_layers" in data:  # the first layers, up to this number, have no window
        data["max_window_layers"] = sum(i < data["max_window_layers"] for i in layers)
    if hasattr(config, "decoder_sparse_step"):  # every n-th layer has experts
        dense = [
            new
            for new, i in enumerate(layers)
            if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step
        ]
        data |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return data
