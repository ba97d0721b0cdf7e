"""`skipsearch doctor --model`: the family, the checks and the engine of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import cmd, run_in_process
from helpers.gguf_files import write_model
from helpers.tiny import tiny_llama
from models.every_class import build
from models.tiny import new_hf_model

from skipsearch.cli import doctor
from skipsearch.engine import native
from skipsearch.engine.native import build as native_build


@pytest.fixture(autouse=True)
def _the_installation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation has a test of its own, in `test_commands.py`."""
    monkeypatch.setattr(doctor, "_CHECKS", {})


def looked_at(capsys: Any, monkeypatch: Any, model: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status, printed, _ = run_in_process(
        capsys, monkeypatch, *cmd("doctor --model {} --device cpu --json", model)
    )
    return status, json.loads(printed)


def test_the_embedded_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = looked_at(capsys, monkeypatch, "demo")
    assert (status, found["healthy"]) == (0, True)
    assert found["read as"] == "by the row llama of the table of families"
    assert found["checked"].startswith(
        "logits match the model's own forward (whole, layer by layer, in pieces, after a rollback, "
        "after half a rollback, with siblings, "
    )
    assert "(limit 2e-03; with one key hidden on purpose " in found["checked"]
    assert found["next"] == "skipsearch tune --model demo --task pycode, or prompts.jsonl"


def test_the_engine_is_what_auto_would_take_and_nothing_is_built_for_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> str:
        return str(looked_at(capsys, monkeypatch, "demo")[1]["engine"])

    monkeypatch.setattr(native_build, "compile_library", lambda *_: pytest.fail("built"))
    monkeypatch.setattr(native, "cached_library", lambda: None)
    monkeypatch.delenv("SKIPSEARCH_NATIVE", raising=False)
    monkeypatch.setenv("CXX", "g++")
    assert engine() == "native (C++, built once for this CPU)"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine() == "lean; native cannot: there is no C++ compiler: install g++"
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert engine() == "lean: SKIPSEARCH_NATIVE=0 forbids native"


def test_a_model_without_a_row_and_one_without_fused_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build("arcee").save_pretrained(tmp_path / "arcee")
    found = looked_at(capsys, monkeypatch, tmp_path / "arcee")[1]
    assert found["read as"] == "by structure: layers at model.layers, attention self_attn, MLP mlp"
    assert (
        found["engine"]
        == "hf: arcee models have no row in the table of families, so their own forward drives them"
    )
    assert found["chat template"] == "it has no tokenizer, so it takes token ids only"
    new_hf_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert (
        "since gpt2 models are not of its shape"
        in looked_at(capsys, monkeypatch, tmp_path / "gpt2")[1]["engine"]
    )


def test_a_gguf_file_was_checked_on_the_engine_native(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    write_model(new_hf_model("llama", mlp_bias=False, **wide).float(), tmp_path / "m.gguf", "Q4_0")
    status, findings = looked_at(capsys, monkeypatch, tmp_path / "m.gguf")
    assert (status, findings["healthy"]) == (0, True)
    assert findings["model"] == "m (llama, 3 layers) as gguf-q4_0 on cpu"
    assert findings["checked"].startswith("logits match the model's own forward")
    assert findings["engine"] == "native (C++, built once for this CPU)"


def test_a_model_that_is_refused_says_why_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    status, found = looked_at(capsys, monkeypatch, tmp_path)
    assert (status, found["healthy"]) == (1, False)
    assert "an encoder feeds its decoder" in found["model"]


def test_a_mixture_of_experts_says_what_a_token_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_hf_model("mixtral").save_pretrained(tmp_path / "mixtral")
    found = looked_at(capsys, monkeypatch, tmp_path / "mixtral")[1]
    assert found["experts"].startswith("it reads 2 of 4 experts a token, and ")
    assert "experts" not in looked_at(capsys, monkeypatch, "demo")[1]


def test_a_folder_of_16_bits_on_a_cpu_is_advised_to_stay_in_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_hf_model("llama").bfloat16().save_pretrained(tmp_path / "half")
    new_hf_model("llama").float().save_pretrained(tmp_path / "single")
    half = looked_at(capsys, monkeypatch, tmp_path / "half")[1]
    assert "half of that with --dtype bfloat16" in half["memory"]
    assert f"--model {tmp_path / 'half'} --dtype bfloat16 --task" in half["next"]
    single = looked_at(capsys, monkeypatch, tmp_path / "single")[1]
    assert "--dtype" not in single["memory"] + single["next"]


def test_a_draft_model_says_what_it_takes_or_why_it_cannot_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    write_model(tiny_llama().float(), tmp_path / "other.gguf", "F32")
    found = {}
    for name in ("demo", tmp_path / "other.gguf"):
        capsys.readouterr()
        _, printed, _ = run_in_process(
            capsys,
            monkeypatch,
            *cmd("doctor --model demo --draft-model {} --device cpu --json", name),
        )
        found[str(name)] = json.loads(printed)
    line = found["demo"]["draft model"]
    assert "shared tokens" in line
    assert "100 % of what the model reads" in line
    refused = found[str(tmp_path / "other.gguf")]
    assert not refused["healthy"]
    assert refused["model"].startswith("FAILED: other cannot draft for demo: one of both has no ")
