"""The rows on which a draft head is trained are those that decoding computes."""

from __future__ import annotations

import pytest
import torch
from decoding.mtp_checks import by_definition
from helpers.modules import save_mtp
from helpers.tiny import VOCAB, tiny_model_and_reference

from skipsearch.core.reading import MAX_TOKENS_TEXT, Vocabulary
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.training import draft_head_student
from skipsearch.training.draft_head_student import DraftHeadStudent, choose_vocabulary

LENGTH = 7


@torch.no_grad()
def test_every_row_is_what_a_round_drafts_there() -> None:
    model, full = tiny_model_and_reference()
    assert isinstance(model, HFAdapter)
    random = torch.Generator().manual_seed(0)
    texts = torch.randint(VOCAB, (32, 24), generator=random)  # those of `save_mtp`
    student, spec = DraftHeadStudent(model, texts), save_mtp(model, "rows.safetensors", 0.0)
    some = texts[:2, :LENGTH]
    hidden, targets = student.run_draft(student.run_teacher(some, 4), 0)
    logits, row = student.head(hidden)[0], 0
    for depth in range(3):
        for text in some.tolist():
            for j in range(depth, LENGTH - 1):
                start = j - depth + 2  # tokens that are known when the round starts
                expected = by_definition(full, spec, text[:start], text[start : j + 2])
                assert torch.allclose(logits[row], expected, rtol=0, atol=1e-6), (depth, j)
                following = full.hf(torch.tensor([text[: j + 2]])).logits[0, -1]
                assert int(targets.tokens[0, row, 0]) == int(following.argmax())
                row += 1
    assert row == hidden.shape[1]


def test_a_fit_to_few_texts_predicts_others_better_than_one_that_repeats_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = tiny_model_and_reference()
    assert isinstance(model, HFAdapter)
    texts = torch.randint(VOCAB, (64, 13), generator=torch.Generator().manual_seed(5))

    def measure_error() -> float:
        student = DraftHeadStudent(model, texts[:4])  # 48 rows of 64 inputs
        gram, cross = student._sum_fit(texts[4:])
        projection = student.mix.projection.detach().double()
        return float((projection @ gram * projection).sum() - 2 * (projection.T * cross).sum())

    chosen = measure_error()
    monkeypatch.setattr(draft_head_student, "RIDGES", (1e-3,))
    assert chosen < measure_error()


def test_targets_outside_the_vocabulary_have_no_loss_and_no_agreement() -> None:
    model, _ = tiny_model_and_reference()
    assert isinstance(model, HFAdapter)
    texts = torch.randint(VOCAB, (8, 16), generator=torch.Generator().manual_seed(1))
    student = DraftHeadStudent(model, texts, Vocabulary(lowest=5, tokens=""))
    hidden, targets = student.run_draft(student.run_teacher(texts, 3), 0)
    assert student.head(hidden).shape[-1] == 5
    missing = targets.tokens < 0
    assert missing.any()
    assert not targets.probs[missing].any()
    assert int(targets.tokens.max()) < 5


def test_a_vocabulary_has_the_most_frequent_tokens_then_the_lowest_ids() -> None:
    texts = [50, 50, 60, 60, 60, 70]
    for size, ids in ((2, (50, 60)), (4, (0, 50, 60, 70)), (5, (0, 1, 50, 60, 70))):
        found = choose_vocabulary(texts, size, 100)
        assert found is not None
        assert found.token_ids() == ids
    assert choose_vocabulary(texts, 0, 100) is None


def test_a_vocabulary_of_scattered_tokens_fits_into_a_profile() -> None:
    scattered = [7 * i for i in range(20_000) for _ in range(1 + (i > 10_000))]
    vocabulary = choose_vocabulary(scattered, 18_000, 150_000)
    assert vocabulary is not None
    ids = vocabulary.token_ids()
    assert len(ids) == 18_000
    assert len(vocabulary.tokens) <= MAX_TOKENS_TEXT
    assert {7 * 10_001, 7 * 12_000} < set(ids), "the most frequent"
    assert set(range(vocabulary.lowest)) < set(ids)
    assert vocabulary.lowest > 7_000, "the rarest gave way to the lowest ids"
