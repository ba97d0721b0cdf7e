"""S3D's trained part: what one pass drafts, in decoding, training and replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding.s3d_checks import (
    TREE,
    by_definition,
    check_s3d_drafts,
    check_s3d_names_tokens,
    check_s3d_restricted,
)
from decoding.training_checks import MIDDLE as MASK
from decoding.training_checks import check_s3d_rows, model_here
from decoding.training_checks import s3d_card as card
from helpers.marks import engine_params
from helpers.modules import module_folder, noisy_low_rank_changes, save_s3d, small_s3d
from helpers.tiny import LAYERS, use_engine
from pydantic import ValidationError

from skipsearch.core.cost_model import Costs, OnePassDraftCosts
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.s3d.spec import DraftTree
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS, build_multi_token, load_multi_token
from skipsearch.errors import ModuleError
from skipsearch.replay.parallel_draft import DraftRanks, replay_parallel_draft
from skipsearch.replay.replay import Replay
from skipsearch.replay.simulate import simulate_rounds
from skipsearch.replay.trained_replay import load_trained_draft
from skipsearch.training.students import S3DStudent
from skipsearch.training.trainer import Trainer, TrainSettings

CHAIN = DraftTree(parents=(0, 1, 2, 3), ranks=(0,) * 4)
PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))


@pytest.mark.parametrize("engine", engine_params("native", thorough=("hf", "lean", "graph")))
def test_drafts_follow_the_definition_on_every_engine(engine: str) -> None:
    with use_engine(engine):
        check_s3d_drafts()
        check_s3d_restricted()


def test_one_row_of_a_model_that_skips_nothing_is_the_model() -> None:
    model = model_here()
    spec = save_s3d(model, SkipMask(LAYERS), None, "whole.safetensors").model_copy(
        update={"draft_length": 1}
    )
    stats = (
        Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
        .generate(PROMPTS[0], 20)
        .stats
    )
    assert stats.accepted == stats.drafted > 0


def test_a_row_of_training_is_the_row_of_the_pass_that_decoding_runs_there() -> None:
    check_s3d_rows()


def test_no_draft_names_what_stands_for_an_unknown_token() -> None:
    check_s3d_names_tokens()


@pytest.mark.parametrize("rank", [None, 4])
def test_training_teaches_the_embeddings_and_leaves_the_model_alone(rank: int | None) -> None:
    model = model_here()
    before = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    texts = torch.randint(
        64, (16, 20), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    trainer = Trainer(
        S3DStudent(model, MASK, 4, rank),
        texts,
        TrainSettings(steps=40, seconds=None, batch_size=8, learning_rate=1e-2, top_k=16),
    )
    losses = []
    first = trainer.export_tensors()[MASK_EMBEDDINGS].clone()
    for run in (lambda: None, trainer.run):
        run()
        losses.append(
            trainer.accumulate_gradients(trainer.student.run_teacher(texts.long(), 16), 0)[0]
        )
        trainer.optimizer.zero_grad()
    assert losses[1] < losses[0]
    assert not torch.equal(trainer.export_tensors()[MASK_EMBEDDINGS], first)
    for name, weight in model.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("vocabulary", [None, Vocabulary(lowest=40, tokens="")])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_replay_counts_what_decoding_counts(length: int, vocabulary: Vocabulary | None) -> None:
    model, total = model_here(), DecodeStats()
    spec = small_s3d().model_copy(update={"vocabulary": vocabulary})
    decoder = Decoder(
        model,
        Recipe((spec.model_copy(update={"draft_length": length}),)),
        module_folders=[module_folder()],
    )
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    draft = load_trained_draft(model, spec.module, [module_folder()])
    found, _ = simulate_rounds(
        draft.replay_rounds(Replay(model, PROMPTS, 24, 6), [Reading(vocabulary=vocabulary)])[0],
        DraftPolicy(length),
    )
    assert (found.rounds, found.drafted, found.accepted) == (
        total.rounds,
        total.drafted,
        total.accepted,
    )
    assert draft.make_spec(DraftPolicy(4), Reading(vocabulary=vocabulary)) == spec
    assert draft.rank_drafts is not None


@pytest.mark.parametrize("length", [2, 4])
def test_replay_counts_what_decoding_with_a_tree_counts(length: int) -> None:
    model, total = model_here(), DecodeStats()
    spec = small_s3d().model_copy(update={"draft_length": length, "tree": TREE})
    decoder = Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    found, _ = simulate_rounds(
        replay_parallel_draft(
            Replay(model, PROMPTS, 24, 6), load_multi_token(model, spec.module, [module_folder()])
        )[0].to_rounds(TREE),
        DraftPolicy(length),
    )
    assert (found.rounds, found.accepted) == (total.rounds, total.accepted)
    chain, _ = simulate_rounds(
        replay_parallel_draft(
            Replay(model, PROMPTS, 24, 6), load_multi_token(model, spec.module, [module_folder()])
        )[0].to_rounds(CHAIN),
        DraftPolicy(length),
    )
    assert found.accepted / found.rounds > chain.accepted / chain.rounds, (
        "the tree's siblings stand now and then"
    )


def test_a_tree_grows_where_most_texts_go() -> None:
    rank = np.array([[0, 1, 0]] * 3 + [[0, 0, 0]] * 4 + [[1, 0, 5]] * 2 + [[2, 5, 5]])
    found = DraftRanks(rank, prompt_indices=(0,), n_positions=[10], token_budgets=[11])
    found = found.propose_trees()
    assert [(tree.parents, tree.ranks) for tree in found[:3]] == [
        ((0,), (0,)),
        ((0, 1), (0, 0)),
        ((0, 1, 2), (0, 0, 0)),
    ], "chains"
    grown = found[3:]
    assert (grown[0].parents, grown[0].ranks) == ((0, 1, 2, 1), (0, 0, 0, 1)), (
        "seven go through 0, four of them on to 0, 0, three to 1"
    )
    assert (grown[-1].parents, grown[-1].ranks, grown[-1].depths) == (
        (0, 1, 2, 0, 0, 1, 4, 6),
        (0, 0, 0, 1, 2, 1, 0, 0),
        (1, 2, 3, 1, 1, 2, 2, 3),
    ), "all that any text comes to"
    assert [len(tree.parents) for tree in grown] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("parents", "ranks", "why"),
    [
        ((0, 2), (0, 0), "parents stand before"),
        ((0, 0), (0, 2), "the next one below node 0 is 1"),
        ((0, 0), (0, 0), "the next one below"),
        ((0, 0, 1), (0, 1, 0), "the trunk"),
        ((0,), (0, 0), "one for each"),
        ((0,), (1,), "the next one below node 0 is 0"),
    ],
)
def test_what_is_no_tree_is_refused(
    parents: tuple[int, ...], ranks: tuple[int, ...], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        DraftTree(parents=parents, ranks=ranks)


def test_what_a_row_says_does_not_depend_on_what_the_rows_before_it_chose() -> None:
    spec = small_s3d()
    few, many = by_definition(spec, [5, 17, 40], 2), by_definition(spec, [5, 17, 40], 4)
    torch.testing.assert_close(few, many[:2], rtol=0, atol=0)


def test_a_round_costs_one_draft_pass_of_as_many_rows() -> None:
    costs = Costs((1.0,) * (2 * LAYERS), 2.0, (12.0, 13.0, 14.0, 16.0))
    price = OnePassDraftCosts.from_costs(costs).round_seconds(MASK, 3)
    assert price == pytest.approx((12.0, 10 * 12 / 12 + 13, 10 * 13 / 12 + 14, 10 * 14 / 12 + 16))


def test_modules_that_do_not_fit_are_refused() -> None:
    model = model_here()
    good = {MASK_EMBEDDINGS: torch.zeros(3, 32)}
    for tensors, form in (
        ({}, None),
        ({MASK_EMBEDDINGS: torch.zeros(3, 31)}, None),
        ({MASK_EMBEDDINGS: torch.zeros(3)}, None),
        (good, 2),
        (good | noisy_low_rank_changes(model, MASK, 2, 0.1), None),
    ):
        with pytest.raises(ModuleError, match=r"does not fit|its tensors do not"):
            build_multi_token(model, card(form), tensors, "x")
    with pytest.raises(ModuleError, match="another mask"):
        small_s3d().model_copy(update={"attn": (1,)}).build(model, [module_folder()])
