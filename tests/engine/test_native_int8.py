"""Int8 weights in the native engine compute what the dequantised model does, on any CPU."""

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
from helpers.tiny import round_to_int8
from models import test_contract, tiny
from models.tiny import FUSED, new_hf_model
from torch import nn

import skipsearch as ss
from engine.test_native import DTYPES, logits_of, passes
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import native as engine
from skipsearch.engine.forward import run_layer_loop
from skipsearch.engine.native import NativeAdapter, cached_library, repack, to_native_int8
from skipsearch.engine.native import build as building
from skipsearch.engine.native.int8 import (
    INT8_MAX,
    Int8Panels,
    dequantize_q8,
    pack_int8_panels,
    quantize_q8,
)
from skipsearch.engine.native.panels import PanelLinear
from skipsearch.errors import ModelError
from skipsearch.models import adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model

pytestmark = pytest.mark.xdist_group("native")
FAMILIES = [name.removesuffix(":lean") for name in FUSED]
SHAPES = [
    (2, 3),
    (64, 32),
    (70, 33),
    (34, 200),
    (96, 1100),
]  # (out, in): panels and blocks that are full, and not


def fused(name: str, dtype: torch.dtype = torch.float64, eight_bits: bool = False) -> FusedAdapter:
    """eight_bits: of matrices that were rounded before, by Hugging Face's own modules."""
    model = new_hf_model(name).to(dtype)
    model = round_to_int8(model) if eight_bits else model
    return fuse_model(model, replace(adapt(model).spec, engine="lean"), family_of(model.config))


@cache
def native(name: str, dtype: torch.dtype = torch.float64) -> NativeAdapter:
    return to_native_int8(fused(name, dtype))


@cache
def random_weight(out: int, width: int) -> torch.Tensor:
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(out))
    weight[0] = 0
    weight[1] *= 1e-30
    return weight


# --- numbers and scales


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_off_by_half_a_step_of_its_block_at_most_and_the_largest_by_a_rounded_scale(
    shape: tuple[int, int],
) -> None:
    weight = random_weight(*shape)
    numbers, scales = quantize_q8(weight)
    assert numbers.shape == weight.shape
    assert (numbers.dtype, scales.dtype, scales.shape) == (
        torch.int8,
        torch.bfloat16,
        (shape[0], -(-shape[1] // 32)),
    )
    found = dequantize_q8(numbers, scales)
    step = scales.float().repeat_interleave(32, dim=1)[:, : shape[1]]
    assert bool(((found - weight).abs() <= 0.5001 * step).all())
    assert int(numbers.abs().max()) == INT8_MAX
    assert not found[0].any()
    assert torch.equal(
        found.double(), numbers.double() * step.double()
    )  # so float32 holds the product


def test_what_was_quantised_is_quantised_to_the_same_again() -> None:
    """A checkpoint of the dequantised weights is the same model, and so is a file of it for
    llama.cpp.
    """
    numbers, scales = quantize_q8(random_weight(70, 200))
    again = quantize_q8(dequantize_q8(numbers, scales))
    assert torch.equal(again[0], numbers)
    assert torch.equal(again[1], scales)


# --- the layout


def check_products(
    library: building.NativeLibrary, dtype: torch.dtype, shape: tuple[int, int], halves: int
) -> None:
    """Of 1 … 16 rows and of 19, with a bias and without: each row has the same bits in all of
    them.
    """
    generator = torch.Generator().manual_seed(0)
    bias, x = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((shape[0],), (19, shape[1]))
    )
    weight = random_weight(*shape).to(dtype)
    rounded = dequantize_q8(*quantize_q8(weight))
    for b in (bias, None):
        matrix = pack_int8_panels(weight, b, halves, library)
        assert torch.equal(matrix.to_dense(), rounded.to(dtype))
        expected = torch.nn.functional.linear(
            x.double(), rounded.double(), None if b is None else b.double()
        )
        close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
        whole = matrix(x)
        torch.testing.assert_close(
            whole.double(), expected, rtol=close, atol=close * float(expected.abs().max())
        )
        assert all(torch.equal(matrix(x[:rows]), whole[:rows]) for rows in range(1, 17))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_panels_of_8_bits_hold_a_matrix_and_compute_its_product(
    shape: tuple[int, int], halves: int, dtype: torch.dtype
) -> None:
    check_products(building.load_or_build(), dtype, shape, halves)


@pytest.mark.thorough
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_every_set_of_instructions_computes_the_same(instructions: str) -> None:
    if (
        building.INSTRUCTION_SETS[building.best_instruction_set()][0]
        < building.INSTRUCTION_SETS[instructions][0]
    ):
        pytest.skip(f"this processor has no {instructions}")
    library = building.load_or_build(instructions=instructions)
    for dtype, shape, halves in itertools.product(DTYPES, SHAPES, (1, 2)):
        check_products(library, dtype, shape, halves)
    mine = repack.repack_weights(fused("llama-tied"), library, as_int8=True)
    for a, b in zip(passes(mine), passes(native("llama-tied")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_large_matrix_is_quantised_piece_by_piece_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, weight = building.load_or_build(), random_weight(300, 70)
    for halves in (1, 2):
        whole = pack_int8_panels(weight, None, halves, library)
        monkeypatch.setattr(engine.int8, "CHUNK_WEIGHTS", 1)
        assert torch.equal(pack_int8_panels(weight, None, halves, library).weight, whole.weight)
        monkeypatch.undo()


def test_rows_are_those_of_the_matrix_and_another_matrix_in_its_place_keeps_the_dtype() -> None:
    matrix = pack_int8_panels(random_weight(70, 33).bfloat16(), None, 1, building.load_or_build())
    which = torch.tensor([[0, 69], [33, 33]])
    assert torch.equal(matrix.read_rows(which), matrix.to_dense()[which])
    other = matrix.pack_like(matrix.to_dense() + 1, None)
    assert type(other) is PanelLinear
    assert torch.equal(other.to_dense(), matrix.to_dense() + 1)


# --- the model

CONTRACT = {
    name: check
    for name, check in vars(test_contract).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["name"]
}


@cache
def dequantised_model(name: str) -> nn.Module:
    return round_to_int8(new_hf_model(name))


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_keeps_the_contract_of_the_dequantised_model(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_hf_model", dequantised_model)
    monkeypatch.setattr(test_contract, "adapted", native)
    CONTRACT[check](name)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_passes_are_those_of_the_dequantised_model_and_not_of_the_plain_one(
    name: str,
) -> None:
    plain = passes(fused(name))
    for mine, theirs, other in zip(
        passes(native(name)), passes(fused(name, eight_bits=True)), plain, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert float((mine - other).abs().max()) > 1e-4


def test_in_float32_it_is_the_dequantised_model_to_float32s_digits() -> None:
    for mine, theirs in zip(
        passes(native("llama", torch.float32)),
        passes(fused("llama", torch.float32, eight_bits=True)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "gemma3_text", "glm"])
def test_a_whole_pass_is_its_layers_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """A tied embedding is read off the head's numbers, in C++ and in Python alike."""
    for whole, layers in zip(
        passes(native(name, dtype)), passes(native(name, dtype), run_layer_loop), strict=True
    ):
        assert torch.equal(whole, layers)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3_text"])
def test_its_matrices_take_a_byte_and_a_sixteenth_a_weight_and_nothing_else_is_held_of_them(
    name: str,
) -> None:
    lean = fused(name, torch.float32)
    before = [
        weakref.ref(m.weight) for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)
    ] + [weakref.ref(lean.unembed.weight)]
    whole, read = lean.weight_bytes, lean.read_bytes
    model = to_native_int8(lean)
    gc.collect()
    assert [ref() for ref in before] == [None] * len(before)
    matrices = [m for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [
        lean.unembed
    ]
    assert all(isinstance(m, Int8Panels) for m in matrices)
    saved = sum(4 * m.shape[0] * m.shape[1] - m.nbytes for m in matrices)
    assert (model.weight_bytes, model.read_bytes) == (whole - saved, read - saved)
    assert (
        pack_int8_panels(torch.ones(64, 128), None, 1, model.library).nbytes == 64 * 128 * 17 // 16
    )
    assert (model.spec.quantization, lean.spec.quantization) == ("native-8bit", "native-8bit")


# --- the embedded model


@cache
def demo(dtype: str) -> NativeAdapter:
    model = ss.load_model("demo", device="cpu", dtype=dtype, quantization="native-8bit")
    assert isinstance(model, NativeAdapter)
    return model


def test_load_model_says_what_it_loaded() -> None:
    spec = demo("float32").spec
    assert (spec.quantization, spec.engine, spec.dtype_name, spec.weights_sha256 is None) == (
        "native-8bit",
        "native",
        "float32",
        False,
    )
    assert str(spec) == "demo (llama, 20 layers) as native-8bit on cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_pass(dtype: str) -> None:
    model, tokens = demo(dtype), (torch.arange(330)[None] * 37 + 11) % 4000 + 4
    whole = logits_of(model, tokens, [330])
    assert torch.equal(
        logits_of(model, tokens, [240, *[1] * 20, 16, 9, *[3] * 5, 7, 5, *[2] * 9]), whole
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafting_changes_no_token(dtype: str) -> None:
    model = demo(dtype)
    prompt = (list(model.tokenizer("def parse_arguments(argv=None):\n").input_ids) * 30)[:240]
    mask = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
    plain = Decoder(model).generate(prompt, 60, ignore_eos=True)
    drafted = Decoder(model, mask, draft_length=5, exit_policy=make_exit("fixed")).generate(
        prompt, 60, ignore_eos=True
    )
    assert (
        drafted.tokens
        == plain.tokens
        == Decoder(model, exact=True).generate(prompt, 60, ignore_eos=True).tokens
    )
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"engine": "lean"},
            "quantization native-8bit is run by the engine native alone, and not by lean: leave "
            "that engine out, or the "
            "quantization",
        ),
        ({"engine": "hf"}, "run by the engine native alone, and not by hf"),
        (
            {"dtype": "float16"},
            "quantization native-8bit is not possible for demo: the engine native cannot drive it: "
            "it computes in float32, bfloat16, float64 and demo is in float16",
        ),
        (
            {"quantization": "native-4bit"},
            "there is no quantization called 'native-4bit'; did you mean native-8bit",
        ),
    ],
)
def test_what_it_cannot_be_is_said_in_a_sentence(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ModelError, match=re.escape(sentence)):
        ss.load_model("demo", **{"device": "cpu", "quantization": "native-8bit", **options})


def test_it_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipsearch.engine.load.pick_device", lambda name: torch.device("cuda:1"))
    with pytest.raises(
        ModelError,
        match="native-8bit is for CPUs, and not for cuda:1: use --device cpu, or another "
        "quantization",
    ):
        ss.load_model("demo", quantization="native-8bit")


def test_a_family_that_native_cannot_drive_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    other = adapt(new_hf_model("gpt2"))
    monkeypatch.setattr("skipsearch.engine.load.models.load_adapter", lambda *_: other)
    with pytest.raises(
        ModelError,
        match=r"is for models that the engine native drives, and gpt2 is not one: gpt2 models "
        r"are "
        r"not of its shape .*; leave it out",
    ):
        ss.load_model("gpt2", device="cpu", quantization="native-8bit")


def test_without_a_compiler_there_is_none_and_nothing_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine would run another model."""

    def no_compiler(*_: object) -> None:
        raise building.NoCompilerError(
            "the engine native needs a C++ compiler and there is none: install g++"
        )

    monkeypatch.setattr(engine, "load_or_build", no_compiler)
    with pytest.raises(
        ModelError, match=r"needs a C\+\+ compiler and there is none: install g\+\+$"
    ):
        ss.load_model("demo", device="cpu", quantization="native-8bit")
    assert cached_library() is not None
