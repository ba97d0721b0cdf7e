"""Kangaroo's adapter: what it computes, on every engine, in training and in replay."""

from __future__ import annotations

import pytest
import torch
from decoding.kangaroo_checks import (
    by_definition,
    check_kangaroo_drafts,
    check_kangaroo_restricted,
    check_kangaroo_side_by_side,
)
from decoding.training_checks import check_kangaroo_rows
from helpers.marks import engine_params
from helpers.modules import (
    adapter_tensors,
    make_early_exit_card,
    module_folder,
    save_kangaroo,
    small_kangaroo,
)
from helpers.tiny import LAYERS, FullModel, tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.reading import READ_ALL, Reading, Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft, build_early_exit, predict_text
from skipsearch.errors import MaskError, ModuleError
from skipsearch.models import adapt
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.simulate import simulate_rounds as walk_rounds
from skipsearch.replay.trained_replay import load_trained_draft
from skipsearch.training.students import KangarooStudent
from skipsearch.training.trainer import Trainer, TrainSettings

TEXT = [5, 17, 40, 3, 22, 5, 17, 9]
PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))


@torch.no_grad()
@pytest.mark.parametrize("form", ["attention", "layer"])
@pytest.mark.parametrize("engine", ["hf", "lean", "graph", "native"])
def test_every_engine_computes_the_adapter_that_the_definition_names(
    engine: str, form: str
) -> None:
    spec = small_kangaroo(form)
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    found = predict_text(
        build_early_exit(
            model, make_early_exit_card(model, 2, form), adapter_tensors(model, 2, form, 0.1), "x"
        ),
        TEXT,
    )
    for n in (1, 4, 8):
        torch.testing.assert_close(
            found[n - 1], by_definition(full, spec, TEXT[:n]), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("engine", engine_params("native", thorough=("lean", "graph")))
def test_drafts_follow_the_definition_on_every_engine(engine: str) -> None:
    with use_engine(engine):
        check_kangaroo_drafts(("attention",))
        check_kangaroo_restricted()
        check_kangaroo_side_by_side()


@torch.no_grad()
def test_an_adapter_that_adds_nothing_behind_all_layers_with_the_models_norm_is_the_model() -> None:
    with use_engine("hf"):
        model, full = tiny_model_and_reference()
    tensors = adapter_tensors(model, LAYERS - 1, "attention", 0.0)
    tensors["adapter.attn.run.o_proj.weight"].zero_()
    early = build_early_exit(
        model, make_early_exit_card(model, LAYERS - 1, "attention"), tensors, "x"
    )
    whole = EarlyExitDraft(model, early.adapter, LAYERS, "attention")
    torch.testing.assert_close(
        predict_text(whole, TEXT),
        full.hf(torch.tensor([TEXT]), use_cache=False).logits[0],
        rtol=0,
        atol=1e-6,
    )


def test_an_engine_of_whole_passes_reads_the_prompt_again_below_the_exit_and_then_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with use_engine("graph"):
        model, _ = tiny_model_and_reference()
    rows = list[int]()
    real = EarlyExitDraft.compute_features

    def counted(
        self: EarlyExitDraft, tokens: torch.Tensor, cache: object, plan: object
    ) -> torch.Tensor:
        rows.append(tokens.shape[1])
        return real(self, tokens, cache, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(EarlyExitDraft, "compute_features", counted)
    stats = (
        Decoder(
            model, Recipe((small_kangaroo("attention", 0.1, 3),)), module_folders=[module_folder()]
        )
        .generate(TEXT, 30)
        .stats
    )
    assert len(rows) == stats.drafted
    assert rows[0] == len(TEXT) + 1, "the prompt, and the token that the prefill chose"
    assert set(rows[1:]) == {1, 2}


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_replay_counts_what_decoding_counts(threshold: float) -> None:
    model, _ = tiny_model_and_reference()
    spec = small_kangaroo("attention", 0.1, 4, threshold)
    replay, total = Replay(model, PROMPTS, 24, 6), DecodeStats()
    decoder = Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    draft = load_trained_draft(model, spec.module, [module_folder()])
    found, _ = walk_rounds(
        draft.replay_rounds(replay, [READ_ALL])[0], DraftPolicy(4, Confidence(threshold=threshold))
    )
    assert found.accepted == total.accepted
    assert found.rounds == total.rounds
    if threshold == 0.0:  # drafts wasted behind a mismatch are estimated where a policy reads them
        assert found.drafted == total.drafted
    assert draft.make_spec(DraftPolicy(4, Confidence(threshold=threshold)), READ_ALL) == spec


def test_replay_with_a_vocabulary_counts_what_rounds_of_one_token_draft() -> None:
    """A longer round does not know its own tokens; replay counts them as known."""
    model, _ = tiny_model_and_reference()
    vocabulary, total = Vocabulary(lowest=30, tokens=""), DecodeStats()
    spec = small_kangaroo("attention", 0.1, 1).model_copy(update={"vocabulary": vocabulary})
    decoder = Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    draft = load_trained_draft(model, spec.module, [module_folder()])
    replay = Replay(model, PROMPTS, 24, 6)
    with_all, with_few = draft.replay_rounds(replay, [READ_ALL, Reading(vocabulary=vocabulary)])
    counted, _ = walk_rounds(with_few, DraftPolicy(1))
    assert (counted.rounds, counted.drafted, counted.accepted) == (
        total.rounds,
        total.drafted,
        total.accepted,
    )
    assert 0 < counted.accepted < counted.drafted
    assert with_few.accepted_len.sum() < with_all.accepted_len.sum()


def test_a_row_of_training_is_what_decoding_drafts_from() -> None:
    check_kangaroo_rows()


def test_training_brings_the_adapter_closer_to_the_model() -> None:
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
    assert isinstance(model, HFAdapter)
    random = torch.randint(
        64, (16, 20), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    settings, losses = TrainSettings(steps=30, seconds=None, batch_size=8, top_k=16), list[float]()
    trainer = Trainer(KangarooStudent(model, 2, "layer"), random, settings)
    trainer.run(on_progress=lambda step: losses.append(step.loss))
    assert losses[-1] < losses[0]
    for name, tensor in trainer.export_tensors().items():
        assert not torch.equal(tensor, adapter_tensors(model, 2, "layer", 0.0)[name]), name


def test_an_adapter_of_another_layer_form_kind_or_model_is_refused() -> None:
    model, _ = tiny_model_and_reference()
    spec = small_kangaroo()
    with pytest.raises(
        ModuleError, match="trained for layer 2, and the recipe leaves the model at layer 3"
    ):
        spec.model_copy(update={"exit_layer": 3}).build(model, [module_folder()])
    with pytest.raises(MaskError):
        spec.model_copy(update={"exit_layer": LAYERS}).build(model, [module_folder()])
    tensors = adapter_tensors(model, 2, "layer", 0.0)
    with pytest.raises(ModuleError, match="an adapter of the form attention has attn"):
        build_early_exit(model, make_early_exit_card(model, 2, "attention"), tensors, "x")
    del tensors["norm.weight"]
    with pytest.raises(ModuleError, match="norm before the head"):
        build_early_exit(model, make_early_exit_card(model, 2, "layer"), tensors, "x")
    other = adapt(tiny_llama(layers=LAYERS, hidden=16))
    with pytest.raises(ModuleError, match="does not fit"):
        build_early_exit(
            other,
            make_early_exit_card(model, 2, "attention"),
            adapter_tensors(model, 2, "attention", 0.0),
            "x",
        )


def test_an_exit_that_the_model_ends_at_is_no_early_exit() -> None:
    hf = tiny_llama(layers=3)
    model, full = adapt(hf), FullModel(hf)
    spec = save_kangaroo(model, 2, "attention", 0.2, "deep.safetensors", 3)
    found = Decoder(model, Recipe((spec,)), module_folders=[module_folder()]).generate(TEXT, 16)
    assert found.tokens == full.greedy(TEXT, 16)
