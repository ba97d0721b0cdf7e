"""llama.cpp as a system: the same weights and greedy tokens, or a message if it cannot run."""

from __future__ import annotations

import builtins
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.gguf_files import write_model
from helpers.tiny import VOCAB, tiny_llama
from models.tiny import new_hf_model

import skipsearch as ss
from skipsearch.bench import PLAIN_WEIGHTS, make_systems, measure_llama_costs
from skipsearch.bench.gguf_writer import unsupported_reason, write_gguf
from skipsearch.bench.llama_cpp import NAMES, LlamaCpp
from skipsearch.decoding import Decoder
from skipsearch.engine.native.blocks import round_weight
from skipsearch.errors import DecodeError
from skipsearch.models import ModelAdapter


@cache
def demo() -> ModelAdapter:
    return ss.load_model("demo", device="cpu", dtype="float32", engine="hf")


def prompt() -> list[int]:
    return (list(demo().tokenizer("import os\n\ndef main(argv=None):")["input_ids"]) * 6)[:60]


@pytest.mark.thorough
def test_it_writes_our_greedy_tokens_with_drafts_and_without() -> None:
    pytest.importorskip("llama_cpp")
    ours = Decoder(demo()).generate(prompt(), 30, ignore_eos=True).tokens
    systems = make_systems(NAMES, "hf", None, lambda engine: demo())
    assert [system.engine for system in systems] == ["llama.cpp"] * 2
    for system in (*systems, *systems):  # a text leaves no state
        run = system.run(prompt(), 30)
        assert run.tokens == ours, system.name
        assert min(run.first_token_s, run.decode_s) > 0


@pytest.mark.thorough
def test_its_passes_by_rows_are_timed() -> None:
    pytest.importorskip("llama_cpp")
    row = measure_llama_costs(LlamaCpp(demo()), 20)
    assert (row.engine, row.dtype, row.beta_half, len(row.v)) == ("llama.cpp", "float32", None, 15)
    assert min(row.v) > 0 < row.pass_ms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_holds_every_weight_in_the_order_of_llama_cpp(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = new_hf_model("llama").to(dtype)
    write_gguf(model, tmp_path / "x.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert len(found) == len(list(model.parameters()))
    attention = model.model.layers[1].self_attn  # type: ignore[union-attr,index]
    for name, weight, heads in (
        ("blk.1.attn_q", attention.q_proj.weight, 4),
        ("blk.1.attn_v", attention.v_proj.weight, 0),
    ):
        raw = torch.from_numpy(found[f"{name}.weight"].data.copy())
        mine = (raw.view(torch.bfloat16) if dtype == torch.bfloat16 else raw).view(weight.shape)
        if heads:  # pairs of neighbours there are pairs of halves here
            mine = mine.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(mine, weight)
    assert str(torch.from_numpy(found["output_norm.weight"].data.copy()).dtype) == "torch.float32"


def test_a_file_of_8_bits_holds_the_numbers_and_scales_of_the_engine_native(tmp_path: Path) -> None:
    """A reader of the file gets the weights that `native-8bit` computes with.

    A separate embedding keeps its dtype.
    """
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    for name, kind in (("llama", "F32"), ("llama-tied", "Q8_0")):
        model = new_hf_model(name, **shape).float()
        write_gguf(model, tmp_path / "x.gguf", bits=8)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
        assert found["token_embd.weight"].tensor_type.name == kind
        down = found["blk.1.ffn_down.weight"]
        mine = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type).copy())
        assert torch.equal(mine, round_weight(model.model.layers[1].mlp.down_proj.weight, 8))  # type: ignore[union-attr,index]
        again = gguf.quants.quantize(mine.numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(again, down.data)  # as gguf's own rounding has it
    reason = "Q8_0 takes 32 inputs together, and a matrix has another number of them"
    assert unsupported_reason(new_hf_model("llama", hidden_size=48).float(), bits=8) == reason


@pytest.mark.thorough
def test_it_takes_part_with_8_bits_where_the_engine_has_them() -> None:
    """It rounds more than the native engine, so only the first tokens must agree."""
    pytest.importorskip("llama_cpp")
    ours = ss.load_model("demo", device="cpu", dtype="float32", quantization="native-8bit")
    opened: list[str] = []
    plain, theirs, lookup = make_systems(
        ["plain", *NAMES],
        "native",
        None,
        lambda name: opened.append(name) or (demo() if name == PLAIN_WEIGHTS else ours),
    )
    assert opened.count(PLAIN_WEIGHTS) == 1
    assert theirs.llama.bits == 8  # type: ignore[attr-defined]
    assert theirs.model is lookup.model is ours
    assert theirs.run(prompt(), 8).tokens == plain.run(prompt(), 8).tokens
    assert measure_llama_costs(theirs.llama, 20).dtype == "Q8_0"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {}, "for llama and mixtral models alone, and this is a qwen3 model"),
        ("llama", {"hidden_act": "gelu"}, "no activation gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rotary angles are scaled",
        ),
        ("llama", {}, "GGUF has no float64"),
    ],
)
def test_a_model_that_it_is_not_written_for_is_refused(
    tmp_path: Path, family: str, changes: dict, reason: str
) -> None:
    model = new_hf_model(family, **changes)
    assert reason in str(unsupported_reason(model))
    with pytest.raises(DecodeError, match=f"llama.cpp cannot take part: .*{reason}"):
        write_gguf(model, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_without_its_packages_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "llama_cpp":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        DecodeError, match=r"needs llama-cpp-python: .*pip install 'skipsearch\[llama-cpp\]'"
    ):
        make_systems(["llama-cpp"], "hf", None, lambda engine: demo())


@pytest.mark.thorough
def test_a_draft_model_drafts_for_llama_cpp_through_its_own_interface(tmp_path: Path) -> None:
    """llama.cpp verifies what our decoder drafts with a second file; its text stays the same."""
    llama_cpp = pytest.importorskip("llama_cpp", minversion="0.3.36")
    from llama_cpp.llama_speculative import LlamaDraftModel

    vocabulary = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB}
    full, small = tmp_path / "full.gguf", tmp_path / "small.gguf"
    write_model(tiny_llama().float(), full, "F32", metadata=vocabulary)
    write_model(tiny_llama().float(), small, "Q4_0", metadata=vocabulary)
    decoder = Decoder(ss.load_model(small, engine="native"))
    lengths = list[int]()

    class OurDrafts(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            lengths.append(len(input_ids))
            return np.array(decoder.generate(input_ids.tolist(), 4).tokens, dtype=np.intc)

    def write_text(draft_model: Any) -> list[int]:
        settings: dict[str, Any] = {"n_ctx": 128, "n_threads": 1, "logits_all": True}
        llama = llama_cpp.Llama(str(full), verbose=False, draft_model=draft_model, **settings)
        return [*islice(llama.generate([5, 17, 40, 3], temp=0.0, repeat_penalty=1.0), 32)]

    assert write_text(OurDrafts()) == write_text(None)
    gains = {later - earlier for earlier, later in pairwise(lengths)}
    assert max(gains) > 1, "some drafts were accepted"
    assert min(gains) < 5, "some were rejected"
