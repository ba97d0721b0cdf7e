"""`lookup`: copies the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.core.recipe import DrafterInfo, DrafterSpec
from skipsearch.core.schema_types import is_falsy
from skipsearch.drafters.lookup.suffix_index import DEFAULT_MAX_MATCH

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class Lookup(DrafterSpec):
    """Proposes the tokens that followed the latest earlier occurrence of the text's longest suffix.

    The text is the prompt and the generated tokens. If the request may copy from earlier answers
    and a longer suffix occurs there, lookup copies from them. If fewer than `min_match` tokens
    match, it proposes nothing. A copied token has a one-hot q, also if the request samples. Source:
    prompt lookup decoding (Saxena 2023).
    """

    kind: Literal["lookup"] = "lookup"
    info = DrafterInfo(
        "Prompt lookup decoding (Saxena 2023)",
        "nothing: it reads the text",
        "stands before any other drafter",
    )
    min_match: Annotated[int, Field(ge=1, le=DEFAULT_MAX_MATCH)] = Field(
        description="tokens that must match at least, 1..16"
    )
    per_match: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None,
        exclude_if=is_falsy,
        description="most tokens drafted for each token that matched, 1..64; left out: "
        "`draft_length`",
    )

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.lookup.session import LookupDrafter

        return LookupDrafter(self)

    def max_copy(self, match_length: int) -> int:
        """Return the most tokens to propose after a match of this length; 0: none."""
        if match_length < self.min_match:
            return 0
        if self.per_match is None:
            return self.draft_length
        return min(self.draft_length, self.per_match * match_length)

    def __str__(self) -> str:
        tokens = "1 token" if self.min_match == 1 else f"{self.min_match} tokens"
        growing = f", at most {self.per_match} per matched token" if self.per_match else ""
        return f"lookup: {tokens} must match, copies up to {self.draft_length}{growing}"
