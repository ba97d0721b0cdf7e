"""Cut the reference texts into segments, so that masks are judged on a sample of their positions.

A whole answer of a few hundred tokens tells less about a mask than the same number of positions
from many answers, and the latter can grow in small steps while a mask stays in the race. A segment
is replayed like a text of its own: what comes before it is its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of the positions of a slow model, few as they are, segments are short, so that there are enough of
# them for samples. Still shorter ones would cut too many drafts at their ends.
SEGMENT_POSITIONS, SHORT_SEGMENT_POSITIONS = 64, 32
MIN_SEGMENTS = 24
MIN_SEGMENT_POSITIONS = 16  # a shorter rest belongs to the segment before it
# Texts with fewer positions in all are replayed whole.
MIN_CUT_POSITIONS = 1024
# A share of accepted tokens is known to ± 1.5 % from the most positions, ± 4 % from the fewest.
MAX_POSITIONS, FEWEST_POSITIONS = 4096, 512
MAX_JUDGING_S = 12.0  # of a mask on all positions, by the time of a prefill


@dataclass(frozen=True)
class Segment:
    """The positions first … end − 1 of a text. Position j reads token j, predicts token j + 1."""

    text: int  # its index
    first: int
    end: int


def choose_max_positions(row_s: float, judging_s: float = MAX_JUDGING_S) -> int:
    """Return how many positions masks are judged on, at most.

    row_s: of a prefill, for a token. judging_s: of a mask on all positions.
    """
    return round(min(MAX_POSITIONS, max(FEWEST_POSITIONS, min(judging_s, MAX_JUDGING_S) / row_s)))


def cut_segments(n_positions: Sequence[int], max_positions: int = MAX_POSITIONS) -> list[Segment]:
    """Return the segments to replay, neighbours from different texts.

    n_positions: of each text. If there are too many positions, the segments that are replayed are
    spread evenly over texts and over the places in a text.
    """
    total = sum(n_positions)
    if total < MIN_CUT_POSITIONS:
        return [Segment(text, 0, n) for text, n in enumerate(n_positions)]
    length = min(
        SEGMENT_POSITIONS, max(SHORT_SEGMENT_POSITIONS, min(total, max_positions) // MIN_SEGMENTS)
    )
    by_text = [_cut(text, n, length) for text, n in enumerate(n_positions)]
    deepest = max(map(len, by_text))
    # Text t begins at its segment t mod deepest, so that a sample has every place of a text.
    in_turn = [
        of_text[place]
        for turn in range(deepest)
        for text, of_text in enumerate(by_text)
        if (place := (turn + text) % deepest) < len(of_text)
    ]
    sample, left = list[Segment](), max_positions
    for segment in in_turn:
        if segment.end - segment.first <= left:
            sample.append(segment)
            left -= segment.end - segment.first
    return sample


def _cut(text: int, n_positions: int, length: int) -> list[Segment]:
    firsts = list(range(0, n_positions, length))
    if len(firsts) > 1 and n_positions - firsts[-1] < MIN_SEGMENT_POSITIONS:
        firsts.pop()
    ends = [*firsts[1:], n_positions][: len(firsts)]
    return [Segment(text, first, end) for first, end in zip(firsts, ends, strict=True)]
