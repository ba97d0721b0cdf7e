"""What a draft pass reads of the model: bits of the weights, and rows of the head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from skipsearch.core.schema_types import FrozenModel

DraftWeights = Literal["stored", "int8", "int6", "int5", "int4"]
# By the bits of a draft's weights. `stored` is not among them: these are the model's own weights.
WEIGHTS_OF_BITS: dict[int, DraftWeights] = {8: "int8", 6: "int6", 5: "int5", 4: "int4"}
BITS_OF_WEIGHTS = {name: bits for bits, name in WEIGHTS_OF_BITS.items()}
MAX_TOKEN_ID = 2**20  # four times the largest vocabulary; a hostile file is refused at once
MAX_TOKENS_TEXT = 48_000  # characters of `Vocabulary.tokens`, of which a profile may have two
_RANGE = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?")


class Vocabulary(FrozenModel):
    """The tokens that a draft can propose. Its passes compute no logits of other tokens.

    To these tokens, each request adds those of its prompt and of its text so far.
    Source: FR-Spec (arXiv 2502.14856), which ranks tokens by their frequency.
    """

    lowest: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] = Field(
        description="the tokens 0..lowest-1; a BPE tokenizer gives low ids to frequent tokens"
    )
    tokens: Annotated[str, Field(max_length=MAX_TOKENS_TEXT)] = Field(
        description="further token ids, ascending, such as `9 12-14`: those of the calibration text"
    )

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, text: str) -> str:
        ids = list(_parse_ids(text))
        if any(a >= b for a, b in pairwise(ids)):
            raise ValueError("token ids must be ascending, and each may be listed once")
        return text

    @classmethod
    def from_ids(cls, token_ids: Iterable[int], lowest: int = 0) -> Vocabulary:
        """Return the vocabulary of these tokens and of the `lowest` lowest ids."""
        return cls(lowest=lowest, tokens=format_ids(i for i in token_ids if i >= lowest))

    def token_ids(self) -> tuple[int, ...]:
        """Return all token ids in ascending order."""
        return _token_ids(self)

    def __str__(self) -> str:
        """Return `4,213 tokens of the vocabulary`."""
        return f"{len(self.token_ids()):,} tokens of the vocabulary"


@dataclass(frozen=True)
class Reading:
    """What a draft pass reads.

    weights: the number format of the sub-layers.
    vocabulary: the rows of the head; None: all.
    """

    weights: DraftWeights = "stored"
    vocabulary: Vocabulary | None = None

    @property
    def is_everything(self) -> bool:
        """Whether a draft reads all that a plain pass reads, apart from skipped sub-layers."""
        return self == READ_ALL

    @property
    def bits(self) -> int | None:
        """The bits of the weights; None: as the model stores them."""
        return BITS_OF_WEIGHTS.get(self.weights)

    def __str__(self) -> str:
        """Return `int8, 4,213 tokens of the vocabulary`.

        `all of the model` if it reads all.
        """
        weights = None if self.weights == "stored" else self.weights
        parts = [str(part) for part in (weights, self.vocabulary) if part is not None]
        return ", ".join(parts) or "all of the model"


READ_ALL = Reading()
DRAFT_WEIGHTS: tuple[DraftWeights, ...] = get_args(DraftWeights)


def is_stored(value: object) -> bool:
    """Return whether weights are the model's own: a file then omits the key."""
    return value == "stored"


def format_ids(token_ids: Iterable[int]) -> str:
    """Return token ids as ascending numbers and ranges: `9 12-14`."""
    parts, ids = list[str](), sorted(set(token_ids))
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            first, last = ids[start], ids[end - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = end
    return " ".join(parts)


def _parse_ids(text: str) -> Iterator[int]:
    """Yield the ids of `9 12-14`. Raises: ValueError for another form or too many tokens."""
    n_ids = 0
    for part in text.split():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is no token id and no range: write 12 or 12-14")
        first, last = int(match[1]), int(match[2] or match[1])
        n_ids += last - first + 1
        if last < first or last > MAX_TOKEN_ID or n_ids > MAX_TOKEN_ID:
            raise ValueError(f"{part[:40]} is no ascending range of ids up to {MAX_TOKEN_ID:,}")
        yield from range(first, last + 1)


@lru_cache(maxsize=64)
def _token_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    return tuple(sorted({*range(vocabulary.lowest), *_parse_ids(vocabulary.tokens)}))
