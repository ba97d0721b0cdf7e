"""`load_decoder`: the model of a profile, loaded as the profile was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import skipsearch as ss
from skipsearch.core.machine import describe_machine
from skipsearch.profile import Profile, load_profile, save_profile

BUNDLED = Path(ss.__file__).parent / "demo" / "profiles" / "demo" / "pycode"


def bundled(**changes: Any) -> Profile:
    """Return a profile of the embedded model, as if it was measured on this CPU."""
    profile = load_profile(next(iter(sorted(BUNDLED.glob("*.yaml")))))
    assert profile.hardware is not None
    hardware = profile.hardware.model_copy(
        update={"kind": "cpu", "name": describe_machine(torch.device("cpu")).name}
    )
    of_model = {name: changes.pop(name) for name in ("dtype", "quantization") if name in changes}
    model = profile.model.model_copy(update=of_model)
    return profile.model_copy(update={"hardware": hardware, "model": model, **changes})


def test_the_decoder_of_a_profile_drafts_and_writes_what_the_model_writes(tmp_path: Path) -> None:
    save_profile(bundled(), tmp_path / "profile.yaml")
    decoder = ss.load_decoder(tmp_path / "profile.yaml")
    assert (decoder.model.spec.id, decoder.model.spec.dtype_name) == ("demo", "float32")
    assert decoder.recipe == bundled().recipe
    prompts = [decoder.model.tokenizer(text)["input_ids"] for text in ("def main(", "import os\n")]
    texts = [decoder.generate(prompt, 96) for prompt in prompts]
    plain = ss.Decoder(decoder.model)
    assert [text.tokens for text in texts] == [plain.generate(p, 96).tokens for p in prompts]
    accepted, drafted = (
        sum(getattr(text.stats, name) for text in texts) for name in ("accepted", "drafted")
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("engine", ["hf", "lean", "native"])
def test_it_has_the_engine_dtype_and_quantization_of_the_profile(engine: str) -> None:
    decoder = ss.load_decoder(bundled(engine=engine, dtype="bfloat16"), device="cpu")
    assert (decoder.model.spec.engine, decoder.model.spec.dtype_name) == (engine, "bfloat16")
    if engine == "native":
        rounded = bundled(engine=engine, quantization="native-6bit")
        assert ss.load_decoder(rounded, device="cpu").model.spec.quantization == "native-6bit"


def test_what_is_not_possible_here_is_left_open_with_a_warning(tmp_path: Path) -> None:
    decoder = ss.load_decoder(bundled(engine="graph"), device="cpu")
    assert decoder.model.spec.engine in ("native", "lean")
    assert any("engine graph" in warning for warning in decoder.warnings)
    profile = bundled(dtype="bfloat16")
    assert profile.hardware is not None
    on_gpu = profile.hardware.model_copy(update={"kind": "cuda"})
    elsewhere = ss.load_decoder(profile.model_copy(update={"hardware": on_gpu}), device="cpu")
    assert elsewhere.model.spec.dtype_name == "float32"


def test_a_model_that_is_not_known_here_is_named_by_the_caller(tmp_path: Path) -> None:
    profile = bundled()
    moved = profile.model.model_copy(update={"id": "my-model", "weights_sha256": "0" * 64})
    profile = profile.model_copy(update={"model": moved})
    with pytest.raises(ss.ProfileError, match="my-model"):
        ss.load_decoder(profile)
    assert ss.load_decoder(profile, model="demo").model.spec.id == "demo"


@pytest.mark.parametrize("wrong", [None, 5, ss.SkipMask(2)], ids=str)
def test_what_is_no_profile_is_refused(wrong: Any) -> None:
    with pytest.raises(ss.ProfileError, match="load_profile"):
        ss.load_decoder(wrong)
