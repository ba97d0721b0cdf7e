"""The embedded model on a GPU, on every engine: fp32, exact bf16, quantized, and with a profile.

`pytest -m gpu`. `pytest -m slow` runs the same code on a CPU, on less text.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import skipsearch
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import load_model
from skipsearch.models import ModelAdapter
from skipsearch.profile import load_profile
from skipsearch.tasks import load_task

from .checks import assert_partly_accepted

MASK = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
N_PROMPTS = {"hf": 2, "lean": 8, "graph": 24}  # on a GPU: by how fast the engine writes
N_TOKENS = {"cuda": 440, "cpu": 40}  # after each prompt; graph writes more than 10,000 on a GPU


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.slow),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["hf", "lean", "graph"])
def engine(request: pytest.FixtureRequest, device: str) -> str:
    if (request.param, device) == ("graph", "cpu"):
        pytest.skip("graph records CUDA graphs")
    return request.param


@cache
def demo(device: str, dtype: str, engine: str, quantization: str | None = None) -> ModelAdapter:
    return load_model("demo", device=device, dtype=dtype, engine=engine, quantization=quantization)


def assert_drafts_change_nothing(
    model: ModelAdapter, device: str, exact: bool, exit_kind: str = "fixed"
) -> None:
    prompts, n_tokens = (N_PROMPTS[model.spec.engine] if device == "cuda" else 2, N_TOKENS[device])
    plain = Decoder(model, exact=exact)
    drafting = Decoder(model, MASK, draft_length=5, exit_policy=make_exit(exit_kind), exact=exact)
    total, written = DecodeStats(), 0
    for prompt in load_task("pycode").calibration[:prompts]:
        ids = list(model.tokenizer(prompt.text).input_ids)[-60:]
        expected = plain.generate(ids, n_tokens, ignore_eos=True).tokens
        drafted = drafting.generate(ids, n_tokens, ignore_eos=True)
        assert drafted.tokens == expected, prompt.id
        total, written = total + drafted.stats, written + len(expected)
    assert_partly_accepted(total)
    print(
        f"\n{model.spec.engine}, {model.spec.dtype_name}: {written} tokens, none changed by "
        f"{total.drafted} drafts",
        end="",
    )


@pytest.mark.parametrize("exit_kind", ["fixed", "confidence"])
def test_in_float32_drafts_change_no_token(engine: str, device: str, exit_kind: str) -> None:
    assert_drafts_change_nothing(
        demo(device, "float32", engine), device, exact=False, exit_kind=exit_kind
    )


def test_in_float32_every_engine_writes_the_unmodified_models_text(
    engine: str, device: str
) -> None:
    n_tokens = N_TOKENS[device]
    for prompt in load_task("pycode").calibration[:2]:
        ids = list(demo(device, "float32", "hf").tokenizer(prompt.text).input_ids)[-60:]
        expected = (
            Decoder(demo(device, "float32", "hf")).generate(ids, n_tokens, ignore_eos=True).tokens
        )
        assert (
            Decoder(demo(device, "float32", engine)).generate(ids, n_tokens, ignore_eos=True).tokens
            == expected
        )


def test_exact_text_in_bfloat16_does_not_depend_on_the_draft(engine: str, device: str) -> None:
    assert_drafts_change_nothing(demo(device, "bfloat16", engine), device, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "quantization", ["bitsandbytes-4bit", "bitsandbytes-8bit", "torchao-4bit", "torchao-8bit"]
)
def test_with_weights_in_fewer_bits_exact_text_does_not_depend_on_the_draft(
    quantization: str,
) -> None:
    if find_spec(library := quantization.partition("-")[0]) is None:
        pytest.skip(f"needs {library}")
    assert_drafts_change_nothing(demo("cuda", "bfloat16", "hf", quantization), "cuda", exact=True)


def test_a_profile_tuned_on_a_cpu_is_lossless_here(engine: str, device: str) -> None:
    profile = load_profile(
        min(
            (Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo" / "pycode").glob(
                "*.yaml"
            )
        )
    )
    assert profile.hardware is not None
    assert profile.hardware.kind == "cpu"
    model = demo(device, "float32", engine)
    decoder, plain = Decoder(model, profile), Decoder(model)
    assert decoder.warnings or device == "cpu"
    ids = list(model.tokenizer("def parse_arguments(argv=None):\n").input_ids)
    assert decoder.generate(ids, 200).tokens == plain.generate(ids, 200).tokens
