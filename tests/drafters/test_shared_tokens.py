"""Which vocabularies a draft model may have, and how its tokens are translated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.table_model import TableModel

from skipsearch.core.reading import Vocabulary
from skipsearch.drafters import Draft
from skipsearch.drafters.draft_model.shared_tokens import match_tokens
from skipsearch.errors import MaskError, ModelError


class Names:
    """A tokenizer with these tokens."""

    def __init__(self, names: str):
        self.names = names

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names) if name != "."}


def model_of(names: str | None, size: int | None = None) -> Any:
    """A model of these tokens. A dot is an id without a token. size: ids, unused ones included."""
    model = TableModel(vocab=size or len(names or ""))
    model.tokenizer = None if names is None else Names(names)
    return model


@pytest.mark.parametrize(
    ("own", "full"),
    [
        (("abcd", 4), ("abcd", 4)),
        (("abcd", 6), ("abcd", 4)),
        (("abcd", 4), ("abcd", 6)),
        (("abcdef", 6), ("abcd", 4)),
        (("abcd", 4), ("abcdef", 6)),
        (("ab.d", 4), ("ab.d", 8)),
        ((None, 5), (None, 5)),
        ((None, 5), ("abcde", 5)),
    ],
    ids=str,
)
def test_equal_tokens_keep_their_ids(
    own: tuple[str | None, int], full: tuple[str | None, int]
) -> None:
    tokens = match_tokens(model_of(*own), model_of(*full))
    assert tokens.count == min(own[1], full[1])
    draft = tokens.to_full(Draft(torch.tensor([2, 0]), torch.eye(own[1])[[2, 0]]))
    assert draft.tokens.tolist() == [2, 0]
    assert draft.probs is not None
    assert draft.probs.shape == (2, full[1])
    assert draft.probs.argmax(-1).tolist() == [2, 0]
    assert tokens.to_own([0, full[1] - 1])[0] == 0
    assert max(tokens.to_own(range(full[1]))) < own[1], "a token that it lacks is read as another"


def test_tokens_under_another_order_are_translated_both_ways() -> None:
    tokens = match_tokens(model_of("cadb", 6), model_of("abcdef"))
    assert tokens.count == 4
    assert tokens.to_own([0, 1, 2, 3]) == [1, 3, 0, 2]
    draft = tokens.to_full(Draft(torch.tensor([0, 3]), torch.eye(6)[[0, 3]]))
    assert draft.tokens.tolist() == [2, 1]
    assert draft.probs is not None
    assert draft.probs.argmax(-1).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("own", "full", "sentence"),
    [
        ("abxd", "abcd", r"'c' has the id 2 in table and no id in table"),
        ("bacd", "abcx", r"'x' has the id 3 in table and no id in table"),
        ("abdec", "abcd", r"'c' has the id 2 in table and the id 4 in table"),
        ("ab.d", "abcd", r"'c' has the id 2 in table and no id in table"),
    ],
)
def test_another_vocabulary_is_refused_by_its_first_different_token(
    own: str, full: str, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        match_tokens(model_of(own), model_of(full))


def test_without_a_tokenizer_vocabularies_of_two_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.* 5 and 6 tokens"):
        match_tokens(model_of(None, 5), model_of(None, 6))


def test_a_draft_vocabulary_has_the_full_models_ids() -> None:
    names = "".join(map(chr, range(200, 600)))
    tokens = match_tokens(model_of(names[::-1]), model_of(names))
    own = tokens.to_own_vocabulary(Vocabulary(lowest=2, tokens="10"))
    assert own is not None
    assert own.token_ids() == (389, 398, 399)
    assert tokens.to_own_vocabulary(None) is None
    assert tokens.to_own_vocabulary(Vocabulary(lowest=399, tokens="")) is None, "nearly all"
    with pytest.raises(MaskError, match="token 400 is outside"):
        tokens.to_own_vocabulary(Vocabulary(lowest=0, tokens="400"))
