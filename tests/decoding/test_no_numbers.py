"""A model whose logits are not numbers ends every request with an error that names it.

A draft whose logits are not numbers costs its round and nothing else.
"""

from __future__ import annotations

import pytest
import torch
from helpers.table_model import TABLE_LAYERS, TableModel
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.decoding.acceptance import accept_greedy, accept_sampled
from skipsearch.errors import ModelError
from skipsearch.models import adapt

from .checks import MASKS, PROMPTS


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mask", [None, SkipMask(LAYERS, (1,))])
def test_a_model_with_such_weights_is_named_in_one_sentence(
    value: float, temperature: float, mask: SkipMask | None
) -> None:
    hf = tiny_llama()
    with torch.no_grad():
        hf.lm_head.weight[7, 3] = value
    with pytest.raises(
        ModelError, match=r"logits are not numbers .*its weights are damaged.*--dtype"
    ):
        Decoder(adapt(hf), mask).generate(PROMPTS[0], 12, temperature=temperature)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_behind_the_first_rejection_chooses_nothing_and_does_not_count(row: int) -> None:
    logits = torch.eye(5)[[1, 2, 3]] * 9
    logits[row] = torch.nan
    drafted = torch.tensor([1, 4])  # the second is rejected, so row 1 chooses
    if row == 2:
        assert accept_greedy(drafted, logits) == (1, 2)
        assert accept_sampled(drafted, None, (logits * 99).softmax(-1), torch.Generator()) == (1, 2)
        return
    with pytest.raises(ModelError, match="not numbers"):
        accept_greedy(drafted, logits)
    with pytest.raises(ModelError, match="not numbers"):
        accept_sampled(drafted, None, (logits * 99).softmax(-1), torch.Generator())


def test_a_logit_of_minus_infinity_only_rules_a_token_out() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert accept_greedy(torch.tensor([], dtype=torch.int64), logits) == (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_thinned_model_that_overflows_costs_its_draft_and_nothing_else(
    temperature: float,
) -> None:
    class Overflowing(TableModel):
        thinned = False

        def block(self, i, h, cache, plan, *, attn=True, mlp=True) -> Tensor:
            self.thinned = not (attn and mlp) or (self.thinned and i > 0)
            return super().block(i, h, cache, plan, attn=attn, mlp=mlp)

        def head(self, h) -> Tensor:
            return super().head(h) * (torch.nan if self.thinned else 1)

    mask = SkipMask(TABLE_LAYERS, mlp=(1,))
    result = Decoder(Overflowing(), mask, draft_length=3).generate(
        (2, 0), 12, temperature=temperature
    )
    assert len(result.tokens) == 12
    assert result.stats.drafted > 0
    if temperature == 0:
        assert result.tokens == Decoder(TableModel()).generate((2, 0), 12).tokens


def test_an_unharmed_model_is_not_accused() -> None:
    model, full = tiny_model_and_reference()
    assert Decoder(model, MASKS[0]).generate(PROMPTS[0], 8).tokens == full.greedy(PROMPTS[0], 8)
