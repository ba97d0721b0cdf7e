"""The rows of a model's head for some tokens, from which a draft pass computes logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_NEW_ROWS = 256  # for which memory is allocated when rows are added


class HeadRows:
    """Rows of the head for a growing set of tokens. Each request has its own.

    A subclass stores the rows in the layout of its engine.
    """

    def __init__(self, vocab_size: int, token_ids: Tensor):
        """Begin with these tokens, [n] int64, whose rows the subclass has stored already."""
        self._tokens = token_ids  # [capacity], of which `count` are used
        self.count = len(token_ids)
        self._known = set[int]()  # tokens that were added; most rounds bring no other
        # [V] row of each token; -1: none
        self._row_of = torch.full((vocab_size,), -1, dtype=torch.int32, device=token_ids.device)
        self._row_of[token_ids] = torch.arange(
            self.count, dtype=torch.int32, device=token_ids.device
        )

    @property
    def vocab_size(self) -> int:
        return len(self._row_of)

    @property
    def token_ids(self) -> Tensor:
        """The token of each row, [count]."""
        return self._tokens[: self.count]

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the row of each token, which must have one."""
        return self._row_of[tokens].long()

    def add(self, tokens: Sequence[int]) -> None:
        """Add the rows of tokens that have none yet."""
        unknown = set(tokens) - self._known
        if not unknown:
            return
        self._known |= unknown
        ids = torch.tensor(sorted(unknown), device=self._row_of.device)
        new = ids[self._row_of[ids] < 0]
        if not len(new):
            return
        end = self.count + len(new)
        if end > len(self._tokens):
            capacity = max(end, min(self.vocab_size, len(self._tokens) + MIN_NEW_ROWS))
            self._tokens = F.pad(self._tokens, (0, capacity - len(self._tokens)))
            self._reserve(capacity)
        self._tokens[self.count : end] = new
        self._row_of[new] = torch.arange(
            self.count, end, dtype=torch.int32, device=self._row_of.device
        )
        self._store(new, self.count)
        self.count = end

    def _reserve(self, capacity: int) -> None:
        """Allocate memory for `capacity` rows."""
        raise NotImplementedError

    def _store(self, tokens: Tensor, first_row: int) -> None:
        """Store the rows of tokens, from row `first_row` on."""
        raise NotImplementedError


class TorchHeadRows(HeadRows):
    """Rows as torch stores a matrix. The first rows are shared between requests.

    weight: the head's, [V, H]. bias: [V] or None. shared_rows: `weight` of `token_ids`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, token_ids: Tensor, shared_rows: Tensor):
        super().__init__(len(weight), token_ids)
        self._weight, self._bias, self._shared_rows = weight, bias, shared_rows
        self._own_rows = weight[:0]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits, [..., H] -> [..., count]."""
        n_own = self.count - len(self._shared_rows)
        logits = F.linear(x, self._shared_rows)
        if n_own:
            logits = torch.cat([logits, F.linear(x, self._own_rows[:n_own])], dim=-1)
        return logits if self._bias is None else logits + self._bias[self.token_ids]

    def _reserve(self, capacity: int) -> None:
        n_rows = capacity - len(self._shared_rows) - len(self._own_rows)
        self._own_rows = F.pad(self._own_rows, (0, 0, 0, n_rows))

    def _store(self, tokens: Tensor, first_row: int) -> None:
        first = first_row - len(self._shared_rows)
        self._own_rows[first : first + len(tokens)] = self._weight[tokens]


def fill_up(token_ids: Iterable[int], vocab_size: int, multiple: int) -> list[int]:
    """Return the tokens and the lowest other ids, up to the next multiple of `multiple` tokens.

    There is at least one multiple.

    Raises: ValueError if a token is outside the vocabulary.
    """
    tokens = sorted(set(token_ids))
    if tokens and tokens[-1] >= vocab_size:
        raise ValueError(f"token {tokens[-1]} is outside a vocabulary of {vocab_size:,}")
    n_tokens = max(1, -(-len(tokens) // multiple)) * multiple
    missing = min(n_tokens, vocab_size) - len(tokens)
    present = set(tokens)
    others = (i for i in range(vocab_size) if i not in present)
    return sorted([*tokens, *(token for token, _ in zip(others, range(missing), strict=False))])
