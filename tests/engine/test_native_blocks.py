"""Weights in blocks of 4 to 8 bits: the numbers, the panels, and the models that they make. With
float activations the native engine computes what the dequantised model does, on any CPU; with int8
activations, what it does with rounded inputs.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import weakref
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from helpers.activations import round_activations
from helpers.marks import in_turn, thorough
from helpers.tiny import round_matrices, to_native_8bit
from hypothesis import given, settings
from hypothesis import strategies as st
from models import test_contract, tiny
from models.tiny import FUSABLE_NAMES, new_hf_model
from torch import nn

import skipsearch as ss
from engine.test_native import DTYPES, logits_of, passes
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import native as native_engine
from skipsearch.engine.forward import run_layer_loop
from skipsearch.engine.native import NativeAdapter, cached_library, panels
from skipsearch.engine.native import build as building
from skipsearch.engine.native.block_formats import BLOCK_FORMATS, find_block_format
from skipsearch.engine.native.blocks import (
    FORMAT_OF_BITS,
    dequantize,
    quantize,
    round_weight,
    split_blocks,
)
from skipsearch.engine.native.grid_blocks import GRID_FORMATS
from skipsearch.engine.native.panels import PanelLinear, PanelPacker
from skipsearch.engine.native.repack import repack_weights
from skipsearch.engine.native.rounded import RoundedMatrix, round_matrices_when_read
from skipsearch.errors import ModelError
from skipsearch.models import adapt
from skipsearch.models.activations import ACTIVATIONS
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model
from skipsearch.models.fused.linear import StoredFusedLinear
from skipsearch.models.loading.gguf_file import GGUFMatrix
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.stored_linear import TensorMatrix

pytestmark = pytest.mark.xdist_group("native")
BITS = tuple(FORMAT_OF_BITS)
# (out, in): panels and blocks that are full, and not
SHAPES = [(2, 3), (64, 32), (70, 33), (34, 200), (96, 1100)]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2}
# The contract of families in dense panels is checked for all of them.
_QUICK = ("llama", "gemma3_text", "gpt_oss", "qwen2_moe")
ROUNDED_FAMILIES = [*_QUICK, *thorough(*(name for name in FUSABLE_NAMES if name not in _QUICK))]
ROUNDING = {"int8": 2e-3, "int16": 1e-4, "float": 0.0}  # of an input at a tie


def fused(name: str, dtype: torch.dtype = torch.float64, rounded: bool = False) -> FusedAdapter:
    """rounded: with matrices that were rounded to 8 bits before, in Hugging Face's modules."""
    model = new_hf_model(name).to(dtype)
    model = round_matrices(model) if rounded else model
    return fuse_model(model, replace(adapt(model).spec, engine="lean"), family_of(model.config))


@cache
def native(name: str, dtype: torch.dtype = torch.float64) -> NativeAdapter:
    return to_native_8bit(new_hf_model(name).to(dtype))


@cache
def random_weight(out: int, width: int) -> torch.Tensor:
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(out))
    weight[0] = 0
    weight[1] *= 1e-30
    return weight


# --- numbers and scales


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_off_by_a_step_of_its_block_at_most(shape: tuple[int, int], bits: int) -> None:
    weight = random_weight(*shape)
    blocks = quantize(weight, bits)
    numbers, scales = split_blocks(blocks)
    groups = -(-shape[1] // 32)
    assert (numbers.dtype, numbers.shape) == (torch.uint8, (shape[0], groups, 32))
    assert (scales.dtype, scales.shape) == (torch.float16, (shape[0], groups))
    assert int(numbers.max()) < 2**bits
    rounded = dequantize(blocks, bits).flatten(1)[:, : shape[1]]
    step = scales.float().abs().repeat_interleave(32, dim=1)[:, : shape[1]]
    steps = 0.51 if bits == 8 else 1.51  # the largest magnitude of one sign may be cut off
    assert bool(((rounded - weight).abs() <= steps * step + 1e-7).all())
    assert not rounded[0].any()
    assert torch.equal(round_weight(weight, bits), rounded)


def test_more_bits_are_closer() -> None:
    weight = random_weight(96, 1100)[2:]
    errors = [float((round_weight(weight, bits) - weight).square().mean()) for bits in BITS]
    assert errors == sorted(errors)
    assert errors[-1] < 0.01


def test_weights_of_8_bits_are_rounded_to_themselves() -> None:
    """A checkpoint of the rounded weights is the same model, and so is a file for llama.cpp."""
    once = round_weight(random_weight(70, 200), 8)
    assert torch.equal(round_weight(once, 8), once)


def test_huge_weights_stay_finite() -> None:
    assert all(bool(round_weight(torch.full((2, 32), 1e9), bits).isfinite().all()) for bits in BITS)


# --- panels


def pack_rounded(
    library: building.NativeLibrary,
    weight: torch.Tensor,
    bits: int,
    bias: torch.Tensor | None = None,
    interleave: int = 1,
    activations: str = "int8",
) -> PanelLinear:
    """Return the panels of a weight that is rounded when it is packed."""
    stored = StoredFusedLinear(
        (RoundedMatrix(TensorMatrix("weight", weight), bits),), bias, weight.dtype
    )
    return PanelPacker(library, weight.dtype, activations).pack(stored, interleave)


def check_products(
    library: building.NativeLibrary,
    dtype: torch.dtype,
    shape: tuple[int, int],
    interleave: int,
    bits: int,
    activations: str,
) -> None:
    """Check products of 1 … 16 rows and of 19, with a bias and without: a row has the same bits in
    all of them.
    """
    generator = torch.Generator().manual_seed(0)
    bias, x = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((shape[0],), (19, shape[1]))
    )
    weight = random_weight(*shape).to(dtype)
    rounded = round_weight(weight, bits)
    inputs = round_activations(x, activations)
    for b in (bias, None):
        matrix = pack_rounded(library, weight, bits, b, interleave, activations)
        assert torch.equal(matrix.to_dense(), rounded)
        expected = torch.nn.functional.linear(
            inputs.double(), rounded.double(), None if b is None else b.double()
        )
        whole = matrix(x)
        tolerance = max(TOLERANCE[dtype], ROUNDING[activations])
        torch.testing.assert_close(
            whole.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
        assert all(torch.equal(matrix(x[:rows]), whole[:rows]) for rows in range(1, 17))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_hold_a_matrix_and_compute_its_product(
    dtype: torch.dtype, bits: int, activations: str
) -> None:
    for shape, interleave in itertools.product(SHAPES, (1, 2)):
        check_products(building.load_or_build(), dtype, shape, interleave, bits, activations)


@pytest.mark.thorough
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512", "avx512vnni"])
def test_every_set_of_instructions_computes_the_same(instructions: str) -> None:
    best = building.INSTRUCTION_SETS[building.best_instruction_set()]
    if not set(building.INSTRUCTION_SETS[instructions].x86) <= set(best.x86):
        pytest.skip(f"this processor has no {instructions}")
    library = building.load_or_build(instructions=instructions)
    for dtype, interleave, bits, floats in itertools.product(DTYPES, (1, 2), BITS, ACTIVATIONS):
        check_products(library, dtype, (70, 33), interleave, bits, floats)
        check_products(library, dtype, (96, 1100), interleave, bits, floats)
    for dtype, name, floats in itertools.product(DTYPES, FILE_FORMATS, ACTIVATIONS):
        check_file_format(library, dtype, name, floats)
    model = new_hf_model("llama-tied").double()
    spec, family = adapt(model).spec, family_of(model.config)
    round_matrices_when_read(model, 8, torch.float64)
    mine = repack_weights(fuse_model(model, spec, family), library, activations="float")
    for a, b in zip(passes(mine), passes(native("llama-tied")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_large_matrix_is_packed_chunk_by_chunk_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, weight = building.load_or_build(), random_weight(300, 70)
    for interleave in (1, 2):
        whole = pack_rounded(library, weight, 8, None, interleave)
        monkeypatch.setattr(panels, "CHUNK_WEIGHTS", 1)
        assert torch.equal(pack_rounded(library, weight, 8, None, interleave).weight, whole.weight)
        monkeypatch.undo()


def test_rows_are_those_of_the_matrix_and_another_matrix_in_its_place_is_dense() -> None:
    weight = random_weight(70, 33).bfloat16()
    for interleave in (1, 2):
        matrix = pack_rounded(building.load_or_build(), weight, 8, None, interleave)
        which = torch.tensor([[0, 69], [33, 33]])
        assert torch.equal(matrix.read_rows(which), matrix.to_dense()[which])
        other = matrix.pack_like(matrix.to_dense() + 1, None)
        assert not any(other.kinds)
        assert torch.equal(other.to_dense(), matrix.to_dense() + 1)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["float", "int8", "int16"]),
    st.sampled_from([4, 8]),
)
def test_each_row_is_multiplied_by_a_part_of_a_matrix(
    counts: list[int], threads: int, activations: str, bits: int
) -> None:
    n_parts, before = len(counts), torch.get_num_threads()
    weight = random_weight(64 * n_parts, 96).float()
    matrix = pack_rounded(building.load_or_build(), weight, bits, activations=activations)
    x = torch.randn(sum(counts), 96, generator=torch.Generator().manual_seed(len(counts)))
    first_rows = torch.tensor([0, *counts]).cumsum(0)
    torch.set_num_threads(threads)
    outputs = matrix.multiply_parts(x, first_rows)
    torch.set_num_threads(before)
    part_of_row = torch.arange(n_parts).repeat_interleave(torch.tensor(counts))
    expected = matrix(x).view(len(x), n_parts, 64)[torch.arange(len(x)), part_of_row]
    assert torch.equal(outputs, expected)


def test_a_nan_among_the_inputs_reaches_every_output() -> None:
    matrix = pack_rounded(building.load_or_build(), torch.randn(40, 64), 4)
    x = torch.randn(2, 64)
    x[0, 40] = float("nan")
    y = matrix(x)
    assert bool(y[0].isnan().all())
    assert bool(y[1].isfinite().all())


# --- blocks of a file

FILE_FORMATS = [*(name for name in BLOCK_FORMATS if name != "q6_0"), "iq2_xs", "iq2_xxs"]


def random_blocks(name: str, out: int, width: int) -> np.ndarray:
    """Return rows of random blocks with scales of a usual size."""
    block_size, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (out, width // block_size, n_bytes), dtype=np.uint8)
    if name == "mxfp4":
        data[..., 0] = rng.integers(100, 130, data.shape[:2])  # from 2 ** -28 on: some need zeros
        data[data[..., 0] < 104, 1:] = 0x80
        return data.reshape(out, -1)
    halves = {"q6_k": (208,), "q3_k": (108,), "q2_k": (80, 82)}
    halves |= dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2))
    for offset in halves.get(name, (0,)):
        signs = rng.choice([-1, 1], data.shape[:2])
        scales = (signs * rng.uniform(0.001, 0.02, data.shape[:2])).astype(np.float16)
        data[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return data.reshape(out, -1)


def check_file_format(
    library: building.NativeLibrary, dtype: torch.dtype, name: str, activations: str
) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    data = random_blocks(name, 70, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
    matrix = GGUFMatrix("blk.0.w", name, (70, 512), data)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    packer = PanelPacker(library, dtype, activations)
    x = torch.randn(9, 512).to(dtype)
    inputs = round_activations(x, activations)
    for interleave, rows in ((1, None), (2, None), (1, order)):
        weight = expected if rows is None else expected[rows]
        packed = packer.pack(StoredFusedLinear((matrix,), None, dtype, rows), interleave)
        block_format = find_block_format(name)
        assert block_format is not None
        assert set(packed.kinds) == {block_format.code}
        torch.testing.assert_close(packed.to_dense(), weight.to(dtype), rtol=1e-2, atol=1e-6)
        product = inputs.double() @ packed.to_dense().double().T
        tolerance = max(TOLERANCE[dtype], ROUNDING[activations])
        torch.testing.assert_close(
            packed(x).double(), product, rtol=tolerance, atol=tolerance * float(product.abs().max())
        )
        assert all(torch.equal(packed(x[:n]), packed(x)[:n]) for n in (1, 2, 5, 8))


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_blocks_of_a_file_are_multiplied_as_they_are(name: str) -> None:
    for dtype, floats in itertools.product(DTYPES, ACTIVATIONS):
        check_file_format(building.load_or_build(), dtype, name, floats)


@pytest.mark.parametrize("exponent", [103, 144])
def test_a_scale_that_no_half_can_be_makes_a_matrix_dense(exponent: int) -> None:
    data = random_blocks("mxfp4", 32, 64)
    data[5, 17:19] = exponent, 0x21
    stored = StoredFusedLinear((GGUFMatrix("w", "mxfp4", (32, 64), data),), None, torch.float32)
    packed = PanelPacker(building.load_or_build(), torch.float32).pack(stored)
    assert not any(packed.kinds)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(packed.to_dense(), torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("name", GRID_FORMATS)
def test_a_grid_whose_scales_are_too_small_for_halves_makes_a_matrix_dense(name: str) -> None:
    data = random_blocks(name, 32, 256)
    data[7, :2] = 3, 0  # three times the smallest half
    matrix = GGUFMatrix("w", name, (32, 256), data)
    packed = PanelPacker(building.load_or_build(), torch.float32).pack(
        StoredFusedLinear((matrix,), None, torch.float32)
    )
    assert any(packed.kinds) is (GRID_FORMATS[name].factor == 1)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    torch.testing.assert_close(packed.to_dense(), torch.from_numpy(expected.copy()))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(FILE_FORMATS), st.integers(0, 2**32 - 1))
def test_any_bytes_of_a_file_are_read_as_gguf_reads_them(name: str, seed: int) -> None:
    """Weights that are no numbers stay none, in some form."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    block_size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (32, n_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
    stored = StoredFusedLinear(
        (GGUFMatrix("w", name, (32, block_size), data),), None, torch.float32
    )
    packed = PanelPacker(building.load_or_build(), torch.float32).pack(stored).to_dense()
    assert torch.equal(packed.isfinite(), expected.isfinite())
    is_number = expected.isfinite()
    torch.testing.assert_close(packed[is_number], expected[is_number], rtol=1e-5, atol=1e-6)


def test_rows_of_several_grids_share_a_matrix() -> None:
    names = ("iq2_xxs", "iq2_s", "iq2_xs")
    parts = tuple(GGUFMatrix(name, name, (40, 256), random_blocks(name, 40, 256)) for name in names)
    stored = StoredFusedLinear(parts, None, torch.float32)
    packed = PanelPacker(building.load_or_build(), torch.float32).pack(stored)
    assert set(packed.kinds) == {BLOCK_FORMATS["iq2_s"].code}
    torch.testing.assert_close(packed.to_dense(), stored.to_dense())


def test_rows_of_several_formats_share_a_matrix_and_a_mixed_panel_is_dense() -> None:
    parts = [
        GGUFMatrix(name, name, (out, 256), random_blocks(name, out, 256))
        for name, out in (("q4_k", 64), ("q6_k", 40), ("q6_k", 40))
    ]
    stored = StoredFusedLinear(tuple(parts), None, torch.float32)
    packed = PanelPacker(building.load_or_build(), torch.float32).pack(stored)
    codes = [BLOCK_FORMATS[name].code for name in ("q4_k", "q4_k", "q6_k", "q6_k", "q6_k")]
    assert list(packed.kinds) == codes
    expected = torch.cat(
        [
            torch.from_numpy(
                gguf.quants.dequantize(
                    part.data, gguf.GGMLQuantizationType[part.format.upper()]
                ).copy()
            )
            for part in parts
        ]
    )
    torch.testing.assert_close(packed.to_dense(), expected)
    mixed = PanelPacker(building.load_or_build(), torch.float32).pack(
        StoredFusedLinear((parts[1], parts[0]), None, torch.float32)
    )
    assert list(mixed.kinds) == [codes[2], 0, codes[0], codes[0]]
    torch.testing.assert_close(mixed.to_dense(), torch.cat([expected[64:104], expected[:64]]))


# --- the model

CONTRACT = {
    name: check
    for name, check in vars(test_contract).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["name"]
}


@cache
def dequantised_model(name: str) -> nn.Module:
    return round_matrices(new_hf_model(name))


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", ROUNDED_FAMILIES)
def test_it_keeps_the_contract_of_the_dequantised_model(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_hf_model", dequantised_model)
    monkeypatch.setattr(test_contract, "adapted", native)
    CONTRACT[check](name)


@pytest.mark.parametrize("name", ROUNDED_FAMILIES)
def test_whole_passes_are_those_of_the_dequantised_model_and_not_of_the_plain_one(
    name: str,
) -> None:
    plain = passes(fused(name))
    # Routers compute probabilities in float32.
    bound = 1e-9 if fused(name).experts is None else 1e-5
    for mine, theirs, other in zip(
        passes(native(name)), passes(fused(name, rounded=True)), plain, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)
        assert float((mine - other).abs().max()) > 1e-4


def test_in_float32_it_is_the_dequantised_model_to_float32s_digits() -> None:
    for mine, theirs in zip(
        passes(native("llama", torch.float32)),
        passes(fused("llama", torch.float32, rounded=True)),
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
    whole, read = lean.weight_bytes, lean.read_bytes
    hf = new_hf_model(name).float()
    before = [weakref.ref(m.weight) for m in hf.modules() if isinstance(m, nn.Linear)]
    model = to_native_8bit(hf)
    fused_model = model.fused_model
    gc.collect()
    assert [ref() for ref in before] == [None] * len(before)
    matrices = [m for a, f in fused_model.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [
        fused_model.unembed
    ]
    assert all(isinstance(m, PanelLinear) and set(m.kinds) == {1} for m in matrices)
    saved = sum(4 * m.shape[0] * m.shape[1] - m.nbytes for m in matrices)
    assert (model.weight_bytes, model.read_bytes) == (whole - saved, read - saved)
    assert pack_rounded(model.library, torch.ones(64, 128), 8).nbytes == 64 * 128 * 17 // 16
    assert model.spec.quantization == "native-8bit-float-activations"


# --- the embedded model

QUANTIZATIONS = ("native-8bit", "native-4bit", "native-4bit-int16-activations")


@cache
def demo(dtype: str, quantization: str = "native-8bit") -> NativeAdapter:
    model = ss.load_model("demo", device="cpu", dtype=dtype, quantization=quantization)
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


@pytest.mark.parametrize(("quantization", "dtype"), in_turn(QUANTIZATIONS, ["bfloat16", "float32"]))
def test_a_row_has_the_same_bits_in_any_pass(dtype: str, quantization: str) -> None:
    model, tokens = demo(dtype, quantization), (torch.arange(330)[None] * 37 + 11) % 4000 + 4
    whole = logits_of(model, tokens, [330])
    assert torch.equal(
        logits_of(model, tokens, [240, *[1] * 20, 16, 9, *[3] * 5, 7, 5, *[2] * 9]), whole
    )


@pytest.mark.parametrize(("quantization", "dtype"), in_turn(QUANTIZATIONS, ["bfloat16", "float32"]))
def test_drafting_changes_no_token(dtype: str, quantization: str) -> None:
    model = demo(dtype, quantization)
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
            "native-8bit weights of demo are run by the engine native alone, which cannot drive "
            "this model: it computes in float32, bfloat16, float64 and demo is in float16",
        ),
        (
            {"quantization": "native-3bit"},
            "there is no quantization called 'native-3bit'; did you mean native-",
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
    model = new_hf_model("gpt2")
    other = LoadedModel(model, adapt(model).spec, family_of(model.config), None)
    monkeypatch.setattr("skipsearch.engine.load.open_model", lambda *_: other)
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

    monkeypatch.setattr(native_engine, "load_or_build", no_compiler)
    with pytest.raises(
        ModelError, match=r"needs a C\+\+ compiler and there is none: install g\+\+$"
    ):
        ss.load_model("demo", device="cpu", quantization="native-8bit")
    assert cached_library() is not None
