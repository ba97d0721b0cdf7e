"""Checks of training: a draft is trained on what decoding runs, and only its module changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from helpers.modules import SMALL_MASK, TRAINED_CARD, make_card, make_early_exit_card, noisy_copies
from helpers.tiny import LAYERS, VOCAB, tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.kangaroo.weights import build_early_exit as assembled_kangaroo
from skipsearch.drafters.kangaroo.weights import predict_text
from skipsearch.drafters.s3d.weights import build_multi_token as assembled_s3d
from skipsearch.drafters.trained.card import ModuleCard
from skipsearch.drafters.trained.module_weights import apply_module, make_base
from skipsearch.engine import draft_step, forward
from skipsearch.engine.sampler import GreedySampler
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.training.distill_batch import make_draft_batch, run_draft_layers, run_teacher
from skipsearch.training.students import AdaptedStudent, KangarooStudent, S3DStudent, Student
from skipsearch.training.trainer import Trainer, TrainSettings

DEPTH = 3  # rows of an adapted draft in these trainings
MIDDLE = SkipMask(LAYERS, (2,), (2,))  # that s3d leaves out in them


def model_here() -> HFAdapter:
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
    assert isinstance(model, HFAdapter)
    return model


def texts(n: int = 12, length: int = 20) -> torch.Tensor:
    return torch.randint(
        VOCAB, (n, length), generator=torch.Generator().manual_seed(3), dtype=torch.int32
    )


def given_texts(n: int, length: int = 20) -> torch.Tensor:
    """Return texts on the device of a model."""
    return texts(n, length).long().to(model_here().spec.device)


def draft_here(noise: float = 0.2) -> ModelAdapter:
    model = model_here()
    return apply_module(
        model, make_card(model, SMALL_MASK), noisy_copies(model, SMALL_MASK, noise), "x"
    )


def s3d_card(rank: int | None = None) -> ModuleCard:
    return ModuleCard(
        kind="s3d",
        base=make_base(model_here().spec),
        attn=MIDDLE.attn,
        mlp=MIDDLE.mlp,
        form="lora" if rank else "embeddings",
        rank=rank,
        trained=TRAINED_CARD,
    )


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@torch.no_grad()
def check_adapted_rows() -> None:
    """Check that a row is the draft pass that decoding runs there.

    It sees the committed text before the round, and the draft's own K/V after it.
    """
    model, draft, some = model_here(), draft_here(), given_texts(2)
    for first in (0, 2):
        given = make_draft_batch(run_teacher(model, some, 4), DEPTH, first)
        found = draft.head(run_draft_layers(draft, SMALL_MASK, given))
        for b in range(2):
            for start in range(first, first + given.input_ids.shape[1], DEPTH):
                cache, planner = model.new_cache(1, 32), Planner(32, model.spec.device)
                if start:
                    forward(model, some[b : b + 1, :start], cache, planner.plan_chain(0, start))
                for k in range(DEPTH):
                    token, plan = (
                        some[b : b + 1, start + k : start + k + 1],
                        planner.plan_chain(start + k, 1),
                    )
                    close(
                        found[b, start - first + k],
                        forward(draft, token, cache, plan, SMALL_MASK)[0, -1],
                    )
                    scored = draft_step(
                        draft, token, cache, plan, SMALL_MASK, GreedySampler(), False
                    )
                    assert scored.choice is not None
                    assert int(scored.choice) == int(found[b, start - first + k].argmax())


@torch.no_grad()
def check_s3d_rows() -> None:
    """Check that a group of rows is the pass that drafts there, with and without updates."""
    model, some = model_here(), given_texts(2, 19)
    for rank in (None, 2):
        pupil = S3DStudent(model, MIDDLE, 4, rank)
        found = pupil.head(pupil.run_draft(pupil.run_teacher(some, 4), 1)[0])
        draft = assembled_s3d(
            model,
            s3d_card(rank),
            {name: parameter.detach() for name, parameter in pupil.parameters.items()},
            "x",
        )
        for b in range(2):
            for start in range(1, 1 + found.shape[1], 4):
                cache, planner = model.new_cache(1, 32), Planner(32, model.spec.device)
                forward(model, some[b : b + 1, :start], cache, planner.plan_chain(0, start))
                states = draft.run_draft_layers(
                    some[b : b + 1, start : start + 1], 4, cache, planner.plan_chain(start, 4)
                )
                close(draft.model.head(states)[0], found[b, start - 1 : start + 3])


@torch.no_grad()
def check_kangaroo_rows() -> None:
    """Check that a row is what decoding drafts from after that token.

    Its target is the full model's prediction there.
    """
    model, some = model_here(), given_texts(2)
    for form in ("attention", "layer"):
        pupil = KangarooStudent(model, 2, form)
        states, taught = pupil.run_draft(pupil.run_teacher(some, 4), 0)
        tensors = {name: parameter.detach() for name, parameter in pupil.parameters.items()}
        early = assembled_kangaroo(model, make_early_exit_card(model, 2, form), tensors, "x")
        for b in range(2):
            close(pupil.head(states)[b], predict_text(early, some[b].tolist()))
            said = model.model(some[b : b + 1], use_cache=False).logits[0]
            assert torch.equal(taught.tokens[b, :, 0], said.argmax(-1)), (
                "what is taught at a row is what follows that row's token"
            )


def pupils() -> Iterator[Student]:
    """Yield a student of every kind and form, each with its own model."""
    for rank in (None, 4):
        yield AdaptedStudent(fresh(), SMALL_MASK, rank, DEPTH)
        yield S3DStudent(fresh(), MIDDLE, 4, rank)
    for form in ("attention", "layer"):
        yield KangarooStudent(fresh(), 2, form)


def fresh() -> HFAdapter:
    model = adapt(tiny_llama())
    assert isinstance(model, HFAdapter)
    return model


def check_only_the_drafts_own_learns() -> None:
    """Check that training changes all tensors of a module, and no bit of the model."""
    for pupil in pupils():
        before = {name: weight.clone() for name, weight in pupil.model.model.state_dict().items()}
        own = {name: parameter.detach().clone() for name, parameter in pupil.parameters.items()}
        trainer = Trainer(
            pupil, texts(), TrainSettings(steps=3, seconds=None, batch_size=4, top_k=16)
        )
        trainer.run()
        for name, weight in pupil.model.model.state_dict().items():
            assert torch.equal(weight, before[name]), (pupil.facts, name)
        assert all(weight.grad is None for weight in pupil.model.model.parameters())
        still = {
            name
            for name, tensor in trainer.export_tensors().items()
            if torch.equal(tensor, own[name])
        }
        assert not still, (pupil.facts, still)
