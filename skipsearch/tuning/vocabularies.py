"""List the vocabularies that a search compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from skipsearch.core.reading import Vocabulary
from skipsearch.engine.reduced_model import can_restrict_head
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing.reading_costs import SMALL_HEAD_ROWS

LOWEST_IDS = (0, 1024, 4096, 16384)  # of a vocabulary; the first has the calibration tokens alone
MAX_CALIBRATION_TOKENS = 4000  # the most frequent ones
MIN_VOCABULARY = 2 * SMALL_HEAD_ROWS  # tokens; the head of a smaller one costs next to nothing
MAX_VOCABULARY_SHARE = 0.5  # of the model's tokens; a larger vocabulary is not judged


def list_vocabularies(
    model: ModelAdapter, continuations: Sequence[Sequence[int]]
) -> Iterator[Vocabulary | None]:
    """Yield the vocabularies that drafts may have; None: all tokens.

    continuations: the calibration texts.
    """
    yield None
    if model.spec.vocab_size < MIN_VOCABULARY or not can_restrict_head(model):
        return
    counts = Counter(token for text in continuations for token in set(text))
    frequent = [token for token, _ in counts.most_common(MAX_CALIBRATION_TOKENS)]
    for lowest in LOWEST_IDS:
        vocabulary = Vocabulary.from_ids(frequent, lowest)
        if len(vocabulary.token_ids()) <= MAX_VOCABULARY_SHARE * model.spec.vocab_size:
            yield vocabulary
