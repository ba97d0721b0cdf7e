"""Whole layers out: the draft as an ordinary Hugging Face checkpoint of fewer layers, numbered from 0.

Every engine that knows the family can load it. A mask that skips the attention of a layer and keeps its MLP has no such form; see
`deci`. Config keys that speak of layers by number or one by one are read off transformers' configuration classes.
"""

from __future__ import annotations

import copy
from typing import Any

from skipsearch.errors import ExportError
from skipsearch.export.conversion import Conversion
from skipsearch.export.source import Source
from skipsearch.mask import SkipMask

_BY_NUMBER = ("llama.cpp tells layers with a sliding window by their number and not by `layer_types`. Here it takes some for others, and "
              "drafts worse than the other engines.",)


def convert(source: Source, mask: SkipMask) -> Conversion:
    """Raises: ExportError if the mask skips half a layer or all of them, or what a layer computes depends on its number."""
    _require_whole_layers(mask)
    reason = _needs_its_layer_numbers(source)
    if reason:
        raise ExportError(f"no ordinary checkpoint of {source.id} with fewer layers computes what the draft does: {reason}")
    kept = [i for i in range(mask.n_layers) if i not in mask.attn]
    new_number = {old: new for new, old in enumerate(kept)}

    def rename(tensor: str) -> str | None:
        found = source.layer_of(tensor)
        if found is None:
            return tensor
        layer, before, behind = found
        return f"{before}{new_number[layer]}.{behind}" if layer in new_number else None

    config = _cut(source, kept)
    return Conversion(config, rename, caveats=_BY_NUMBER if len(set(config.get("layer_types", ()))) > 1 else ())


def _require_whole_layers(mask: SkipMask) -> None:
    half = sorted(set(mask.attn) ^ set(mask.mlp))
    if half:
        part = "attention but not the MLP" if half[0] in mask.attn else "MLP but not the attention"
        raise ExportError(f"the mask skips the {part} of layer {half[0]}, and an ordinary checkpoint has whole layers only: use "
                          "--format deci, or make a profile with `skipsearch tune --whole-layers`")
    if len(mask.attn) == mask.n_layers:
        raise ExportError(f"the mask skips all {mask.n_layers} layers, and a checkpoint needs at least one")


def _needs_its_layer_numbers(source: Source) -> str | None:
    if source.config.get_text_config(decoder=True) is not source.config:
        return "it is the text part of a model that also sees images, and the rest would have to come along"
    if getattr(source.config, "scale_attn_by_inverse_layer_idx", False):
        return "it divides attention scores by the number of the layer (scale_attn_by_inverse_layer_idx), and numbers change"
    return None


def _cut(source: Source, kept: list[int]) -> dict[str, Any]:
    """config.json for the layers that are kept; whatever does not speak of single layers stays as it was written."""
    data, config = copy.deepcopy(source.data), source.config
    data[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    types = getattr(config, "layer_types", None) or []
    if "layer_types" in data or len(set(types)) > 1:  # left out, they follow a pattern of layer numbers, which no longer holds
        data["layer_types"] = [types[i] for i in kept]
    if getattr(config, "no_rope_layers", None):   # a flag a layer, as SmolLM3 has them
        data["no_rope_layers"] = [config.no_rope_layers[i] for i in kept]
    if "max_window_layers" in data:  # the first layers, which see everything
        data["max_window_layers"] = sum(i < data["max_window_layers"] for i in kept)
    if hasattr(config, "decoder_sparse_step"):  # every n-th layer has experts, but for those listed
        dense = [new for new, i in enumerate(kept) if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step]
        data |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return data
