"""Draft heads that a checkpoint ships: loading, drafts, replay, and the search's use of them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from decoding.shipped_checks import (
    BRIEF,
    PROMPTS,
    SHIPPED,
    check_shipped_drafts,
    check_shipped_law,
    shipped_world,
)
from helpers.shipped_heads import FAMILIES, draft_by_definition, save_checkpoint_with_head
from helpers.tiny import tiny_model_and_reference
from safetensors.torch import load_file, save_file

from skipsearch.core.reading import READ_ALL
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.mtp.shipped import load_head_of, ships_loadable_head
from skipsearch.errors import DecodeError, ModuleError
from skipsearch.models import adapt
from skipsearch.models.loading.loader import load_adapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.simulate import simulate_rounds
from skipsearch.replay.trained_replay import load_shipped_draft
from skipsearch.tuning.calibration import load_shipped_drafts

STEPS = 4
params = [
    pytest.param(name, marks=[] if name in BRIEF else pytest.mark.thorough) for name in FAMILIES
]


@pytest.mark.parametrize("family", params)
def test_drafts_follow_the_definition(family: str) -> None:
    check_shipped_drafts([family])


@pytest.mark.parametrize("siblings", [None, Siblings(below=1.0, most=1)])
def test_sampled_texts_have_the_full_models_probabilities(siblings: Siblings | None) -> None:
    check_shipped_law(siblings)


def test_siblings_need_a_model_without_recurrent_layers() -> None:
    spec = SHIPPED.model_copy(update={"siblings": Siblings(below=1.0, most=2)})
    model, _ = shipped_world("deepseek_v3")
    with_siblings = Decoder(model, Recipe((spec,))).generate(PROMPTS[0], 16)
    assert with_siblings.tokens == Decoder(model).generate(PROMPTS[0], 16).tokens
    recurrent, _ = shipped_world("qwen3_5_text")
    with pytest.raises(DecodeError, match="siblings"):
        Decoder(recurrent, Recipe((spec,)))


@pytest.mark.parametrize("family", BRIEF)
def test_replay_accepts_what_rounds_of_decoding_accept(family: str) -> None:
    model, reference = shipped_world(family)
    replay, total = Replay(model, PROMPTS, 12, None), DecodeStats()
    draft = load_shipped_draft(model)
    [rounds] = draft.replay_rounds(replay, [READ_ALL])
    expected = []
    for prompt, text in zip(PROMPTS, replay.continuations, strict=True):
        for start in range(len(text) - 1):
            following = text[start + 1 : start + 1 + STEPS]
            known = [*prompt, *text[: start + 1]]
            drafted = draft_by_definition(reference, known, len(following))
            matches = [a == b for a, b in zip(drafted, following, strict=True)]
            expected.append((*matches, False).index(False))
    assert rounds.accepted_len.clip(max=STEPS).tolist() == expected
    decoder = Decoder(model, Recipe((draft.make_spec(DraftPolicy(STEPS), READ_ALL),)))
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 12).stats
    counted, _ = simulate_rounds(rounds, DraftPolicy(STEPS))
    assert (counted.rounds, counted.accepted) == (total.rounds, total.accepted)
    assert 0 < total.accepted < total.drafted


@pytest.mark.parametrize("family", BRIEF)
def test_a_search_weighs_the_head_and_the_config_stays_as_it_was(
    family: str, tmp_path: Path
) -> None:
    save_checkpoint_with_head(family, tmp_path)
    model = load_adapter(str(tmp_path), device="cpu", dtype="float64", engine="hf")
    before = model.model.config.to_dict()  # type: ignore[attr-defined]
    [draft] = load_shipped_drafts(model, lambda event: None)
    assert (draft.kind, draft.ref) == ("mtp", None)
    assert model.model.config.to_dict() == before  # type: ignore[attr-defined]
    assert load_head_of(model).module is load_head_of(model).module
    watched = weakref.ref(model)
    del model, draft
    gc.collect()
    assert watched() is None, "the loaded head does not keep the model alive"


def test_models_without_a_head_are_refused_in_one_sentence(tmp_path: Path) -> None:
    llama, _ = tiny_model_and_reference()
    assert not ships_loadable_head(llama)
    with pytest.raises(ModuleError, match="a llama model"):
        Decoder(llama, Recipe((SHIPPED,)))
    reference = save_checkpoint_with_head("deepseek_v3", tmp_path)
    in_memory = adapt(reference)
    assert not ships_loadable_head(in_memory)
    assert load_shipped_drafts(in_memory, lambda event: None) == []


@pytest.mark.parametrize("damage", ["missing", "wrong shape"])
def test_a_damaged_head_is_refused_and_a_search_goes_on_without_it(
    damage: str, tmp_path: Path
) -> None:
    save_checkpoint_with_head("qwen3_5_text", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    projection = tensors.pop("mtp.fc.weight")
    if damage == "wrong shape":
        tensors["mtp.fc.weight"] = torch.zeros(3, *projection.shape[1:])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_adapter(str(tmp_path), device="cpu", dtype="float64", engine="hf")
    with pytest.raises(ModuleError, match="cannot be loaded"):
        load_head_of(model)
    events = list[object]()
    assert load_shipped_drafts(model, events.append) == []
    assert len(events) == 1
