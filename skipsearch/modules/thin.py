"""Which sub-layers a trained draft keeps: far fewer than an untrained one needs. Thin passes are cheap, so this takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from skipsearch.engine import inference
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.rows import Lesson, draft_states, head_rows, lesson, read

BATCH = 16


@inference
def thin_mask(model: ModelAdapter, texts: Tensor, keep: int, progress: Callable[[int, int], None] = lambda done, total: None) -> SkipMask:
    """The mask that keeps `keep` sub-layers with which the untrained draft names most of the full model's tokens in texts [N, T].

    Forward selection: the sub-layer that helps most is added, again and again; then each is exchanged for a better one, where there is any.
    """
    n = model.spec.n_layers
    lessons = [lesson(read(model, some.to(model.spec.device), 1), 1, 0) for some in texts.split(BATCH)]
    known: dict[frozenset[int], float] = {}
    total = keep * 2 * n * 2

    def right(chosen: frozenset[int]) -> float:
        if chosen not in known:
            known[chosen] = agreed(model, SkipMask.from_sublayers(n, set(range(2 * n)) - chosen), lessons)
            progress(min(len(known), total - 1), total)
        return known[chosen]

    chosen: frozenset[int] = frozenset()
    while len(chosen) < keep:
        chosen = max((chosen | {s} for s in range(2 * n) if s not in chosen), key=right)
    for old in sorted(chosen):
        left = chosen - {old}
        chosen = max((left | {s} for s in range(2 * n) if s not in left), key=right)
    progress(total, total)
    return SkipMask.from_sublayers(n, set(range(2 * n)) - chosen)


@inference
def pruned(model: ModelAdapter, draft: ModelAdapter, mask: SkipMask, texts: Tensor, keep: int, ahead: int,
           progress: Callable[[int, int], None] = lambda done, total: None) -> SkipMask:
    """A mask that keeps `keep` of the sub-layers that a trained draft has: the one that it misses least goes, again and again.

    model: the full one. ahead: tokens that drafts run ahead. texts: [N, T].
    """
    lessons = [lesson(read(model, some.to(model.spec.device), 1), ahead, 0) for some in texts.split(BATCH)]
    kept = 2 * mask.n_layers - mask.n_skipped
    total, done = sum(range(keep + 1, kept + 1)), 0

    def right(thinner: SkipMask) -> float:
        nonlocal done
        done += 1
        progress(done, total)
        return agreed(draft, thinner, lessons)

    while 2 * mask.n_layers - mask.n_skipped > keep:
        mask = max((mask.flipped(s) for s in range(2 * mask.n_layers) if s not in mask.sublayers), key=right)
    return mask


def agreed(model: ModelAdapter, mask: SkipMask, lessons: Sequence[Lesson]) -> float:
    """Share of all rows at which a draft under `mask` names the full model's own token."""
    right = rows = 0
    for given in lessons:
        states, wanted = draft_states(model, mask, given).flatten(0, 1), given.targets.tokens[..., 0].flatten()
        for at in range(0, len(states), head_rows(model)):
            some = slice(at, at + head_rows(model))
            right += int((model.head(states[some][None])[0].argmax(dim=-1) == wanted[some]).sum())
        rows += len(wanted)
    return right / max(1, rows)
