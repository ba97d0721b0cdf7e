"""Weights of 8 bits in the native engine: a model of its own, which is the dequantised one to the last digits, by any instructions."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.tiny import in_eight_bits
from models import test_contract, tiny
from models.tiny import FUSED, new_hf_model
from torch import nn

import skipsearch as ss
from skipsearch.decoding import Decoder
from skipsearch.engine import native as engine
from skipsearch.engine.forward import looped
from skipsearch.engine.native import NativeAdapter, adapter, eight_bit_model, kept_library
from skipsearch.engine.native import library as building
from skipsearch.engine.native.eights import MOST, Eights, dequantised, in_eights, quantised
from skipsearch.engine.native.panels import Panels
from skipsearch.errors import ModelError
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.models import adapt
from skipsearch.models.families import family_of
from skipsearch.models.lean import LeanAdapter, fuse

from .test_native import DTYPES, logits_of, passes

pytestmark = pytest.mark.xdist_group("native")
FAMILIES = [name.removesuffix(":lean") for name in FUSED]
SHAPES = [(2, 3), (64, 32), (70, 33), (34, 200), (96, 1100)]   # (out, in): panels and blocks that are full, and not


def fused(name: str, dtype: torch.dtype = torch.float64, eight_bits: bool = False) -> LeanAdapter:
    """eight_bits: of matrices that were rounded before, by Hugging Face's own modules."""
    model = new_hf_model(name).to(dtype)
    model = in_eight_bits(model) if eight_bits else model
    return fuse(model, replace(adapt(model).spec, engine="lean"), family_of(model.config))


@cache
def native(name: str, dtype: torch.dtype = torch.float64) -> NativeAdapter:
    return eight_bit_model(fused(name, dtype))


@cache
def random_weight(out: int, width: int) -> torch.Tensor:
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(out))
    weight[0] = 0
    weight[1] *= 1e-30
    return weight


# --- numbers and scales ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_off_by_half_a_step_of_its_block_at_most_and_the_largest_by_a_rounded_scale(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    numbers, scales = quantised(weight)
    assert numbers.shape == weight.shape
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.int8, torch.bfloat16, (shape[0], -(-shape[1] // 32)))
    found = dequantised(numbers, scales)
    step = scales.float().repeat_interleave(32, dim=1)[:, :shape[1]]
    assert bool(((found - weight).abs() <= 0.5001 * step).all())
    assert int(numbers.abs().max()) == MOST
    assert not found[0].any()
    assert torch.equal(found.double(), numbers.double() * step.double())   # so float32 holds the product


def test_what_was_quantised_is_quantised_to_the_same_again() -> None:
    """A checkpoint of the dequantised weights is the same model, and so is a file of it for llama.cpp."""
    numbers, scales = quantised(random_weight(70, 200))
    again = quantised(dequantised(numbers, scales))
    assert torch.equal(again[0], numbers)
    assert torch.equal(again[1], scales)


# --- the layout --------------------------------------------------------------------------------------------------------------

def check_products(library: building.Library, dtype: torch.dtype, shape: tuple[int, int], halves: int) -> None:
    """Of 1 … 16 rows and of 19, with a bias and without: each row has the same bits in all of them."""
    generator = torch.Generator().manual_seed(0)
    bias, x = (torch.randn(*size, generator=generator).to(dtype) for size in ((shape[0],), (19, shape[1])))
    weight = random_weight(*shape).to(dtype)
    rounded = dequantised(*quantised(weight))
    for b in (bias, None):
        matrix = in_eights(weight, b, halves, library)
        assert torch.equal(matrix.dense(), rounded.to(dtype))
        expected = torch.nn.functional.linear(x.double(), rounded.double(), None if b is None else b.double())
        close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
        whole = matrix(x)
        torch.testing.assert_close(whole.double(), expected, rtol=close, atol=close * float(expected.abs().max()))
        assert all(torch.equal(matrix(x[:rows]), whole[:rows]) for rows in range(1, 17))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_panels_of_8_bits_hold_a_matrix_and_compute_its_product(shape: tuple[int, int], halves: int, dtype: torch.dtype) -> None:
    check_products(building.open_library(), dtype, shape, halves)


@pytest.mark.thorough
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_every_set_of_instructions_computes_the_same(instructions: str) -> None:
    if building.SETS[building.best_set()][0] < building.SETS[instructions][0]:
        pytest.skip(f"this processor has no {instructions}")
    library = building.open_library(instructions=instructions)
    for dtype, shape, halves in itertools.product(DTYPES, SHAPES, (1, 2)):
        check_products(library, dtype, shape, halves)
    mine = adapter.in_its_layout(fused("llama-tied"), library, eight_bits=True)
    for a, b in zip(passes(mine), passes(native("llama-tied")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_large_matrix_is_quantised_piece_by_piece_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library, weight = building.open_library(), random_weight(300, 70)
    for halves in (1, 2):
        whole = in_eights(weight, None, halves, library)
        monkeypatch.setattr(engine.eights, "AT_ONCE", 1)
        assert torch.equal(in_eights(weight, None, halves, library).weight, whole.weight)
        monkeypatch.undo()


def test_rows_are_those_of_the_matrix_and_another_matrix_in_its_place_keeps_the_dtype() -> None:
    matrix = in_eights(random_weight(70, 33).bfloat16(), None, 1, building.open_library())
    which = torch.tensor([[0, 69], [33, 33]])
    assert torch.equal(matrix.rows(which), matrix.dense()[which])
    other = matrix.like(matrix.dense() + 1, None)
    assert type(other) is Panels
    assert torch.equal(other.dense(), matrix.dense() + 1)


# --- the model ---------------------------------------------------------------------------------------------------------------

CONTRACT = {name: check for name, check in vars(test_contract).items()
            if name.startswith("test_") and list(inspect.signature(check).parameters) == ["name"]}


@cache
def dequantised_model(name: str) -> nn.Module:
    return in_eight_bits(new_hf_model(name))


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_keeps_the_contract_of_the_dequantised_model(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_hf_model", dequantised_model)
    monkeypatch.setattr(test_contract, "adapted", native)
    CONTRACT[check](name)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_passes_are_those_of_the_dequantised_model_and_not_of_the_plain_one(name: str) -> None:
    plain = passes(fused(name))
    for mine, theirs, other in zip(passes(native(name)), passes(fused(name, eight_bits=True)), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert float((mine - other).abs().max()) > 1e-4


def test_in_float32_it_is_the_dequantised_model_to_float32s_digits() -> None:
    for mine, theirs in zip(passes(native("llama", torch.float32)), passes(fused("llama", torch.float32, eight_bits=True)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "gemma3_text", "glm"])
def test_a_whole_pass_is_its_layers_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """A tied embedding is read off the head's numbers, in C++ and in Python alike."""
    for whole, layers in zip(passes(native(name, dtype)), passes(native(name, dtype), looped), strict=True):
        assert torch.equal(whole, layers)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3_text"])
def test_its_matrices_take_a_byte_and_a_sixteenth_a_weight_and_nothing_else_is_held_of_them(name: str) -> None:
    lean = fused(name, torch.float32)
    before = [weakref.ref(m.weight) for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [weakref.ref(lean.unembed.weight)]
    whole, read = lean.weight_bytes, lean.read_bytes
    model = eight_bit_model(lean)
    gc.collect()
    assert [ref() for ref in before] == [None] * len(before)
    matrices = [m for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [lean.unembed]
    assert all(isinstance(m, Eights) for m in matrices)
    saved = sum(4 * m.shape[0] * m.shape[1] - m.bytes for m in matrices)
    assert (model.weight_bytes, model.read_bytes) == (whole - saved, read - saved)
    assert in_eights(torch.ones(64, 128), None, 1, model.library).bytes == 64 * 128 * 17 // 16
    assert (model.spec.quantization, lean.spec.quantization) == ("native-8bit", "native-8bit")


# --- the embedded model --------------------------------------------------------------------------------------------------------

@cache
def demo(dtype: str) -> NativeAdapter:
    found = ss.load_model("demo", device="cpu", dtype=dtype, quantization="native-8bit")
    assert isinstance(found, NativeAdapter)
    return found


def test_load_model_says_what_it_loaded() -> None:
    spec = demo("float32").spec
    assert (spec.quantization, spec.engine, spec.dtype_name, spec.weights_sha256 is None) == ("native-8bit", "native", "float32", False)
    assert str(spec) == "demo (llama, 20 layers) as native-8bit on cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_pass(dtype: str) -> None:
    model, tokens = demo(dtype), (torch.arange(330)[None] * 37 + 11) % 4000 + 4
    whole = logits_of(model, tokens, [330])
    assert torch.equal(logits_of(model, tokens, [240, *[1] * 20, 16, 9, *[3] * 5, 7, 5, *[2] * 9]), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafting_changes_no_token(dtype: str) -> None:
    model = demo(dtype)
    prompt = (list(model.tokenizer("def parse_arguments(argv=None):\n").input_ids) * 30)[:240]
    mask = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
    plain = Decoder(model).generate(prompt, 60, ignore_eos=True)
    drafted = Decoder(model, mask, draft_length=5, exit_policy=make_exit("fixed")).generate(prompt, 60, ignore_eos=True)
    assert drafted.tokens == plain.tokens == Decoder(model, exact=True).generate(prompt, 60, ignore_eos=True).tokens
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


# --- what cannot be ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "sentence"), [
    ({"engine": "lean"}, "quantization native-8bit is run by the engine native alone, and not by lean: leave that engine out, or the "
                         "quantization"),
    ({"engine": "hf"}, "run by the engine native alone, and not by hf"),
    ({"dtype": "float16"}, "quantization native-8bit cannot be had of demo, since the engine native cannot drive it: it computes in "
                           "float32, bfloat16, float64 and demo is in float16"),
    ({"quantization": "native-4bit"}, "there is no quantization called 'native-4bit'; did you mean native-8bit"),
])
def test_what_it_cannot_be_is_said_in_a_sentence(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ModelError, match=re.escape(sentence)):
        ss.load_model("demo", **{"device": "cpu", "quantization": "native-8bit", **options})


def test_it_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipsearch.engine.load.pick_device", lambda name: torch.device("cuda:1"))
    with pytest.raises(ModelError, match="native-8bit is for CPUs, and not for cuda:1: use --device cpu, or another quantization"):
        ss.load_model("demo", quantization="native-8bit")


def test_a_family_that_native_cannot_drive_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    other = adapt(new_hf_model("gpt2"))
    monkeypatch.setattr("skipsearch.engine.load.models.load_adapter", lambda *_: other)
    with pytest.raises(ModelError, match=r"is for models that the engine native drives, and gpt2 is none of them: gpt2 models are "
                                         r"not of its shape .*; leave it out"):
        ss.load_model("gpt2", device="cpu", quantization="native-8bit")


def test_without_a_compiler_there_is_none_and_nothing_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine would run another model."""
    def no_compiler(*_: object) -> None:
        raise building.NoCompiler("the engine native needs a C++ compiler and there is none: install g++")

    monkeypatch.setattr(engine, "open_library", no_compiler)
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler and there is none: install g\+\+$"):
        ss.load_model("demo", device="cpu", quantization="native-8bit")
    assert kept_library() is not None
