"""The table of families: where a Hugging Face model of each keeps the pieces that the generic adapter drives.

To add a family of this shape: one row, keyed by the `model_type` of its config.
"""

from __future__ import annotations

from dataclasses import dataclass

from skipsearch.errors import ModelError
from skipsearch.names import unknown


@dataclass(frozen=True)
class Family:
    """Dotted paths inside `AutoModelForCausalLM`, and inside one of its layers.

    A layer is two sequential residual sub-layers: h + attn(attn_norm(h)), then h + mlp(mlp_norm(h)).
    """

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    rotary: str = "model.rotary_emb"
    attn: str = "self_attn"
    attn_norm: str = "input_layernorm"
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}


def family_of(config: object) -> Family:
    """The row for a config. Raises: ModelError for a family without one, or a feature that could not be exact."""
    name = getattr(config, "model_type", None) or "(none)"
    if name not in FAMILIES:
        raise ModelError(f"{unknown('model family', name, FAMILIES)}; add a row to skipsearch/models/families.py if its layers are "
                         "two sequential residual sub-layers")
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if window and (kinds & {"sliding_attention"} or not kinds) and getattr(config, "use_sliding_window", True):
        raise ModelError(f"this {name} model uses sliding-window attention ({window} tokens), which is not driven exactly yet; "
                         "use a full-attention model of the family")
    return FAMILIES[name]
