"""What a round would meet wherever one can start: replayed positions laid out so that any policy can walk them.

Nothing is set by hand: how confident the draft stays on its own wrong token, which decides how much it wastes behind a mismatch, is
drawn from the mask's confidences at all positions, in their order. Behind a mismatch the draft goes on with text of its own that is as
plausible to it as any other: on the embedded model 24 % of the confidences there lay under 0.4, 29 % of all, but 64 % of those at the
mismatched positions themselves. The draws are the same for every mask and policy, so that differences between two are their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.evaluation.replay import Replayed

LONGEST = 16   # drafted tokens that a round is laid out for
_SEED = 0


@dataclass(frozen=True)
class Rounds:
    """The anchors (places where a round can start) of all prompts, one prompt's behind the other's: A of them.

    right [A]: drafted tokens there that the full model would accept if the draft went on, at most K.
    sibling [A]: how many tokens the draft prefers to the full model's where it is first wrong, 0 where that is not known.
    confidence [A, K]: the draft's top probability at each token that it would draft from there.
    room [A]: tokens that may be drafted there. left [A]: tokens of the text still to come.
    first [N]: each prompt's first anchor, and lengths [N]: how many it has.
    exact: `right` looks past the end of the text, as a draft does, which cannot know that the text is about to end.
    prompts [N]: the number of each prompt.
    """

    right: np.ndarray
    sibling: np.ndarray
    confidence: np.ndarray
    room: np.ndarray
    left: np.ndarray
    first: np.ndarray
    lengths: np.ndarray
    exact: bool = False
    prompts: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """K: tokens that a round is laid out for; a longer draft is cut to it."""
        return int(self.confidence.shape[1])


def lay_out(replayed: Sequence[Replayed], longest: int = LONGEST) -> Rounds:
    """Fast replay's positions as rounds: real up to the first mismatch of each, drawn behind it.

    Under sampling `agrees` holds probabilities, and one coin is thrown for each position.
    """
    random = np.random.default_rng(_SEED)
    agrees = np.concatenate([r.agrees for r in replayed])
    if agrees.dtype != bool:
        agrees = random.random(len(agrees)) < agrees
    confidence = np.concatenate([r.confidence for r in replayed])
    lengths = np.array([len(r.agrees) for r in replayed])
    ends = np.cumsum(lengths)
    anchors, end = np.arange(len(agrees)), np.repeat(ends, lengths)
    wrong = np.append(np.flatnonzero(~agrees), len(agrees))
    right = np.minimum(np.minimum(wrong[np.searchsorted(wrong, anchors)], end) - anchors, longest)
    drawn = random.integers(len(confidence), size=len(anchors))
    steps = np.arange(longest)
    known = (steps <= right[:, None]) & (anchors[:, None] + steps < end[:, None])
    source = np.where(known, anchors[:, None] + steps, (drawn[:, None] + steps) % len(confidence))
    room = np.concatenate([r.room - 1 - np.arange(len(r.agrees)) for r in replayed])
    sibling = np.append(_ranks(replayed), 0)[np.where(anchors + right < end, anchors + right, len(anchors))]
    return Rounds(right, sibling, confidence[source], room, end - anchors, ends - lengths, lengths,
                  prompts=tuple(r.prompt for r in replayed))


def _ranks(replayed: Sequence[Replayed]) -> np.ndarray:
    return np.concatenate([np.zeros(len(r.agrees), dtype=int) if r.rank is None else r.rank for r in replayed])


def without_passes(texts: Sequence[Sequence[int]], rooms: Sequence[int]) -> Rounds:
    """The rounds of these texts for recipes that draft without a pass of the model. texts: generated tokens; rooms: as in `Replayed`."""
    prompts = tuple(i for i, text in enumerate(texts) if len(text) > 1)
    lengths = np.array([len(texts[i]) - 1 for i in prompts])
    ends, places = np.cumsum(lengths), [np.arange(n) for n in lengths]
    left = np.concatenate([n - at for n, at in zip(lengths, places, strict=True)])
    room = np.concatenate([rooms[i] - 1 - at for i, at in zip(prompts, places, strict=True)])
    nothing = np.zeros(len(left), dtype=int)
    return Rounds(nothing, nothing, np.zeros((len(left), LONGEST)), room, left, ends - lengths, lengths, prompts=prompts)
