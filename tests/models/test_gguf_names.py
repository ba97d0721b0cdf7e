"""Names of GGUF files: a file is one by how it begins, whatever its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gguf_files
from helpers.command import run_in_process
from helpers.gguf_files import write_model

import skipsearch as ss
from models.test_gguf import MODELS, make_model
from models.tiny import new_hf_model
from skipsearch.cli.open_model import ProfileSearch, find_auto_dtype
from skipsearch.errors import ModelError
from skipsearch.models.loading import placement
from skipsearch.models.loading.gguf_file import GGUFError, GGUFMatrix
from skipsearch.models.loading.gguf_model import identify_gguf, is_gguf, open_gguf
from skipsearch.models.loading.shipped_heads import ships_draft_head

NAMES = ("sha256-0123abcd", "model", "Model-1.5B.Q8_0", "MODEL.GGUF", "model.bin")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(new_hf_model("llama", mlp_bias=False).float(), path, "F32")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_name_is_a_gguf_file_if_it_begins_like_one(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.symlink_to(tiny)
    assert is_gguf(str(path))
    assert identify_gguf(str(path))[0] == (name if name != "MODEL.GGUF" else "MODEL")


def test_a_blob_is_loaded_diagnosed_and_searched_for_draft_heads(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "sha256-0123abcd"
    blob.write_bytes(tiny.read_bytes())
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert ss.load_model(str(blob), device="cpu", engine="hf").spec.family == "llama"
    assert not ships_draft_head(str(blob), 4)
    assert find_auto_dtype(str(blob), ProfileSearch("pycode", tmp_path), "cpu") == "auto"
    code, printed, _ = run_in_process(
        capsys, monkeypatch, "doctor", "--model", str(blob), "--device", "cpu", "--json"
    )
    assert code == 0
    assert "sha256-0123abcd" in printed


QWEN = {
    "general.basename": "Qwen2.5-Coder",
    "general.size_label": "1.5B",
    "general.finetune": "Instruct",
    "general.name": "Qwen2.5 Coder 1.5B Instruct",
}


@pytest.mark.parametrize(
    ("name", "metadata", "model"),
    [
        ("c.gguf", QWEN, "Qwen2.5-Coder-1.5B-Instruct"),
        ("qwen.gguf", QWEN, "Qwen2.5-Coder-1.5B-Instruct"),
        ("sha256-0123", QWEN, "Qwen2.5-Coder-1.5B-Instruct"),
        # Names that tell the model are kept, and with them what they say of quantization.
        ("qwen2.5-coder-1.5b-q4_k_m.gguf", QWEN, "qwen2.5-coder-1.5b-q4_k_m"),
        ("Qwen2.5_Coder.Q4_1", QWEN, "Qwen2.5_Coder.Q4_1"),
        ("c", {"general.name": "Some Model 1B"}, "Some-Model-1B"),
        ("c", {"general.basename": "a", "general.size_label": "/etc"}, "a"),
        # What is no plain text is no name.
        ("c", {"general.basename": "org/model"}, "c"),
        ("c", {"general.basename": "a\x1b[2J"}, "c"),
        ("c", {"general.basename": 7}, "c"),
        ("c", {}, "c"),
    ],
)
def test_a_file_whose_name_does_not_tell_the_model_is_named_by_its_metadata(
    name: str, metadata: dict[str, Any], model: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write_model(new_hf_model("llama", mlp_bias=False).float(), path, metadata=metadata)
    assert identify_gguf(str(path))[0] == model


def test_other_files_and_folders_are_no_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "weights").write_bytes(b"GGU")
    for name in ("folder.gguf", "weights", "missing", "a\0b", "~no-such-user/x"):
        assert not is_gguf(str(tmp_path / name) if name[0] != "~" else name), name
    with pytest.raises(ModelError, match="is a file, and no GGUF file; give the folder"):
        ss.load_model(str(tmp_path / "weights"), device="cpu")
    (tmp_path / "damaged.gguf").write_bytes(b"GGU")  # its name says what it is meant to be
    with pytest.raises(GGUFError, match="does not begin with the letters GGUF"):
        ss.load_model(str(tmp_path / "damaged.gguf"), device="cpu")


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")],
)
def test_the_text_part_of_a_model_that_sees_is_a_model_of_text(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_files.ARCHITECTURES, family, architecture)
    reference, tokens = make_model(family), torch.tensor([[3, 9, 4, 1, 22]])
    sections = {f"{architecture}.rope.dimension_sections": [4, 2, 2, 0]}
    write_model(reference, tmp_path / "m.gguf", metadata=sections)
    opened = open_gguf(str(tmp_path / "m.gguf"), torch.float32)
    assert opened.spec.family == family
    torch.testing.assert_close(opened.model(tokens).logits, reference(tokens).logits)


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    """Its towers for images are passed over, and so are its other parts."""
    for name in ("model", "split"):
        (tmp_path / name).mkdir()
    model = new_hf_model("llama", mlp_bias=False).float()
    write_model(model, tmp_path / "model" / "a.gguf", "F32")
    write_model(model, tmp_path / "split" / "a.gguf", "F32", shards=8)
    for folder in ("model", "split"):
        (tmp_path / folder / "mmproj-a.gguf").write_bytes(b"GGUF")
        loaded = ss.load_model(str(tmp_path / folder), device="cpu", engine="hf", dtype="float32")
        assert loaded.spec.family == "llama"
    (tmp_path / "model" / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 GGUF models: name one, such as .*a\.gguf"):
        ss.load_model(str(tmp_path / "model"), device="cpu")


@pytest.mark.parametrize("engine", ["hf", "lean", "native"])
def test_a_file_larger_than_memory_is_refused_before_a_matrix_is_read(
    engine: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "available_host_memory", lambda: 50_000)
    monkeypatch.setattr(GGUFMatrix, "dequantize_rows", None)  # would fail
    with pytest.raises(ModelError, match=r"needs .* MB .* free: "):
        ss.load_model(str(tiny), device="cpu", engine=engine, dtype="float32")


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_identified_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    spec = open_gguf(str(tmp_path / "m.gguf"), torch.float32).spec
    known = spec.id, spec.family, spec.n_layers, spec.quantization
    assert identify_gguf(str(tmp_path / "m.gguf")) == known
