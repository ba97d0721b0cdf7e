"""Training: rows as decoding runs them, gradients to the draft's own weights alone, and a kill that
costs little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoding.training_checks import (
    DEPTH,
    check_adapted_rows,
    check_only_the_drafts_own_learns,
    draft_here,
    model_here,
    pupils,
    texts,
)
from helpers.marks import thorough
from helpers.modules import SMALL_MASK, make_card, noisy_copies
from helpers.tiny import VOCAB

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.trained.module_weights import apply_module
from skipsearch.engine import forward
from skipsearch.errors import ModuleError
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.training.distill_batch import make_draft_batch, run_draft_layers, run_teacher
from skipsearch.training.students import AdaptedStudent
from skipsearch.training.trainer import Trainer, TrainProgress, TrainSettings

QUICK = TrainSettings(steps=6, seconds=None, batch_size=4, learning_rate=3e-3, top_k=16)


def trainer_here(
    settings: TrainSettings = QUICK,
    mask: SkipMask = SMALL_MASK,
    rank: int | None = None,
    some: torch.Tensor | None = None,
) -> Trainer:
    return Trainer(
        AdaptedStudent(model_here(), mask, rank, DEPTH), texts() if some is None else some, settings
    )


def test_a_row_of_training_is_the_draft_pass_that_decoding_runs_there() -> None:
    check_adapted_rows()


def test_every_text_is_read_once_before_any_is_read_again() -> None:
    trainer = trainer_here(replace(QUICK, batch_size=3), some=texts(10))
    chosen = [i for number in range(10) for i in trainer._choose_texts(number)]
    epochs = [chosen[begin : begin + 10] for begin in range(0, 30, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != list(range(10))


@torch.no_grad()
def test_what_is_taught_is_what_the_full_model_says_there() -> None:
    model, some = model_here(), texts(2).long()
    given = make_draft_batch(run_teacher(model, some, 5), DEPTH, 1)
    cache, planner = model.new_cache(2, 20), Planner(20, torch.device("cpu"))
    whole = forward(model, some, cache, planner.plan_chain(0, 20, 2))[
        :, 1 : 1 + given.input_ids.shape[1]
    ]
    assert torch.equal(given.targets.tokens[..., 0], whole.argmax(-1))
    top = whole.softmax(-1).topk(5).values
    torch.testing.assert_close(
        given.targets.probs.double(), top / top.sum(-1, keepdim=True), rtol=0, atol=1e-6
    )


def test_the_lessons_of_one_reading_are_those_of_fresh_ones() -> None:
    pupil, some = trainer_here().student, texts(2).long()
    reading = pupil.run_teacher(some, 4)
    held = [i for i, keys in enumerate(reading.cache.keys) if keys is not None]
    assert held == [
        i for i in range(SMALL_MASK.n_layers) if i not in SMALL_MASK.attn
    ]  # and no other layer's K/V
    for first in (0, 2, 1):
        states, taught = pupil.run_draft(reading, first)
        fresh, same = pupil.run_draft(pupil.run_teacher(some, 4), first)
        assert torch.equal(states, fresh)
        assert torch.equal(taught.tokens, same.tokens)
        # what autograd noted of one lesson is over before the next
        states.square().sum().backward()


def test_steps_take_turns_with_the_last_few_readings() -> None:
    trainer, read = trainer_here(replace(QUICK, steps=9, steps_per_teacher_pass=3)), list[int]()
    of_the_model, used = trainer.student.run_teacher, list[int]()
    trainer.student.run_teacher = lambda some, likeliest: (
        read.append(trainer.n_steps) or of_the_model(some, likeliest)
    )  # type: ignore[method-assign]
    rows = trainer.student.run_draft
    trainer.student.run_draft = lambda reading, first: (
        used.append(id(reading)) or rows(reading, first)
    )  # type: ignore[method-assign]
    trainer.run()
    assert read == [0, 3, 6]
    first, second, third = used[0], used[3], used[6]
    assert used == [first, first, first, second, first, first, third, second, first]
    assert trainer.tokens_read == 3 * QUICK.batch_size * texts().shape[1]


@pytest.mark.parametrize("wrong", ["loss", "gradients"])
def test_a_step_that_is_not_finite_leaves_the_weights_as_they_were(wrong: str) -> None:
    trainer = trainer_here()
    before = {name: weight.detach().clone() for name, weight in trainer.parameters.items()}
    accumulate, nan = trainer.accumulate_gradients, float("nan")

    def broken(teacher_output: object, offset: int) -> tuple[float, float, int]:
        loss, agreement, n_rows = accumulate(teacher_output, offset)
        if wrong == "gradients":
            next(p.grad for p in trainer.parameters.values() if p.grad is not None).fill_(nan)
        return nan if wrong == "loss" else loss, agreement, n_rows

    trainer.accumulate_gradients = broken  # type: ignore[method-assign]
    with pytest.raises(ModuleError, match="nan"):
        trainer.run()
    for name, weight in before.items():
        assert torch.equal(trainer.parameters[name], weight)


@pytest.mark.parametrize("limits", [(None, None), (0, None), (None, 0.0)])
def test_a_training_without_a_limit_is_refused(limits: tuple[int | None, float | None]) -> None:
    with pytest.raises(ModuleError, match="limit"):
        trainer_here(replace(QUICK, steps=limits[0], seconds=limits[1]))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_loss_is_cross_entropy_towards_the_models_likeliest_tokens_at_a_temperature(
    temperature: float,
) -> None:
    model, draft, some = model_here(), draft_here(), texts(2).long()
    trainer = trainer_here(replace(QUICK, top_k=5, temperature=temperature))
    with torch.no_grad():
        for name, weight in noisy_copies(model, SMALL_MASK, 0.2).items():
            trainer.parameters[name].copy_(weight)
    found, _, rows = trainer.accumulate_gradients(trainer.student.run_teacher(some, 5), 1)
    given = make_draft_batch(run_teacher(model, some, VOCAB), DEPTH, 1)
    with torch.no_grad():
        said = draft.head(run_draft_layers(draft, SMALL_MASK, given)).log_softmax(-1)
        top = given.targets.probs[..., :5].log() / temperature
        wanted = -(top.softmax(-1) * said.gather(-1, given.targets.tokens[..., :5])).sum(-1)
    assert rows == wanted.numel()
    assert found == pytest.approx(float(wanted.mean()), abs=1e-5)


def test_only_the_drafts_own_weights_learn_whatever_is_trained() -> None:
    assert trainer_here().parameters.keys() == set(noisy_copies(model_here(), SMALL_MASK, 0.0))
    check_only_the_drafts_own_learns()


@pytest.mark.parametrize("rank", [None, 4])
def test_training_brings_the_draft_closer_to_the_model(rank: int | None) -> None:
    model = model_here()
    settings = TrainSettings(steps=60, seconds=None, batch_size=12, learning_rate=1e-2, top_k=16)
    trainer, told = trainer_here(settings, rank=rank), list[TrainProgress]()
    trainer.run(on_progress=told.append)
    assert told[-1].n_steps == 60
    assert told[-1].share_done == 1
    assert told[-1].loss < told[0].loss
    draft = apply_module(model, make_card(model, SMALL_MASK, rank), trainer.export_tensors(), "x")

    def agreed(of: ModelAdapter) -> float:
        given = make_draft_batch(run_teacher(model, texts().long(), 1), 3, 0)
        with torch.no_grad():
            return float(
                (
                    of.head(run_draft_layers(of, SMALL_MASK, given)).argmax(-1)
                    == given.targets.tokens[..., 0]
                )
                .double()
                .mean()
            )

    assert agreed(draft) > agreed(model) + 0.05


def test_low_rank_changes_begin_as_nothing() -> None:
    model = model_here()
    tensors = trainer_here(rank=2).export_tensors()
    fresh = apply_module(model, make_card(model, SMALL_MASK, 2), tensors, "x")
    given = make_draft_batch(run_teacher(model, texts().long(), 1), 3, 0)
    with torch.no_grad():
        assert torch.equal(
            run_draft_layers(fresh, SMALL_MASK, given),
            run_draft_layers(
                model, SMALL_MASK, make_draft_batch(run_teacher(model, texts().long(), 1), 3, 0)
            ),
        )


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "number",
    [0, 1, *thorough(2, 3, 4, 5)],
    ids=["adapted", "s3d", "adapted, low rank", "s3d, low rank", "kangaroo", "a whole layer"],
)
def test_a_training_that_was_killed_goes_on_and_ends_as_it_would_have(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipsearch.training.trainer.CHECKPOINT_INTERVAL_S", 0.0)

    def trainer_here() -> Trainer:
        return Trainer(list(pupils())[number], texts(), QUICK)

    whole = trainer_here()
    whole.run()

    def kill(step: TrainProgress) -> None:
        if step.n_steps == 4:  # the checkpoint of the third is there
            raise Killed

    with pytest.raises(Killed):
        trainer_here().run(tmp_path / "t.pt", kill)
    done = list[int]()
    second = trainer_here()
    second.run(tmp_path / "t.pt", lambda step: done.append(step.n_steps))
    assert done == [4, 5, 6]
    for name, weight in whole.export_tensors().items():
        torch.testing.assert_close(second.export_tensors()[name], weight, rtol=0, atol=1e-12)


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trainer = tmp_path / "t.pt", trainer_here()
    trainer.run_step(0.0)
    trainer.save_checkpoint(path)
    trainer.run_step(0.5)

    def killed(what: object, to: Path) -> None:
        to.write_bytes(b"PK half of it")
        raise Killed

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(Killed):
        trainer.save_checkpoint(path)
    fresh = trainer_here()
    fresh.load_checkpoint(path)
    assert fresh.n_steps == 1


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    trainer_here().run(path)
    for other in (
        trainer_here(some=texts(11)),
        trainer_here(mask=SMALL_MASK.flip(0)),
        trainer_here(rank=2),
        trainer_here(TrainSettings(batch_size=5)),
    ):
        with pytest.raises(ModuleError, match="another training"):
            other.load_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModuleError, match="damaged"):
        trainer_here().load_checkpoint(path)


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ModuleError, match="too little text"):
        trainer_here(some=texts(4, 3))
