"""Choose the sub-layers that a trained draft keeps.

A trained draft needs far fewer sub-layers than an untrained one. Passes with few sub-layers are
cheap, so a mask is chosen before training, on a few texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine import no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.training.distill_batch import (
    DraftBatch,
    count_agreeing,
    make_draft_batch,
    max_head_rows,
    run_draft_layers,
    run_teacher,
)

TEACHER_BATCH = 16  # texts that the full model reads at once


@no_grad
def select_mask(
    model: ModelAdapter,
    texts: Tensor,
    n_kept: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SkipMask:
    """Return the mask with `n_kept` sub-layers whose draft agrees most often with the full model.

    Agreement is measured on texts [N, T], without training. Forward selection adds sub-layers one
    by one, each time the one that raises agreement most. Then each sub-layer in turn is exchanged
    for the one that gives the highest agreement in its place.
    """
    n = model.spec.n_layers
    draft_batches = _make_draft_batches(model, texts, 1)
    scores: dict[frozenset[int], float] = {}
    total = n_kept * 2 * n * 2

    def score(sublayers: frozenset[int]) -> float:
        if sublayers not in scores:
            mask = SkipMask.from_sublayers(n, set(range(2 * n)) - sublayers)
            scores[sublayers] = agreement_under(model, mask, draft_batches)
            progress(min(len(scores), total - 1), total)
        return scores[sublayers]

    sublayers: frozenset[int] = frozenset()
    while len(sublayers) < n_kept:
        sublayers = max((sublayers | {s} for s in range(2 * n) if s not in sublayers), key=score)
    for old in sorted(sublayers):
        others = sublayers - {old}
        sublayers = max((others | {s} for s in range(2 * n) if s not in others), key=score)
    progress(total, total)
    return SkipMask.from_sublayers(n, set(range(2 * n)) - sublayers)


@no_grad
def prune_mask(
    model: ModelAdapter,
    draft: ModelAdapter,
    mask: SkipMask,
    texts: Tensor,
    n_kept: int,
    draft_length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SkipMask:
    """Return a mask that keeps `n_kept` of the sub-layers of a trained draft.

    Sub-layers are dropped one by one, each time the one that the draft needs least. model: the full
    model. texts: [N, T]."""
    draft_batches = _make_draft_batches(model, texts, draft_length)
    n_before = 2 * mask.n_layers - mask.n_skipped
    total, done = sum(range(n_kept + 1, n_before + 1)), 0

    def score(thinner: SkipMask) -> float:
        nonlocal done
        done += 1
        progress(done, total)
        return agreement_under(draft, thinner, draft_batches)

    while 2 * mask.n_layers - mask.n_skipped > n_kept:
        mask = max(
            (mask.flip(s) for s in range(2 * mask.n_layers) if s not in mask.sublayers), key=score
        )
    return mask


def _make_draft_batches(model: ModelAdapter, texts: Tensor, draft_length: int) -> list[DraftBatch]:
    return [
        make_draft_batch(run_teacher(model, part.to(model.spec.device), 1), draft_length, 0)
        for part in texts.split(TEACHER_BATCH)
    ]


def agreement_under(
    model: ModelAdapter, mask: SkipMask, draft_batches: Sequence[DraftBatch]
) -> float:
    """Return the share of rows at which a draft under `mask` predicts the full model's token."""
    n_agreeing = sum(
        count_agreeing(
            model.head, run_draft_layers(model, mask, batch), batch.targets, max_head_rows(model)
        )
        for batch in draft_batches
    )
    return n_agreeing / max(1, sum(batch.input_ids.numel() for batch in draft_batches))
