"""Models of random weights: of the shape that was asked for, and with an acceptance that can be
dialled.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import forward
from skipsearch.errors import ModelError
from skipsearch.models import load_adapter, synthetic
from skipsearch.models.families.unmodified import experts_of
from skipsearch.models.fused.mlp import Routing
from skipsearch.models.kv_cache import Planner

HALF = SkipMask(8, attn=(0, 2, 4, 6), mlp=(1, 3, 5, 7))


def drafted(name: str) -> DecodeStats:
    model = load_adapter(name, device="cpu", dtype="float32")
    plain = Decoder(model)
    decoder, total = (
        Decoder(model, HALF, draft_length=4, exit_policy=make_exit("fixed")),
        DecodeStats(),
    )
    for first in range(6):
        result = decoder.generate([first, 7, 90, 3], 24)
        assert result.tokens == plain.generate([first, 7, 90, 3], 24).tokens
        total += result.stats
    return total


@pytest.mark.thorough
def test_smaller_branches_are_accepted_more_often() -> None:
    alphas = [drafted(f"synthetic:8x128/{size}").alpha for size in (0.5, 2.5, 8.0)]
    assert None not in alphas
    assert alphas == sorted(alphas, reverse=True)  # type: ignore[type-var]
    assert alphas[0] > 0.9  # type: ignore[operator]
    assert alphas[-1] < 0.7  # type: ignore[operator]


def test_it_has_the_shape_that_its_name_says() -> None:
    spec = load_adapter("synthetic:3x64", device="cpu").spec
    assert (spec.n_layers, spec.hidden_size, spec.id, spec.weights_sha256) == (
        3,
        64,
        "synthetic:3x64",
        None,
    )


def test_a_shape_with_experts_is_a_mixtral_whose_routers_follow_the_text() -> None:
    model = load_adapter("synthetic:2x128@500+6x2/4", device="cpu", dtype="float32")
    experts = experts_of(model)
    assert experts is not None
    assert (experts.n_experts, experts.per_token, experts.n_layers) == (6, 2, 2)
    assert model.spec.family == "mixtral"
    text = torch.arange(40)[None]
    plan = Planner(40, model.spec.device).plan_chain(0, 40)
    choose, chosen = Routing.choose, list[torch.Tensor]()

    def noted(routing: Routing, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = choose(routing, x)
        chosen.append(experts)
        return weights, experts

    with patch.object(Routing, "choose", noted):
        forward(model, text, model.new_cache(1, 40), plan)
    assert len(chosen) == 2
    assert all(len(set(layer.flatten().tolist())) > 2 for layer in chosen)


@pytest.mark.parametrize("experts", ["4", "2x4", "0x0", "ax2", "4x0"])
def test_other_forms_of_experts_are_refused(experts: str) -> None:
    with pytest.raises(ModelError, match=r"write their number and how many a token reads"):
        load_adapter(f"synthetic:2x128+{experts}", device="cpu")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6.74e9),
        ("llama-2-13b", 13.0e9),
        ("llama-2-70b", 69.0e9),
        ("llama-3-8b", 8.03e9),
        ("phi-3-mini", 3.82e9),
    ],
)
def test_a_known_shape_has_as_many_weights_as_the_model_it_is_named_after(
    name: str, parameters: float
) -> None:
    shape, _ = synthetic.parse_synthetic_name(f"synthetic:{name}")
    counted = sum(tensor.n_values for tensor in synthetic.list_synthetic_tensors(shape))
    assert counted == pytest.approx(parameters, rel=0.01)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(synthetic.make_synthetic_config(shape))
    assert sum(w.numel() for w in model.parameters() if w.ndim > 1) == counted


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("synthetic:llama-2-14b", "did you mean llama-2-13b"),
        ("synthetic:24x500", "write synthetic:24x448"),
        ("synthetic:24x512/none", "write a number above 0"),
        ("synthetic:24x512/-1", "write a number above 0"),
        ("synthetic:24x512@many", "a number of tokens"),
        ("synthetic:24x512@0", "a number of tokens"),
        ("synthetic:24x512@99999999999", "a number of tokens"),
    ],
)
def test_a_name_that_says_nothing_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_adapter(name, device="cpu")


@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [("24x512", 32_000), ("24x512@49152", 49_152), ("24x512@49152/4", 49_152), ("llama-2-7b@8", 8)],
)
def test_the_vocabulary_can_be_chosen(name: str, vocab_size: int) -> None:
    shape, _ = synthetic.parse_synthetic_name(f"synthetic:{name}")
    assert shape.vocab_size == vocab_size
