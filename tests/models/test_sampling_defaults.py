"""The sampling that a model's author recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_files import write_model

from models.tiny import new_hf_model
from skipsearch.engine import load_model
from skipsearch.models import adapt
from skipsearch.models.loading.gguf_file import read_gguf
from skipsearch.models.loading.sampling_defaults import GGUF_KEYS, read_from_gguf

RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (RECOMMENDED | {"do_sample": True}, RECOMMENDED),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "top_k": 1, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
        ({"max_new_tokens": 5, "temperature": None}, {}),
    ],
    ids=str,
)
def test_a_folder_names_it_in_its_generation_config(
    named: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    new_hf_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert load_model(str(tmp_path), device="cpu", engine="lean").spec.sampling_defaults == expected


def test_a_gguf_file_names_it_in_its_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(new_hf_model("llama-tied"), file, "F32")
    metadata = read_gguf(file).metadata
    assert read_from_gguf(metadata) == {}
    named = {GGUF_KEYS[name]: value for name, value in RECOMMENDED.items()}
    named["general.sampling.temp"] = 0.699999988079071  # 0.7 as float32
    assert read_from_gguf(metadata | named) == RECOMMENDED


def test_a_model_that_names_none_has_none() -> None:
    assert adapt(new_hf_model("llama"), None).spec.sampling_defaults == {}
