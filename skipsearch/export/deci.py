"""Sub-layers out: the draft as a DeciLM checkpoint (Nemotron-NAS), whose layers may lack attention or MLP.

    block_configs[i].attention   {no_op, replace_with_linear: false, n_heads_in_group: query heads for each K/V head, null if no_op}
    block_configs[i].ffn         {no_op, replace_with_linear: false, ffn_mult: sets the MLP's width, null if no_op}

    width = 2/3 · ffn_mult · hidden_size, rounded down, then up to a multiple of 256

Weights are named as in Llama; a no-op sub-layer has neither weights nor the norm before it, and layers keep their numbers.
Sources, for keys and names: nvidia/Llama-3_1-Nemotron-51B-Instruct, configuration_decilm.py and block_config.py; vLLM,
vllm/model_executor/models/nemotron_nas.py; SGLang, srt/models/nemotron_nas.py; TensorRT-LLM, _torch/models/modeling_nemotron_nas.py;
llama.cpp, conversion/deci.py. All of them start from a first layer with attention.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from skipsearch.errors import ExportError
from skipsearch.export.conversion import Conversion
from skipsearch.export.source import Source
from skipsearch.mask import SkipMask

LLAMA_SHAPED = ("llama", "mistral")
WIDTH_STEP = 256
_ATTENTION, _MLP = ("self_attn.", "input_layernorm."), ("mlp.", "post_attention_layernorm.")
CONFIGURATION = Path(__file__).with_name("configuration_decilm.py")


def convert(source: Source, mask: SkipMask) -> Conversion:
    """Raises: ExportError if the model is not Llama-shaped, or the mask skips the attention of layer 0."""
    reason = _unlike_llama(source)
    if reason:
        raise ExportError(f"{source.id} has no DeciLM form: {reason}; a profile of whole layers can use --format hf")
    if 0 in mask.attn:
        raise ExportError("the mask skips the attention of layer 0, and DeciLM's first layer must have one: make a profile that keeps "
                          "it with `skipsearch tune --drafters skip --keep attn:0`, or use --format hf if the mask skips whole layers only")
    no_attention, no_mlp = frozenset(mask.attn), frozenset(mask.mlp)

    def rename(tensor: str) -> str | None:
        found = source.layer_of(tensor)
        if found is None:
            return tensor
        layer, _, behind = found
        skipped = (layer in no_attention and behind.startswith(_ATTENTION)) or (layer in no_mlp and behind.startswith(_MLP))
        return None if skipped else tensor

    return Conversion(_config(source, mask), rename, (CONFIGURATION,), known_to_transformers=False, caveats=_caveats(mask))


def _caveats(mask: SkipMask) -> tuple[str, ...]:
    lonely = sorted(set(mask.mlp) - set(mask.attn))
    vocabularies = ("Its conversion of DeciLM knows the vocabularies of Llama 2 and Llama 3 only.",)
    if not lonely:
        return vocabularies
    return *vocabularies, ("**Its drafts are wrong for this mask:** it leaves out the attention, too, of a layer that has no MLP, here "
                           f"{', '.join(map(str, lonely))}. The output stays the model's own, but few drafts are accepted.")


def _unlike_llama(source: Source) -> str | None:
    """Half a sentence: which part of the model DeciLM has no word for."""
    config = source.config
    if config.model_type not in LLAMA_SHAPED:
        return f"{config.model_type} is not Llama-shaped ({' and '.join(LLAMA_SHAPED)} are)"
    if getattr(config, "sliding_window", None) is not None:
        return f"its attention sees {config.sliding_window} tokens only (sliding_window)"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its projections have biases"
    if config.head_dim not in (None, config.hidden_size // config.num_attention_heads):
        return f"its heads are {config.head_dim} wide and not hidden_size / num_attention_heads"
    if config.hidden_act != "silu":
        return f"its MLP uses {config.hidden_act} and not silu"
    if config.intermediate_size % WIDTH_STEP:
        return f"its MLP is {config.intermediate_size} wide, which is no multiple of {WIDTH_STEP}"
    return None


def _config(source: Source, mask: SkipMask) -> dict[str, Any]:
    data, config = copy.deepcopy(source.data), source.config
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    data |= {
        "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": f"{CONFIGURATION.stem}.DeciLMConfig"},
        "block_configs": [_block(config, i in mask.attn, i in mask.mlp) for i in range(mask.n_layers)],
        # as engines that were written for transformers 4 look for them
        "rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "torch_dtype": data.pop("dtype", data.get("torch_dtype"))}
    return data


def _block(config: Any, no_attention: bool, no_mlp: bool) -> dict[str, Any]:
    group = config.num_attention_heads // config.num_key_value_heads
    multiplier = 1.5 * config.intermediate_size / config.hidden_size
    return {"attention": {"no_op": no_attention, "replace_with_linear": False, "n_heads_in_group": None if no_attention else group},
            "ffn": {"no_op": no_mlp, "replace_with_linear": False, "ffn_mult": None if no_mlp else multiplier}}
