"""K/V in 8 bits: what the cache holds, what attention reads, and which models can have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoding.checks import PROMPTS, Drafting, assert_partly_accepted, check_greedy
from helpers.tiny import (
    KV_GROUP,
    LAYERS,
    NATIVE_INT8_KV,
    round_kv,
    tiny_llama,
    tiny_model_and_reference,
    to_native_8bit,
    use_engine,
)
from torch import Tensor

import skipsearch as ss
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import DraftWeights, Reading
from skipsearch.decoding import Decoder
from skipsearch.decoding.request import Request
from skipsearch.engine import no_grad
from skipsearch.engine.batch_invariant import forward_exact
from skipsearch.errors import ModelError
from skipsearch.models.kv_cache import KVCache, Planner
from skipsearch.models.loading.quantize import (
    join_rounding,
    split_activations,
    split_kv_cache_dtype,
)

pytestmark = pytest.mark.xdist_group("native")
CPU = torch.device("cpu")
TEXT = (torch.arange(530)[None] * 37 + 11) % 60 + 2


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_model(head_dim: int, kv_cache_dtype: str, dtype: torch.dtype = torch.float64) -> Any:
    hf = tiny_llama(layers=2, hidden=64, context=600, head_dim=head_dim)
    return to_native_8bit(hf.to(dtype), kv_cache_dtype)


@no_grad
def fill_cache(model: Any, n_tokens: int) -> KVCache:
    cache, planner = model.new_cache(1, 600), Planner(600, CPU)
    forward_exact(model, TEXT[:, :n_tokens], cache, planner, 0)
    return cache


def read_rows(buffer: Tensor, head_dim: int) -> Tensor:
    """The numbers that the rows of a buffer [..., bytes] stand for."""
    scales = buffer[..., head_dim:].contiguous().view(torch.float32).double()
    return buffer[..., :head_dim].double() * scales.repeat_interleave(KV_GROUP, -1)[..., :head_dim]


@pytest.mark.parametrize("head_dim", [8, 64, 100, 128])
def test_a_row_of_the_cache_is_the_rounded_key_or_value(head_dim: int) -> None:
    plain = fill_cache(make_model(head_dim, "auto"), 20)
    rounded = fill_cache(make_model(head_dim, "int8"), 20)
    for exact, stored in ((plain.keys[0], rounded.keys[0]), (plain.values[0], rounded.values[0])):
        assert exact is not None
        assert stored is not None
        assert stored.dtype == torch.int8
        read = read_rows(stored[:, :, :20], head_dim)
        assert torch.equal(read, round_kv(exact[:, :, :20]))
        assert 0 < (read - exact[:, :, :20]).abs().max() < exact.abs().max() / 100


def test_drafted_texts_are_those_of_transformers_with_a_rounded_cache() -> None:
    with use_engine(NATIVE_INT8_KV):
        assert_partly_accepted(check_greedy())


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_draft_in_fewer_bits_writes_rows_that_the_model_can_read(weights: DraftWeights) -> None:
    mask = SkipMask(LAYERS, (), (LAYERS - 1,))
    with use_engine(NATIVE_INT8_KV):
        assert_partly_accepted(check_greedy([Drafting(mask, 6, reading=Reading(weights))]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_row_has_the_same_bits_in_any_pass_and_by_any_number_of_threads(
    head_dim: int, dtype: torch.dtype
) -> None:
    """Across the borders of blocks of 256 keys, which threads share where the rows are few."""
    model = make_model(head_dim, "int8", dtype)

    @no_grad
    def compute_logits(sizes: list[int], n_threads: int) -> Tensor:
        torch.set_num_threads(n_threads)
        cache, planner, at, parts = model.new_cache(1, 600), Planner(600, CPU), 0, []
        for size in sizes:
            parts.append(forward_exact(model, TEXT[:, at : at + size], cache, planner, at)[0])
            at += size
        return torch.cat(parts)

    whole = compute_logits([530], 1)
    assert torch.equal(compute_logits([240, *[1] * 30, 230, *[1] * 30], 1), whole)
    assert torch.equal(compute_logits([250, *[3] * 5, 5, 230, 16, 9, 5], 2), whole)


def test_it_takes_a_fourth_of_the_memory_of_float32() -> None:
    sizes = {
        name: fill_cache(make_model(128, name, torch.float32), 20).nbytes
        for name in ("auto", "int8")
    }
    assert sizes["int8"] / sizes["auto"] == pytest.approx(0.25 * (1 + 4 / KV_GROUP))


def test_requests_of_a_batch_share_a_cache_of_such_rows() -> None:
    with use_engine(NATIVE_INT8_KV):
        model, full = tiny_model_and_reference()
    decoder = Decoder(model, Drafting().recipe)
    results = decoder.generate_batch([Request(prompt, 12) for prompt in PROMPTS])
    assert [r.tokens for r in results] == [full.greedy(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "base", "activations", "kv_cache_dtype"),
    [
        (None, None, "int8", "auto"),
        ("gguf-q4_k", "gguf-q4_k", "int8", "auto"),
        ("gguf-q4_k-int8-kv", "gguf-q4_k", "int8", "int8"),
        (NATIVE_INT8_KV, "native-8bit", "float", "int8"),
    ],
)
def test_a_quantization_names_activations_and_kv(
    name: str | None, base: str | None, activations: str, kv_cache_dtype: str
) -> None:
    assert split_activations(name, None) == (base, activations)
    assert split_kv_cache_dtype(name)[1] == kv_cache_dtype
    assert join_rounding(name, None, None) == name
    if base is not None:
        assert join_rounding(base, activations, kv_cache_dtype) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "int4.*auto, int8"),
        ({"kv_cache_dtype": "int8"}, "demo is no GGUF file: add --quantization native-8bit"),
        (
            {"quantization": "native-8bit-int8-kv", "kv_cache_dtype": "auto"},
            "says kv-cache-dtype int8, and not auto",
        ),
        (
            {"quantization": "torchao-8bit", "kv_cache_dtype": "int8"},
            "torchao-8bit|leave --kv-cache-dtype out",
        ),
    ],
)
def test_other_models_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ss.load_model("demo", device="cpu", **options)


def test_a_model_loaded_with_it_names_it() -> None:
    model = ss.load_model("demo", device="cpu", quantization="native-8bit", kv_cache_dtype="int8")
    assert model.spec.quantization == "native-8bit-int8-kv"
    again = ss.load_model("demo", device="cpu", quantization=model.spec.quantization)
    assert Decoder(again).generate(range(4, 40), 8).tokens == (
        Decoder(model).generate(range(4, 40), 8).tokens
    )
