"""GGUF files of architectures that the engine `hf` drives: each is what transformers computes from
the same numbers, and what llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gguf_files
from helpers.gguf_files import ARCHITECTURES as WRITTEN
from helpers.gguf_files import name_architecture, write_model
from helpers.marks import thorough
from torch import Tensor, nn

import skipsearch as ss
from models import test_gguf
from models.test_gguf import check_greedy
from models.tiny import new_random_model
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.mtp.shipped import load_head_of, ships_loadable_head
from skipsearch.engine import forward, native
from skipsearch.errors import ModelError, ModuleError, UnpackedWeightsWarning
from skipsearch.models.kv_cache import Planner
from skipsearch.models.loading import gguf_model
from skipsearch.models.loading.gguf_architectures import ARCHITECTURES
from skipsearch.models.loading.gguf_config import find_rotary_factor
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile, read_gguf
from skipsearch.models.loading.gguf_model import open_gguf, unpack_stored_modules
from skipsearch.models.loading.shipped_heads import ships_draft_head
from skipsearch.models.stored_linear import StoredLinear

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
FALCON = {"hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
SIGMOID_EXPERTS = {
    **EXPERTS,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
}
LATENT = {
    **WIDE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_parameters": {
        **ROPE,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
DELTA_NET = {
    **WIDE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
MAMBA = {
    **WIDE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "shared_intermediate_size": 96,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
    "attention_multiplier": 0.4,
    "tie_word_embeddings": True,
}
NEMOTRON_H = {
    **WIDE,
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-30,
}
GEMMA4 = {
    **WIDE,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 61,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e4,
        },
    },
}
# Name -> family of transformers, and what its config says beside the shape of a tiny model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {
            **WIDE,
            "sliding_window": 8,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
         "use_double_wide_mlp": True},
    ),
    "gemma4_text-experts": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
         "top_k_experts": 2, "moe_intermediate_size": 32, "final_logit_softcapping": None},
    ),
    "cohere": ("cohere", {**WIDE, "logit_scale": 0.7, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {**WIDE, "num_hidden_layers": 4, "logit_scale": 0.7, "sliding_window": 8},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **WIDE,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "arcee": ("arcee", WIDE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", WIDE),
    "lfm2": (
        "lfm2",
        {**WIDE, "layer_types": ["conv", "full_attention", "conv"],
         "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**WIDE, **EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4,
         "num_dense_layers": 1, "tie_word_embeddings": True},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**WIDE, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1,
         "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5,
         "rope_parameters": {"rope_theta": 1e4, "rope_type": "default",
                             "partial_rotary_factor": 0.5}},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {**MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
         "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON_H,
         "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {**NEMOTRON_H, **EXPERTS,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
         "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 64,
         "routed_scaling_factor": 2.5},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**WIDE, **EXPERTS, "intermediate_size": 128, "moe_num_experts": 4, "moe_k": 2,
         "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "num_hidden_layers": 4, "moe_layer_interval": 2,
         "tie_word_embeddings": True},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe", {**WIDE, "num_experts": 4, "moe_topk": 2},
    ),
    "minimax_m2": (
        "minimax_m2",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": HALF_ROPE},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**WIDE, **EXPERTS, "n_routed_experts": 8, "v_head_dim": 8, "sliding_window": 8,
         "head_dim": 16, "attention_value_scale": 0.707, "num_key_value_heads": 2,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "rope_parameters": {"full_attention": HALF_ROPE,
                             "sliding_attention": {**HALF_ROPE, "rope_theta": 1e3}}},
    ),
    "dots1": (
        "dots1",
        {**WIDE, **SIGMOID_EXPERTS, "n_shared_experts": 1, "sliding_window": None},
    ),
    "exaone_moe": (
        "exaone_moe",
        {**WIDE, **SIGMOID_EXPERTS, "num_experts": 8, "num_shared_experts": 2,
         "sliding_window": 8, "num_hidden_layers": 4},
    ),
    "afmoe": (
        "afmoe",
        {**WIDE, **EXPERTS, "num_experts": 4, "num_shared_experts": 2, "num_dense_layers": 1,
         "route_scale": 1.7, "sliding_window": 8, "num_hidden_layers": 4, "mup_enabled": True},
    ),
    "apertus": ("apertus", {**WIDE, "rope_parameters": ROPE}),
    "falcon_h1": (
        "falcon_h1",
        {**WIDE, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
         "mamba_d_state": 16, "lm_head_multiplier": 0.7, "embedding_multiplier": 1.3,
         "mlp_multipliers": [0.9, 1.2], "key_multiplier": 0.8, "attention_out_multiplier": 1.1,
         "attention_in_multiplier": 0.95, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
         "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.85},
    ),
    "falcon_h1-norm": (
        "falcon_h1",
        {**WIDE, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
         "mamba_d_state": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "mamba": (
        "mamba", {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True},
    ),
    "falcon_mamba": (
        "falcon_mamba", {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True},
    ),
    "mamba2": (
        "mamba2",
        {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16,
         "tie_word_embeddings": True},
    ),
    "jamba": (
        "jamba",
        {**WIDE, "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "mamba_d_state": 8,
         "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "kimi_linear": (
        "kimi_linear",
        {**LATENT, **EXPERTS, "q_lora_rank": None, "num_experts": 8, "num_experts_per_token": 2,
         "num_shared_experts": 1, "routed_scaling_factor": 1.5, "linear_head_dim": 32,
         "linear_num_heads": 4, "rope_parameters": None,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, **SIGMOID_EXPERTS, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1,
         "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {**LATENT, **SIGMOID_EXPERTS, "n_shared_experts": 2, "norm_topk_prob": False,
         "topk_method": "group_limited_greedy"},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**LATENT, **SIGMOID_EXPERTS, "n_shared_experts": 1, "rope_parameters": ROPE,
         "n_group": 1, "topk_group": 1},
    ),
    "minicpm3": (
        "minicpm3",
        {**LATENT, "rope_parameters": test_gguf.LONGROPE, "max_position_embeddings": 1024,
         "tie_word_embeddings": False},
    ),
    "youtu": ("youtu", {**LATENT, "rope_parameters": ROPE, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **SIGMOID_EXPERTS, "n_shared_experts": 1}),
    "nemotron": ("nemotron", {**WIDE, "rope_parameters": HALF_ROPE, "attention_bias": True,
                              "mlp_bias": True}),
    "jais2": ("jais2", WIDE),
    "stablelm": ("stablelm", {**WIDE, "rope_parameters": HALF_ROPE, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {**WIDE, "rope_parameters": HALF_ROPE, "use_parallel_residual": True,
         "qk_layernorm": True},
    ),
    "starcoder2": ("starcoder2", {**WIDE, "use_bias": True, "tie_word_embeddings": True}),
    "phi": (
        "phi",
        {**WIDE, "intermediate_size": 256, "num_key_value_heads": 4, "rope_parameters": HALF_ROPE},
    ),
    "gpt_neox": ("gpt_neox", {**WIDE, "rope_parameters": HALF_ROPE}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {**WIDE, "rope_parameters": HALF_ROPE, "use_parallel_residual": False},
    ),
    "olmo": ("olmo", {**WIDE, "clip_qkv": 0.7}),
    "gpt2": ("gpt2", {"hidden_size": 64, "tie_word_embeddings": True}),
    "gpt_bigcode": ("gpt_bigcode", {"hidden_size": 64, "tie_word_embeddings": True}),
    "bloom": ("bloom", {"hidden_size": 64, "tie_word_embeddings": True}),
    "mpt": (
        "mpt",
        {"hidden_size": 64, "attn_config": {"clip_qkv": 0.7}, "tie_word_embeddings": False},
    ),
    "falcon": ("falcon", {**FALCON, "num_kv_heads": 1}),
    "falcon-40b": (
        "falcon",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "falcon-11b": (
        "falcon",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True,
         "num_ln_in_parallel_attn": 1},
    ),
}  # fmt: skip
# A matrix of which files have parts, and one that its module multiplies itself.
READ = (".kv_b_proj", ".dt_proj")
# One of each kind of layer decodes in `make test`.
QUICK = ("gemma4_text", "lfm2", "granitemoehybrid", "qwen3_5_text")
DECODED = [*QUICK, *thorough(*(name for name in MODELS if name not in QUICK))]
PROMPT = [3, 9, 4, 1, 22, 17, 5, 30, 12, 7]


def make_model(name: str) -> Any:
    family, changes = MODELS[name]
    return new_random_model(family, **changes).float()


# Format of the file -> how far logits may be from those of the unrounded model, in deviations.
@pytest.mark.parametrize(
    ("number_format", "tolerance"),
    [("F32", 1e-4), pytest.param("F16", 0.1, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_computes_what_transformers_does(
    name: str, number_format: str, tolerance: float, tmp_path: Path
) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", number_format)
    tokens = torch.tensor([PROMPT])
    expected = make_model(name)(tokens).logits[0]
    stored = open_gguf(str(tmp_path / "m.gguf"), torch.float32).model
    logits, scale = stored(tokens).logits[0], float(expected.std())
    assert float((logits - expected).abs().max()) < tolerance * scale
    unpack_stored_modules(stored)
    assert float((stored(tokens).logits[0] - logits).abs().max()) < 1e-4 * scale


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_stays_in_the_file(name: str, tmp_path: Path) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    model = open_gguf(str(tmp_path / "m.gguf"), torch.float32).model
    modules = dict(model.named_modules())
    read = [
        path
        for path, m in modules.items()
        if isinstance(m, nn.Linear) and m.out_features > 1 and not path.endswith(READ)
    ]
    assert not read
    assert any(isinstance(m, StoredLinear) for m in modules.values())


@pytest.mark.parametrize("name", DECODED)
def test_drafts_change_no_token(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    write_model(make_model(name), tmp_path / "m.gguf")
    greedy = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=-1
    )[0, len(PROMPT) :].tolist()
    model = ss.load_model(str(tmp_path / "m.gguf"), device="cpu", engine="hf", dtype="float32")
    check_greedy(model, PROMPT, greedy)


@pytest.mark.parametrize("name", DECODED)
def test_matrices_stay_in_their_blocks_and_drafts_change_no_token(
    name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "m.gguf")
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    unpacked = ss.load_model(path, device="cpu", engine="hf", dtype="float32")
    options: dict[str, Any] = {"device": "cpu", "engine": "native", "dtype": "float32"}
    packed = ss.load_model(path, activations="float", **options)
    stats = check_greedy(
        packed, PROMPT, Decoder(unpacked).generate(PROMPT, 24, ignore_eos=True).tokens
    )
    assert packed.weight_bytes < 0.6 * unpacked.weight_bytes
    rounded = ss.load_model(path, **options)
    assert rounded.spec.engine == "native"
    is_fused = name == "gpt_oss"
    assert rounded.spec.quantization == f"gguf-q8_0{'' if is_fused else '-int16-activations'}"
    stats += check_greedy(
        rounded, PROMPT, Decoder(rounded).generate(PROMPT, 24, ignore_eos=True).tokens
    )
    assert stats.accepted < stats.drafted


@pytest.mark.parametrize("name", DECODED)
def test_a_mask_leaves_out_what_it_does_with_unpacked_matrices(name: str, tmp_path: Path) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    path, tokens = str(tmp_path / "m.gguf"), torch.tensor([PROMPT])
    models = [
        ss.load_model(path, engine="hf", **options),
        ss.load_model(path, engine="native", activations="float", **options),
    ]
    n, plan = models[0].spec.n_layers, Planner(64, torch.device("cpu")).plan_chain(0, len(PROMPT))
    full = forward(models[0], tokens, models[0].new_cache(1, 64), plan)
    parts = [(i, kind) for i in range(n) for kind in ("attn", "mlp")]
    n_changed = 0
    for i, kind in parts:
        mask = SkipMask(n, (i,) if kind == "attn" else (), (i,) if kind == "mlp" else ())
        expected, packed = (
            forward(model, tokens, model.new_cache(1, 64), plan, mask) for model in models
        )
        torch.testing.assert_close(packed, expected, rtol=1e-3, atol=1e-3)
        n_changed += not torch.allclose(expected, full, rtol=1e-2, atol=1e-2)
    assert n_changed > len(parts) / 3, "most parts may be left out"


def test_without_a_compiler_weights_are_unpacked_and_the_price_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(progress: object) -> None:
        raise native.NoCompilerError("the engine native needs a C++ compiler: install g++")

    write_model(make_model("lfm2"), tmp_path / "m.gguf", "Q8_0")
    path = str(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"the engine lean cannot drive m: .* --engine hf"):
        ss.load_model(path, device="cpu", engine="lean")
    monkeypatch.setattr(native, "load_or_build", build)
    with pytest.warns(UnpackedWeightsWarning, match="m is run by the engine hf, .* float32, "):
        model = ss.load_model(path, device="cpu", dtype="float32")
    assert model.spec.engine == "hf"
    with pytest.raises(ModelError, match="needs a C\\+\\+ compiler: install"):
        ss.load_model(path, device="cpu", engine="native")


def test_a_dtype_without_kernels_is_refused(tmp_path: Path) -> None:
    write_model(make_model("lfm2"), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ModelError, match="and not in float16: use another --dtype"):
        ss.load_model(str(tmp_path / "m.gguf"), device="cpu", dtype="float16")


def test_experts_of_other_sizes_than_panels_are_unpacked(tmp_path: Path) -> None:
    family, changes = MODELS["lfm2_moe"]
    reference = new_random_model(family, **{**changes, "moe_intermediate_size": 24}).float()
    write_model(reference, tmp_path / "m.gguf")
    model: Any = ss.load_model(str(tmp_path / "m.gguf"), device="cpu", dtype="float32")
    kinds = {type(m).__name__ for m in model.model.modules() if type(m).__name__.endswith("xperts")}
    assert kinds == {"Lfm2MoeExperts"}
    greedy = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=-1
    )[0, len(PROMPT) :].tolist()
    check_greedy(model, PROMPT, greedy)


def test_a_draft_head_after_the_last_layer_is_no_part_of_the_model(tmp_path: Path) -> None:
    reference = make_model("glm4_moe")
    path, n_layers = tmp_path / "m.gguf", reference.config.num_hidden_layers
    head = {f"blk.{n_layers}.nextn.eh_proj.weight": torch.ones(64, 128)}
    counts = {"glm4moe.block_count": n_layers + 1, "glm4moe.nextn_predict_layers": 1}
    write_model(reference, path, metadata=counts, extra=head)
    model = open_gguf(str(path), torch.float32).model
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(model(tokens).logits, reference(tokens).logits)
    adapter = ss.load_model(str(path), device="cpu", engine="hf", dtype="float32")
    assert ships_draft_head(str(path), n_layers)
    assert ships_loadable_head(adapter)
    with pytest.raises(ModuleError, match=r"the draft head of m\.gguf cannot be loaded"):
        load_head_of(adapter)
    counts["glm4moe.nextn_predict_layers"] = n_layers + 1
    write_model(reference, path, metadata=counts, extra=head)
    with pytest.raises(GGUFError, match="nextn_predict_layers is 4; it has to be 0 to 3"):
        open_gguf(str(path), torch.float32)


def test_numbers_of_each_layer_may_count_a_draft_head(tmp_path: Path) -> None:
    reference = make_model("nemotron_h-experts")
    path, n_layers = tmp_path / "m.gguf", reference.config.num_hidden_layers
    name, kinds = "nemotron_h_moe", reference.config.layer_types
    width, heads = reference.config.moe_intermediate_size, reference.config.num_key_value_heads
    counts = {
        f"{name}.block_count": n_layers + 1,
        f"{name}.nextn_predict_layers": 1,
        f"{name}.feed_forward_length": [*(width * (kind == "moe") for kind in kinds), width],
        f"{name}.attention.head_count_kv": [
            *(heads * (kind == "full_attention") for kind in kinds),
            heads,
        ],
    }
    head = {f"blk.{n_layers}.nextn.eh_proj.weight": torch.ones(64, 128)}
    write_model(reference, path, metadata=counts, extra=head)
    model, tokens = open_gguf(str(path), torch.float32).model, torch.tensor([PROMPT])
    torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, rtol=1e-3, atol=1e-3)


# What a file may claim of itself -> the sentence that refuses it.
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "a list of 3 numbers"),
    "kernel": ("lfm2", {"lfm2.shortconv.l_cache": 0}, "l_cache is 0; it has to be 2 to"),
    "wider kernel": ("lfm2", {"lfm2.shortconv.l_cache": 4}, "shortconv.conv.weight is"),
    "value heads": ("qwen3_5_text", {"qwen35.ssm.time_step_rank": 0}, "time_step_rank is 0"),
    "key heads": ("qwen3_5_text", {"qwen35.ssm.group_count": 7}, "group_count is 7"),
    "odd heads": ("qwen3_5_text", {"qwen35.ssm.group_count": 4}, "no multiple of its 4 key heads"),
    "inner size": ("qwen3_5_text", {"qwen35.ssm.inner_size": 95}, "needs|cannot be built"),
    "state": ("qwen3_next", {"qwen3next.ssm.state_size": 17}, "needs|fit"),
    "period": ("qwen3_5_text", {"qwen35.full_attention_interval": 0}, "has no tensor"),
    "experts": ("gpt_oss", {"gpt-oss.expert_count": 3}, "needs"),
    "used experts": ("gpt_oss", {"gpt-oss.expert_used_count": 5}, "expert_used_count is 5"),
    "scores": ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is 1, and"),
    "dense": ("glm4_moe", {"glm4moe.leading_dense_block_count": 9}, "has no tensor"),
    "mamba": ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 64}, "needs"),
    "mamba heads": ("granitemoehybrid", {"granitehybrid.ssm.time_step_rank": 7}, "make no|needs"),
    "sub-layers": ("nemotron_h", {"nemotron_h.feed_forward_length": 96}, "a list of 4 numbers"),
    "latent": ("nemotron_h-experts", {"nemotron_h_moe.moe_latent_size": 32}, "has no tensor|needs"),
    "groups": ("nemotron_h", {"nemotron_h.ssm.group_count": 9}, "group_count is 9"),
    "cap": ("gemma2", {"gemma2.final_logit_softcapping": 0.0}, "final_logit_softcapping is 0;"),
    "windows": (
        "gemma4_text",
        {"gemma4.attention.sliding_window_pattern": [1, 1, 1, 1]},
        "whether it sees a window",
    ),
    "other windows": (
        "gpt_oss",
        {"gpt-oss.attention.sliding_window_pattern": 3},
        "pattern is 3, and the layers of gpt_oss models see other parts",
    ),
    "as many windows": (
        "gemma2",
        {"gemma2.attention.sliding_window_pattern": [1, 1, 0]},
        r"pattern is \[1, 1, 0\], and",
    ),
    "factors of a rotation": (
        "minicpm3",
        {"minicpm3.rope.dimension_count": 8},
        r"rope_factors_short.weight, \[4\]|needs",
    ),
    "shared": ("gemma4_text", {"gemma4.attention.shared_kv_layers": 99}, "make no|cannot be built"),
    "groups of experts": ("dots1", {"dots1.expert_group_count": 3}, "not divide its 8 experts"),
    "used groups": ("dots1", {"dots1.expert_group_used_count": 5}, "it has to be 1 to 4"),
    "other scores": ("minimax_m2", {"minimax-m2.expert_gating_func": 1}, "only if it is 2: take"),
    "plain weights": ("afmoe", {"afmoe.expert_weights_norm": False}, "norm is False, and files"),
    "activations": ("apertus", {"xielu.beta": [1.0, 2.0]}, "xielu.beta has to be a list of 3"),
    "angles of windows": (
        "exaone_moe",
        {"exaone-moe.rope.freq_base_swa": 7.0},
        "swa is 7.0, and files are read only if it is 10000.0",
    ),
    "epsilon": ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, "only if it is 1e-05"),
    "parallel": ("stablelm", {"stablelm.use_parallel_residual": True}, "holds the tensor"),
    "key heads of Falcon": ("falcon", {"falcon.attention.head_count_kv": 3}, "not divide its"),
    "keys of latents": (
        "deepseek_v3",
        {"deepseek2.attention.key_length_mla": 16},
        "keys of 16 numbers have no part that is not turned",
    ),
    "values of latents": ("deepseek_v3", {"deepseek2.attention.value_length_mla": 32}, "needs"),
    "weights": (
        "deepseek_v2",
        {"deepseek2.expert_weights_norm": True},
        "norm is True, and files are read only if it is False",
    ),
    "temperature": (
        "deepseek_v3",
        {"deepseek2.attention.temperature_scale": 0.5},
        "temperature_scale is 0.5, and",
    ),
    "magnitude": (
        "deepseek_v3",
        {"deepseek2.rope.scaling.yarn_log_multiplier": 0.0},
        "multiplier is 0; it has to be",
    ),
    "periods": (
        "jamba",
        {"jamba.attention.head_count_kv": [0, 2, 2, 0]},
        r"the layers \[1, 2\], which attend or have experts, follow no period",
    ),
    "heads of Mamba": ("mamba2", {"mamba2.ssm.time_step_rank": 7}, "make no|needs"),
    "slopes": ("mpt", {"mpt.attention.max_alibi_bias": 4.0}, "bias is 4.0, and files are read"),
    "key heads of windows": (
        "mimo_v2_flash",
        {"mimo2.attention.head_count_kv": [2, 2, 4]},
        r"is \[2, 2, 4\], and layers with a window have to have twice as many",
    ),
    "turned": ("gemma4_text", {"gemma4.attention.key_length": 16}, "even, from 16 to 16"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_metadata_that_fit_no_model_are_refused(case: str, tmp_path: Path) -> None:
    name, metadata, sentence = BROKEN[case]
    write_model(make_model(name), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(GGUFError, match=sentence) as error:
        open_gguf(str(tmp_path / "m.gguf"), torch.float32)
    assert "\n" not in str(error.value)


def test_the_first_files_of_deepseek_have_keys_and_values_in_one_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, convert = make_model("deepseek_v3"), gguf_files._convert
    tokens = torch.tensor([PROMPT])

    def keep(name: str, value: Tensor, *rest: Any) -> Iterator[tuple[str, Tensor]]:
        if "kv_b_proj" not in name:
            yield from convert(name, value, *rest)
            return
        yield f"blk.{name.split('.')[2]}.attn_kv_b.weight", value

    monkeypatch.setattr(gguf_files, "_convert", keep)
    write_model(reference, tmp_path / "m.gguf")
    file, name = read_gguf(tmp_path / "m.gguf"), "deepseek2.attention"
    for key in ("key_length", "value_length"):
        file.metadata[f"{name}.{key}"] = file.metadata.pop(f"{name}.{key}_mla")
    monkeypatch.setattr(gguf_model, "read_gguf", lambda path: file)
    stored = open_gguf(str(tmp_path / "m.gguf"), torch.float32).model
    torch.testing.assert_close(stored(tokens).logits, reference(tokens).logits)
    file.metadata["deepseek2.expert_count"] = 256
    del file.metadata["deepseek2.expert_group_count"]
    with pytest.raises(GGUFError, match="takes experts of groups: take a newer file"):
        open_gguf(str(tmp_path / "m.gguf"), torch.float32)


def test_transformers_counts_as_many_rotated_numbers_as_a_file() -> None:
    for head_dim in range(2, 514, 2):
        for n_rotary in range(2, head_dim + 1, 2):
            assert int(head_dim * find_rotary_factor(n_rotary, head_dim)) == n_rotary


def test_the_first_files_of_phi_have_queries_keys_and_values_in_one_matrix(tmp_path: Path) -> None:
    reference, tokens = make_model("phi"), torch.tensor([PROMPT])
    write_model(reference, tmp_path / "m.gguf", joined=("phi2",))
    stored = open_gguf(str(tmp_path / "m.gguf"), torch.float32).model
    torch.testing.assert_close(stored(tokens).logits, reference(tokens).logits)


def test_a_file_of_falcon_h1_needs_a_head(tmp_path: Path) -> None:
    family, changes = MODELS["falcon_h1"]
    model = new_random_model(family, **{**changes, "tie_word_embeddings": True}).float()
    write_model(model, tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"no tensor output\.weight, and the factor"):
        open_gguf(str(tmp_path / "m.gguf"), torch.float32)


def test_every_architecture_of_the_table_has_a_tiny_model() -> None:
    """Those with an image too are tested under the names of their texts (`test_gguf_names.py`)."""
    tested = {name_architecture(make_model(name).config) for name in MODELS}
    tested |= {WRITTEN[name.partition("-")[0]] for name in test_gguf.MODELS}
    assert {*ARCHITECTURES} - {"qwen2vl", "qwen3vl", "qwen3vlmoe"} == tested


# Those that llama-cpp-python 0.3.36 reads, and what it does not: norms of few layers' queries. Of
# Gemma 4 with experts its logits differ by 4 % of their deviation, for an unknown reason.
IN_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "cohere": {"use_qk_norm": False},
    "cohere2": {},
    "gpt_oss": {},
    "arcee": {},
    "hunyuan_v1_dense": {},
    "lfm2": {},
    "glm4_moe": {},
    "granitemoehybrid": {},
    "granitemoehybrid-dense": {},
    "gemma4_text": {},
    "lfm2_moe": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "nemotron_h": {},
    "nemotron_h-experts": {},
    "ernie4_5_moe": {"moe_layer_interval": 1},
    "hunyuan_v1_moe": {},
    "minimax_m2": {},
    "mimo_v2_flash": {},
    "dots1": {"num_key_value_heads": 4},
    "exaone_moe": {"num_shared_experts": 1},
    "afmoe": {},
    "apertus": {},
    "falcon_h1": {},
    "falcon_h1-norm": {},
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {},
    "jamba": {},
    "kimi_linear": {},
    "minicpm3": {},
    "deepseek_v2": {"q_lora_rank": 32},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "youtu": {},
    "nemotron": {},
    "jais2": {},
    "stablelm": {},
    "stablelm-parallel": {},
    "starcoder2": {},
    "phi": {},
    "gpt_neox": {},
    "gpt_neox-sequential": {},
    "olmo": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "falcon-40b": {},
    "falcon-11b": {},
}
# What files have for images, and llama.cpp asks for.
SECTIONS = {f"{name}.rope.dimension_sections": [2, 1, 1, 0] for name in ("qwen35", "qwen35moe")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_llama_cpp_computes_the_same_from_the_same_file(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", minversion="0.3.36")
    family, changes = MODELS[name]
    model = new_random_model(family, **{**changes, **IN_LLAMA_CPP[name]}).float()
    architecture, path = name_architecture(model.config), tmp_path / "model.gguf"
    metadata = {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": 61}
    sections = f"{architecture}.rope.dimension_sections"
    metadata |= {sections: SECTIONS[sections]} if sections in SECTIONS else {}
    write_model(model, path, metadata=metadata)
    kv = {"type_k": 0, "type_v": 0, "flash_attn": False}  # in 32 bits
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, **kv)
    text = PROMPT + PROMPT[::-1]
    theirs.eval(text)
    expected = torch.tensor(theirs.scores[: len(text)])
    stored = open_gguf(str(path), torch.float32).model
    difference = (stored(torch.tensor([text])).logits[0] - expected).abs().max()
    assert float(difference) < 1e-2 * float(expected.std())


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_the_metadata_may_be_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is refused in one sentence, or opened."""
    write_model(make_model(name), tmp_path / "m.gguf")
    sound, messages = read_gguf(tmp_path / "m.gguf"), []
    for key, value in sound.metadata.items():
        others: list[Any] = [0, 1, 3, 7, 4096, -1, 0.0, float("nan"), "text", True, [], [0, 1]]
        if isinstance(value, list):
            others += [value[:-1], [*value, value[0]], [0] * len(value), ["text"] * len(value)]
        for other in others if key.count(".") and not key.startswith("general.") else ():
            changed = GGUFFile(sound.paths, {**sound.metadata, key: other}, sound.tensors)
            monkeypatch.setattr(gguf_model, "read_gguf", lambda path, changed=changed: changed)
            try:
                open_gguf(str(tmp_path / "m.gguf"), torch.float32)
            except ModelError as error:
                messages.append(str(error))
    assert len(messages) > 20
    assert all(len(message) < 500 and "\n" not in message for message in messages)
