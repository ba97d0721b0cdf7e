"""The last layer of a fused model as modules of transformers, whose weights can be trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skipsearch.errors import ModelError
from skipsearch.models import weight_overlay
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.third_party import silence_transformers


def unfuse_last_layer(fused_model: FusedAdapter, token_ids: Tensor) -> HFAdapter:
    """Return a model of one layer, a copy of the last one, with the norm and the head.

    Its matrices are dequantised, in float32 or a wider dtype. It has no embedding of its own.
    token_ids: tokens whose rows the head has, in this order.
    Raises: ModelError if the layer is not a plain attention and MLP.
    """
    from transformers import AutoModelForCausalLM

    spec = fused_model.spec
    if fused_model.read_origin is None or fused_model.experts is not None:
        raise ModelError(
            f"a draft head begins as a copy of the model's last layer, and that of {spec.id} "
            "cannot be copied: it has experts, or was not read from modules"
        )
    origin, dtype = fused_model.read_origin(), torch.promote_types(spec.dtype, torch.float32)
    config = copy.deepcopy(origin.config)
    text: Any = config.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == spec.n_layers:  # has a value for each layer
            setattr(text, name, value[-1:])
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, len(token_ids), None
    config.tie_word_embeddings = text.tie_word_embeddings = False
    with silence_transformers():
        modules: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=origin.family.attn_implementation, dtype=dtype
        )
    modules.eval().requires_grad_(False)
    head: Any = modules.get_output_embeddings()
    unembed: Any = fused_model.unembed
    head.weight.copy_(unembed.read_rows(token_ids))
    if head.bias is not None and unembed.bias is not None:
        head.bias.copy_(unembed.bias[token_ids])
    last = spec.n_layers - 1
    spec = replace(spec, n_layers=1, vocab_size=len(token_ids), dtype=dtype, engine="hf")
    layer = HFAdapter(modules, spec, origin.family)
    # A file may bring factors of rotary frequencies that no config has.
    layer._parts = replace(layer._parts, rotary=copy.deepcopy(origin.rotary))
    weights = {
        f"0.{name.partition('.')[2]}": weight
        for kind in weight_overlay.SUBLAYER_KINDS
        for name, weight in weight_overlay.get_sublayer_weights(
            fused_model,
            last,
            kind,
            {
                f"{last}.{key.partition('.')[2]}"
                for key in weight_overlay.get_sublayer_weights(layer, 0, kind)
            },
        ).items()
    }
    overlaid = weight_overlay.overlay_final_norm(
        weight_overlay.overlay_sublayer_weights(layer, weights),
        weight_overlay.get_final_norm(fused_model),
    )
    assert isinstance(overlaid, HFAdapter)
    return overlaid
