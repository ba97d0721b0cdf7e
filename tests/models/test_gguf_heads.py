"""Draft heads in GGUF files, whose tensors are named `nextn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.shipped_checks import PROMPTS, SHIPPED, check_drafts_of
from helpers.gguf_files import ARCHITECTURES, NORMS_PLUS_ONE, write_model
from helpers.marks import thorough
from helpers.shipped_heads import save_checkpoint_with_head

import skipsearch as ss
from models.test_gguf import check_greedy
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.mtp.shipped import load_head_of, ships_loadable_head
from skipsearch.engine.native.packed_modules import PackedLinear
from skipsearch.errors import ModuleError
from skipsearch.models.loading.shipped_heads import ships_draft_head
from skipsearch.tuning.calibration import load_shipped_drafts

FAMILIES = ("qwen3_5_text", "glm4_moe", *thorough("deepseek_v3", "qwen3_next", "qwen3_5_moe_text"))
# Names of the head's own tensors in a file.
NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head_norm"}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32}  # fmt: skip


def write_file_with_head(
    family: str, folder: Path, number_format: str = "F32", without: str = "", **more: Any
) -> Any:
    """Write folder/m.gguf, and return transformers' model, as `save_checkpoint_with_head` does.

    without: one of the head's own tensors, which the file lacks.
    """
    reference = save_checkpoint_with_head(family, folder, **more)
    n, name = reference.config.num_hidden_layers - 1, ARCHITECTURES[family]
    own = {
        f"blk.{n}.nextn.{NAMES[key]}.weight": tensor.float()
        + (key != "eh_proj" and name in NORMS_PLUS_ONE)
        for key, tensor in reference.head_tensors.items()
        if key != without
    }
    counts = {f"{name}.nextn_predict_layers": 1}
    write_model(reference, folder / "m.gguf", number_format, metadata=counts, extra=own)
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_follow_the_definition(family: str, tmp_path: Path) -> None:
    reference = write_file_with_head(family, tmp_path)
    path = str(tmp_path / "m.gguf")
    model = ss.load_model(path, device="cpu", engine="hf", dtype="float32")
    n_layers = reference.config.num_hidden_layers - 1
    assert model.spec.n_layers == n_layers
    assert ships_draft_head(path, n_layers)
    assert ships_loadable_head(model)
    stats = check_drafts_of(model, reference)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_stays_in_its_blocks_and_changes_no_token(family: str, tmp_path: Path) -> None:
    write_file_with_head(family, tmp_path, "Q8_0", **WIDE)
    model = ss.load_model(str(tmp_path / "m.gguf"), device="cpu", dtype="float32")
    assert model.spec.engine == "native"
    head = load_head_of(model)
    assert isinstance(head.module.layers[0].eh_proj, PackedLinear)
    assert isinstance(head.module.layers[0].mtp_block.self_attn.o_proj, PackedLinear)
    drafted = accepted = 0
    for prompt in PROMPTS:
        plain = Decoder(model).generate(prompt, 24, ignore_eos=True)
        text = Decoder(model, Recipe((SHIPPED,))).generate(prompt, 24, ignore_eos=True)
        assert text.tokens == plain.tokens
        drafted, accepted = drafted + text.stats.drafted, accepted + text.stats.accepted
    assert 0 < accepted < drafted
    assert load_shipped_drafts(model, lambda event: None)


def test_a_head_without_a_norm_has_that_of_the_model(tmp_path: Path) -> None:
    reference = write_file_with_head("qwen3_5_text", tmp_path, without="norm")
    reference.head_tensors["norm"] = reference.model.norm.weight.detach()
    path = str(tmp_path / "m.gguf")
    model = ss.load_model(path, device="cpu", engine="hf", dtype="float32")
    assert check_drafts_of(model, reference).drafted > 0


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_file_with_head("glm4_moe", tmp_path, without="hnorm")
    path = str(tmp_path / "m.gguf")
    model = ss.load_model(path, device="cpu", engine="hf", dtype="float32")
    with pytest.raises(ModuleError, match=r"has no tensor blk\.2\.nextn\.hnorm"):
        load_head_of(model)
    prompt = torch.tensor([PROMPTS[0]])
    greedy = model.model.generate(  # type: ignore[attr-defined]
        prompt, max_new_tokens=24, do_sample=False, eos_token_id=-1
    )[0, prompt.shape[1] :].tolist()
    check_greedy(model, list(PROMPTS[0]), greedy)


def test_a_file_without_a_head_ships_none(tmp_path: Path) -> None:
    write_file_with_head("glm4_moe", tmp_path, without="eh_proj")
    model = ss.load_model(str(tmp_path / "m.gguf"), device="cpu", engine="hf", dtype="float32")
    assert not ships_loadable_head(model)
    with pytest.raises(ModuleError, match=r"has no tensors of a draft head\): draft without it"):
        load_head_of(model)


def test_a_head_changes_no_weight_of_the_model(tmp_path: Path) -> None:
    write_file_with_head("qwen3_5_text", tmp_path)
    path = str(tmp_path / "m.gguf")
    model: Any = ss.load_model(path, device="cpu", engine="hf", dtype="float32")
    before = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    load_head_of(model)
    after = model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
