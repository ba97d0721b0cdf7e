"""Architectures without experts or recurrent layers (Gemma 4 may have experts), one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    BY_HALVES,
    JOINED_QKV,
    add_attention_bias,
    add_experts,
    add_nothing,
    list_sliding,
    name_of,
    name_sliding,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

EXAONE4_PERIOD = 4  # the last of as many layers sees all of the text
GEMMA2_27B_LAYERS = 46  # attention is scaled by the width of all heads in these two alone
GEMMA3_27B_LAYERS = 62

GEMMA4: Mapping[str, Sequence[Source]] = {
    "layer_scalar": [Source(("layer_output_scale.weight",))],
    "router.scale": [Source(("ffn_gate_inp.scale",))],
    "router.per_expert_scale": [Source(("ffn_down_exps.scale",))],
}
APERTUS: Mapping[str, Sequence[Source]] = {
    f"mlp.act_fn.{name}": [Source((), key=f"xielu.{name}")]
    for name in ("alpha_p", "alpha_n", "beta", "eps")
}


def add_granite(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    for setting, key, neutral in (
        ("attention_multiplier", "attention.scale", settings["head_dim"] ** -0.5),
        ("embedding_multiplier", "embedding_scale", 1.0),
        ("residual_multiplier", "residual_scale", 1.0),
        ("logits_scaling", "logit_scale", 1.0),
    ):
        settings[setting] = file.require_float(f"{name_of(file)}.{key}", neutral, 1e-9, 1e9)


def _add_glm4(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    if any(file.get("glm4.rope.dimension_sections", list, [])):
        raise GGUFError(
            f"{file.name}: glm4.rope.dimension_sections says that it is the text part of a model "
            "that sees, whose rows have another order, and those are not read: take the model's "
            "folder instead"
        )


def _add_seed_oss(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    settings["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors


def _add_mistral3(file: GGUFFile, settings: Settings) -> None:
    rope = settings["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise GGUFError(
            f"{file.name}: mistral3.rope.scaling.type has to be yarn; download the file again"
        )
    # Of equal numbers, the scale of the rotated halves is 1, as llama.cpp has it.
    magnitude = file.require_float("mistral3.rope.scaling.yarn_log_multiplier", 1.0, 1e-9, 1e9)
    rope |= {
        "mscale": magnitude,
        "mscale_all_dim": magnitude,
        "llama_4_scaling_beta": file.require_float(
            "mistral3.attention.temperature_scale", 0.0, 0.0, 1e3
        ),
    }


def add_ernie(file: GGUFFile, settings: Settings) -> None:
    settings["use_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_olmo3(file: GGUFFile, settings: Settings) -> None:
    rope = settings["rope_parameters"]
    settings |= {
        "sliding_window": file.require_int("olmo2.attention.sliding_window"),
        "layer_types": name_sliding(list_sliding(file, settings["num_hidden_layers"])),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
    }


def _add_exaone4(file: GGUFFile, settings: Settings) -> None:
    n_layers = settings["num_hidden_layers"]
    window = file.get("exaone4.attention.sliding_window", int, 0) or None
    slides = file.metadata.get("exaone4.attention.sliding_window_pattern")
    if not isinstance(slides, list):  # as in llama.cpp, which asks for the window alone
        slides = [bool(window) and i % EXAONE4_PERIOD < EXAONE4_PERIOD - 1 for i in range(n_layers)]
    if len(slides) != n_layers or (any(slides) and window is None):
        raise GGUFError(
            f"{file.name}: exaone4.attention.sliding_window_pattern does not fit its "
            f"{n_layers} layers and the window {window}; download the file again"
        )
    settings["sliding_window"] = window
    settings["layer_types"] = name_sliding(slides)


def _add_phi3(file: GGUFFile, settings: Settings) -> None:
    settings["sliding_window"] = file.get("phi3.attention.sliding_window", int, 0) or None
    settings["pad_token_id"] = settings["pad_token_id"] or 0


def _add_gemma(file: GGUFFile, settings: Settings) -> None:
    settings["hidden_act"] = settings["hidden_activation"] = "gelu_pytorch_tanh"


def _add_gemma2(file: GGUFFile, settings: Settings) -> None:
    scalar = settings["head_dim"]
    if settings["num_hidden_layers"] == GEMMA2_27B_LAYERS:
        scalar = settings["hidden_size"] // settings["num_attention_heads"]
    caps = {
        setting: file.require_float(f"gemma2.{setting}", default, 1e-3, 1e6)
        for setting, default in (
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
        )
    }
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.get("gemma2.attention.sliding_window", int, 4096),
        "query_pre_attn_scalar": scalar,
        **caps,
    }


def _add_gemma3(file: GGUFFile, settings: Settings) -> None:
    rope = settings.pop("rope_parameters")
    scalar = settings["head_dim"]
    if settings["num_hidden_layers"] == GEMMA3_27B_LAYERS:
        scalar = settings["hidden_size"] // settings["num_attention_heads"]
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.require_int("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.require_float("gemma3.rope.freq_base_swa", 1e4, 1.0, 1e15),
            },
        },
    }


def _add_gemma4(file: GGUFFile, settings: Settings) -> None:
    n_layers, full_rope = settings["num_hidden_layers"], settings["rope_parameters"]
    slides, names = list_sliding(file, n_layers), file.tensors
    n_shared = file.get("gemma4.attention.shared_kv_layers", int, 0)
    for i in range(max(n_layers - n_shared, 0), n_layers):  # they read the K/V of earlier layers
        file.read_names |= {f"blk.{i}.attn_{part}.weight" for part in ("k", "v", "k_norm")}
    # Frequencies of the half that is not turned are divided by a huge number.
    divisors = file.tensor("rope_freqs.weight", (settings["head_dim"] // 2,))
    n_turned = int((divisors == 1.0).sum())
    if not bool((divisors[n_turned:] > 1e9).all()):
        raise GGUFError(f"{file.name}: rope_freqs.weight does not fit the model")
    kv_heads = file.metadata.get("gemma4.attention.head_count_kv")
    by_layer = kv_heads if isinstance(kv_heads, list) and len(kv_heads) == n_layers else None
    full, sliding = slides.index(False), slides.index(True)
    table = names.get("per_layer_token_embd.weight")
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": name_sliding(slides),
        "sliding_window": file.require_int("gemma4.attention.sliding_window"),
        "head_dim": file.require_int("gemma4.attention.key_length_swa", 2, 1 << 16),
        "global_head_dim": settings["head_dim"],
        "num_kv_shared_layers": n_shared,
        "hidden_size_per_layer_input": file.get("gemma4.embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": settings["vocab_size"] if table is None else table.shape[0],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "final_logit_softcapping": file.get("gemma4.final_logit_softcapping", float, 0.0) or None,
        "use_double_wide_mlp": isinstance(file.metadata.get("gemma4.feed_forward_length"), list),
        "rope_parameters": {
            "full_attention": {
                **full_rope,
                "rope_type": "proportional",
                "partial_rotary_factor": n_turned / len(divisors),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.require_float("gemma4.rope.freq_base_swa", 1e4, 1.0, 1e15),
            },
        },
    }
    if by_layer is not None:
        settings["num_key_value_heads"] = by_layer[sliding]
        settings["num_global_key_value_heads"] = by_layer[full]
    if file.get("gemma4.expert_count", int, 0) > 0:
        add_experts(file, settings, True)
        settings |= {
            "enable_moe_block": True,
            "top_k_experts": settings.pop("num_experts_per_tok"),
            "moe_intermediate_size": file.require_int("gemma4.expert_feed_forward_length"),
        }


def _add_cohere(file: GGUFFile, settings: Settings) -> None:
    settings["logit_scale"] = file.require_float("command-r.logit_scale", None, 1e-9, 1e9)
    settings["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    add_attention_bias(file, settings)


def _add_cohere2(file: GGUFFile, settings: Settings) -> None:
    settings["logit_scale"] = file.require_float("cohere2.logit_scale", None, 1e-9, 1e9)
    settings["sliding_window"] = file.require_int("cohere2.attention.sliding_window")
    add_attention_bias(file, settings)


def _add_chatglm(file: GGUFFile, settings: Settings) -> None:
    names = ("attn_qkv", "attn_q")
    settings["attention_bias"] = any(f"blk.0.{name}.bias" in file.tensors for name in names)


def _add_apertus(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    settings["hidden_act"] = "xielu"


# The name of an architecture in files -> its row.
DENSE: dict[str, Architecture] = {
    # Mistral's files too. transformers rotates halves of queries and keys.
    "llama": Architecture("llama", add_attention_bias, BY_HALVES),
    "qwen2": Architecture("qwen2", add_nothing),
    "qwen3": Architecture("qwen3", add_attention_bias),
    # With an image the angles would have three parts; of a text they are the same.
    "qwen2vl": Architecture("qwen2", add_nothing),
    "qwen3vl": Architecture("qwen3", add_attention_bias),
    "phi3": Architecture("phi3", _add_phi3, partly_rotated=True),
    "gemma": Architecture("gemma", _add_gemma, norms_plus_one=True),
    "gemma2": Architecture("gemma2", _add_gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _add_gemma3, norms_plus_one=True, windows_turn=True),
    "gemma4": Architecture(
        "gemma4_text", _add_gemma4, GEMMA4, layers_differ=True, windows_turn=True
    ),
    "olmo2": Architecture("olmo2", add_nothing),
    "mistral3": Architecture("ministral3", _add_mistral3, BY_HALVES),
    "arcee": Architecture("arcee", add_attention_bias, BY_HALVES),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", add_attention_bias),
    "granite": Architecture("granite", add_granite, BY_HALVES),
    "glm4": Architecture("glm4", _add_glm4, partly_rotated=True),
    "chatglm": Architecture("glm", _add_chatglm, JOINED_QKV, partly_rotated=True),
    "smollm3": Architecture("smollm3", add_attention_bias, BY_HALVES),
    "ernie4_5": Architecture("ernie4_5", add_ernie),
    "exaone4": Architecture("exaone4", _add_exaone4),
    "seed_oss": Architecture("seed_oss", _add_seed_oss),
    "command-r": Architecture("cohere", _add_cohere, has_layer_norms=True),
    "cohere2": Architecture("cohere2", _add_cohere2, has_layer_norms=True),
    "apertus": Architecture("apertus", _add_apertus, APERTUS),
}
OLMO3 = Architecture("olmo3", _add_olmo3)  # in files of olmo2
