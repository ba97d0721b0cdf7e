"""The kernels of recurrent layers: what transformers computes, row by row and to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from skipsearch.engine.native.build import INSTRUCTION_SETS, best_instruction_set, load_or_build
from skipsearch.engine.native.recurrent_net import (
    DeltaNet,
    Mamba,
    RecurrentNet,
    replace_recurrent_nets,
)

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 0,
    "layer_types": ["linear_attention"],
    "mamba_expand": 2,
}
# (key heads, value heads, key size, value size): values of whole vectors, and with a rest.
SIZES = ((2, 2, 16, 32), (2, 6, 8, 16), (1, 3, 12, 27), (1, 1, 32, 64))
# (heads, groups, head size, state size)
MAMBA_SIZES = ((4, 1, 16, 32), (4, 2, 16, 19), (8, 1, 8, 8))
CASES = [
    *((family, sizes) for family in ("qwen3_5_text", "qwen3_next") for sizes in SIZES),
    *(("granitemoehybrid", sizes) for sizes in MAMBA_SIZES),
    *(("nemotron_h", sizes) for sizes in MAMBA_SIZES),
]


def make_model(family: str, sizes: tuple[int, int, int, int], **changes: Any) -> Any:
    if family == "granitemoehybrid":
        names = ["mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state"]
        changes |= {"num_local_experts": 0, "shared_intermediate_size": 48}
    elif family == "nemotron_h":
        names = ["mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size"]
        # Transformers bounds steps from below in a pass over several rows, and not over one.
        changes |= {"layers_block_type": ["linear_attention"], "time_step_min": 1e-30}
    else:
        sides = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        names = [f"linear_{name}" for name in sides]
    shape = dict(zip(names, sizes, strict=True))
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **shape, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    net = find_net(model)
    with torch.no_grad():
        net.norm.weight.uniform_(0.5, 1.5)
        net.dt_bias.uniform_(-2, 2)
        for name, weight in net.named_parameters():
            if name.endswith(".weight") and weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.requires_grad_(False)


def find_net(model: Any) -> Any:
    layer = model.model.layers[0]
    return next(
        getattr(layer, name) for name in ("mamba", "mixer", "linear_attn") if hasattr(layer, name)
    )


def make_own(model: Any, instructions: str | None = None) -> RecurrentNet:
    net, library = find_net(model), load_or_build(instructions=instructions)
    return next(kind for kind in (DeltaNet, Mamba) if kind.replaces(net))(net, library)


def run_in_parts(net: Any, x: Tensor, model: Any, parts: list[int]) -> tuple[Tensor, Tensor]:
    """Return (outputs, state after the last row) of a layer that reads some rows at a time."""
    cache, outputs = DynamicCache(config=model.config), list[Tensor]()
    for part in x.split(parts, dim=1):
        outputs.append(net(part, cache_params=cache))
    return torch.cat(outputs, dim=1), cache.get_recurrent_state(0, state_idx=0)


def check_against_transformers(
    family: str, sizes: tuple[int, int, int, int], instructions: str | None = None
) -> None:
    model = make_model(family, sizes)
    own = make_own(model, instructions)
    for n_texts, parts in ((1, [1]), (2, [70]), (1, [2, 1, 5, 1, 40]), (3, [9, 3])):
        x = torch.randn(n_texts, sum(parts), 32)
        expected, states = run_in_parts(find_net(model), x, model, parts)
        outputs, own_states = run_in_parts(own, x, model, parts)
        torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(own_states, states, rtol=1e-3, atol=2e-4)
        assert float(expected.abs().max()) > 0.1


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_it_computes_what_transformers_does(family: str, sizes: tuple[int, int, int, int]) -> None:
    check_against_transformers(family, sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_every_set_of_instructions_computes_the_same(instructions: str) -> None:
    best = INSTRUCTION_SETS[best_instruction_set()]
    if not set(INSTRUCTION_SETS[instructions].x86) <= set(best.x86):
        pytest.skip(f"this processor has no {instructions}")
    for family, sizes in CASES:
        check_against_transformers(family, sizes, instructions)


@pytest.mark.parametrize(("family", "sizes"), [CASES[0], CASES[-1]])
def test_padding_and_a_pass_without_cache(family: str, sizes: tuple[int, int, int, int]) -> None:
    model = make_model(family, sizes)
    net, own, x = find_net(model), make_own(model), torch.randn(2, 6, 32)
    close = {"rtol": 1e-3, "atol": 2e-4}
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(own(x, attention_mask=mask), net(x, attention_mask=mask), **close)
    torch.testing.assert_close(own(x, attention_mask=mask > -1), net(x), **close)
    assert not torch.equal(own(x), own(x, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("family", "sizes"), [CASES[0], CASES[-1]])
def test_other_dtypes_are_computed_in_float32(
    family: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    model = make_model(family, sizes).to(dtype)
    own, x = make_own(model), torch.randn(1, 9, 32, dtype=dtype)
    expected = find_net(model)(x)
    assert own(x).dtype == dtype
    torch.testing.assert_close(own(x), expected, rtol=0.02, atol=0.05)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_row_does_not_depend_on_the_rows_of_its_pass_or_on_threads(
    parts: list[int], n_texts: int, threads: int, is_mamba: bool
) -> None:
    if is_mamba:
        model = make_model("granitemoehybrid", (4, 2, 16, 19))
        channels, widths = 4 * 16 + 2 * 2 * 19, (64, 4)
    else:
        model = make_model("qwen3_5_text", (1, 3, 12, 27))
        channels, widths = 2 * 12 + 3 * 27, (81, 3, 3)
    own, before, n_rows = make_own(model), torch.get_num_threads(), sum(parts)
    generator = torch.Generator().manual_seed(n_rows)
    mixed = torch.randn(n_texts, channels, n_rows, generator=generator)
    inputs = [torch.randn(n_texts, n_rows, width, generator=generator) for width in widths]

    def run(parts: list[int]) -> tuple[Tensor, Tensor]:
        state, first, outputs = None, 0, list[Tensor]()
        for count in parts:
            rows = slice(first, first + count)
            columns = mixed[..., max(0, first - 3) : first + count].contiguous()
            values = [value[:, rows].contiguous() for value in inputs]
            output, state = own.run(columns, *values, state=state)
            outputs.append(output)
            first += count
        assert state is not None
        return torch.cat(outputs, dim=1), state

    torch.set_num_threads(1)
    expected = run([1] * n_rows)
    torch.set_num_threads(threads)
    computed = run(parts)
    torch.set_num_threads(before)
    assert all(map(torch.equal, computed, expected))


def test_only_layers_that_the_kernels_know_are_replaced() -> None:
    library = load_or_build()
    model = make_model("qwen3_5_text", SIZES[0], hidden_act="gelu")
    replace_recurrent_nets(model, library)
    assert not isinstance(find_net(model), RecurrentNet), "another activation"
    model = make_model("qwen3_next", SIZES[0])
    for _ in range(2):
        replace_recurrent_nets(model, library)
    assert isinstance(find_net(model), DeltaNet)
    assert not isinstance(find_net(model).module, RecurrentNet), "and only once"
