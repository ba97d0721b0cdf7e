"""Which models the table takes, and the sentence for each that it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from skipsearch.errors import ModelError
from skipsearch.models import adapt
from skipsearch.models.families.table import FAMILIES, family_of
from skipsearch.models.kv_cache import Planner

from .tiny import SHAPE, Run, adapted, hf_model, new_hf_model, some_tokens


def refusal(config: Any) -> str:
    with pytest.raises(ModelError) as caught:
        family_of(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["mamba", "mamba2", "jamba", "recurrent_gemma", "rwkv", "qwen3_next", "falcon_h1", "zamba2"],
)
def test_what_keeps_a_recurrent_state_is_read_from_the_model_itself(name: str) -> None:
    """Some of them keep it where it cannot be put back, which only the model shows:
    `test_every_class.py`.
    """
    assert family_of(AutoConfig.for_model(name)).is_generic


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_an_encoder_is_refused(name: str) -> None:
    assert "an encoder feeds its decoder" in refusal(AutoConfig.for_model(name))


def test_features_that_no_rollback_can_undo_are_refused_in_known_families_too() -> None:
    assert "an encoder feeds its decoder" in refusal(
        AutoConfig.for_model("gpt2", add_cross_attention=True)
    )
    assert "its tokens look ahead" in refusal(
        AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True)
    )
    assert "no rule here says what layers of the kind chunked_attention see" in refusal(
        AutoConfig.for_model("qwen2", num_hidden_layers=1, layer_types=["chunked_attention"])
    )


def test_a_family_without_a_row_is_read_from_the_model_itself() -> None:
    family = family_of(AutoConfig.for_model("granitemoeshared"))
    assert family.is_generic
    assert not any(row.is_generic for row in FAMILIES.values())
    assert (
        family_of(AutoConfig.for_model("mimo_v2_flash")).attn_implementation == "eager"
    )  # its own attention knows no other kernel
    assert "transformers has no model of them that continues text" in refusal(
        AutoConfig.for_model("clip_text_model")
    )


def test_the_table_has_the_families_that_people_use() -> None:
    assert set(FAMILIES) >= {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "phi",
        "phi3",
        "gpt_neox",
        "gpt2",
        "opt",
        "olmo2",
        "falcon",
        "stablelm",
        "granite",
        "cohere",
    }


def test_adapt_refuses_what_it_could_not_drive_exactly() -> None:
    def tiny(kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
        return kind.from_config(AutoConfig.for_model("llama", **SHAPE), **options).eval()

    shorter = tiny()
    shorter.model.layers = shorter.model.layers[:2]
    for model, sentence in (
        (nn.Linear(2, 2), "a Linear is not a Hugging Face model: give an AutoModelForCausalLM"),
        (
            tiny().train(),
            "this model is in training mode, where dropout changes its output: call model.eval() "
            "first",
        ),
        (
            tiny(attn_implementation="flex_attention"),
            "this model attends with 'flex_attention', which takes no explicit mask: load it with "
            "attn_implementation='sdpa'",
        ),
        (
            tiny(AutoModel),
            "this llama model cannot be taken apart ('LlamaModel' object has no attribute "
            "'model'): give the "
            "AutoModelForCausalLM itself, not a wrapper around it and not its base model",
        ),
        (
            shorter,
            "this llama model has 2 layers and its config says 3: set config.num_hidden_layers to "
            "what it has",
        ),
    ):
        with pytest.raises(ModelError) as caught:
            adapt(model)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["llama", "mistral-window", "falcon-rw"])
def test_a_model_that_attends_eagerly_is_driven_as_it_is(name: str) -> None:
    model, tokens = new_hf_model(name), some_tokens(20)
    model.set_attn_implementation("eager")
    run = Run(adapt(model))
    mine = torch.cat(
        [run.commit(tokens[:, :13]), run.commit(tokens[:, 13:14]), run.commit(tokens[:, 14:])]
    )
    torch.testing.assert_close(mine, model(input_ids=tokens).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_cannot_be_forgotten(name: str) -> None:
    with pytest.raises(ModelError, match="give embed the plan's positions too"):
        adapted(name).embed(some_tokens(3))


def test_longrope_is_driven_up_to_its_original_context() -> None:
    """Beyond it the model turns all keys by other angles, cached ones not: a round that crosses
    would differ from plain decoding.
    """
    assert adapt(hf_model("phi3-longrope")).spec.context_length == 48
    assert adapt(hf_model("phi3")).spec.context_length == SHAPE["max_position_embeddings"]


def test_a_layer_on_another_device_fetches_what_it_needs() -> None:
    """`meta` stands in for a second GPU: it has shapes and no values."""
    model = new_hf_model("gemma2")
    model.model.layers[2].to("meta")
    model.model.norm.to("meta")
    adapter = adapt(model)
    assert adapter.spec.n_devices == 2
    cache, plan = adapter.new_cache(1, 16), Planner(16, torch.device("cpu")).plan_chain(0, 12)
    h = adapter.embed(some_tokens(12))
    for i in range(2):
        h = adapter.block(i, h, cache, plan)
    assert h.device.type == "cpu"
    h = adapter.block(2, h, cache, plan)
    assert (h.device.type, tuple(h.shape)) == ("meta", (1, 12, 32))
    assert [keys.device.type for keys in cache.keys if keys is not None] == ["cpu", "cpu", "meta"]
