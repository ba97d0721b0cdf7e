"""What a pass may see: windows measured in positions and not in slots, and the forms that attention
modules take.
"""

from __future__ import annotations

import pytest
import torch

from skipsearch.models import attention_masks
from skipsearch.models.families.table import FAMILIES
from skipsearch.models.kv_cache import PassPlan, Planner

PLANNER = Planner(64, torch.device("cpu"))


@pytest.mark.parametrize(("start", "tokens"), [(0, 12), (7, 1), (7, 5), (20, 3), (0, 1)])
def test_a_window_shows_the_last_keys_and_nothing_ahead(start: int, tokens: int) -> None:
    mask = attention_masks.with_window(PLANNER.plan_chain(start, tokens), 4)
    for row, position in enumerate(range(start, start + tokens)):
        expected = set(range(max(0, position - 3), position + 1))
        seen = (
            set(range(position + 1))
            if mask is None
            else set(mask[0, 0, row].nonzero()[:, 0].tolist())
        )
        assert seen == expected or (mask is None and start + tokens <= 4)


def test_a_window_that_reaches_over_everything_leaves_the_plan_as_it_is() -> None:
    prefill, later = PLANNER.plan_chain(0, 6), PLANNER.plan_chain(3, 3)
    assert attention_masks.with_window(prefill, 6) is None
    assert attention_masks.with_window(prefill, None) is None
    assert attention_masks.with_window(later, 6) is later.mask


def test_a_window_is_measured_in_positions_where_siblings_share_one() -> None:
    slots, positions = torch.tensor([[6, 7, 8, 9]]), torch.tensor([[6, 7, 7, 8]])
    shown = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    plan = PassPlan(positions, slots, 10, shown, 6)
    assert attention_masks.get_key_positions(plan)[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8]
    mask = attention_masks.with_window(plan, 3)
    assert mask is not None
    assert mask[0, 0, 3].nonzero()[:, 0].tolist() == [6, 7, 8, 9]  # position 8 sees 6, 7, 7 and 8
    assert mask[0, 0, 1].nonzero()[:, 0].tolist() == [
        5,
        6,
        7,
        8,
        9,
    ]  # what is ahead is the plan's to hide


def test_a_window_is_measured_in_positions_where_a_replay_writes_behind_the_text() -> None:
    """Two rows of text in slots 0 … 9, and queries at positions 6 and 7 (3 and 4) whose own K/V lie
    in slots 10 and 11.
    """
    slots, positions = torch.tensor([[10, 11], [10, 11]]), torch.tensor([[6, 7], [3, 4]])
    assert attention_masks.get_key_positions(PassPlan(positions, slots, 12, None, 10))[
        1
    ].tolist() == [*range(10), 3, 4]
    mask = attention_masks.with_window(
        PassPlan(positions, slots, 12, torch.ones(2, 1, 2, 12, dtype=torch.bool), 10), 4
    )
    assert mask is not None
    assert [row[0].nonzero()[:, 0].tolist() for row in mask[:, 0]] == [
        [*range(3, 12)],
        [*range(12)],
    ]


def test_an_additive_mask_is_zero_or_the_bias_where_it_may_look() -> None:
    plan = PLANNER.plan_chain(0, 3)
    low = torch.finfo(torch.float64).min
    assert attention_masks.make_additive(attention_masks.full_mask(plan), torch.float64)[
        0, 0
    ].tolist() == [[0, low, low], [0, 0, low], [0, 0, 0]]
    bias = attention_masks.make_alibi_bias(
        attention_masks.get_key_positions(plan), 2, torch.float64
    )
    assert bias.shape == (1, 2, 1, 3)
    assert (
        attention_masks.make_additive(attention_masks.full_mask(plan), torch.float64, bias)[
            0, 1, 2
        ].tolist()
        == bias[0, 1, 0].tolist()
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 71])
def test_alibi_is_what_transformers_makes_of_it(heads: int) -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 9, dtype=torch.long), heads, torch.float32)
    assert torch.equal(
        attention_masks.make_alibi_bias(torch.arange(9)[None], heads, torch.float32)[0], theirs
    )


def test_only_capped_scores_and_sinks_ask_for_eager_attention() -> None:
    assert [name for name, family in FAMILIES.items() if family.attn_implementation == "eager"] == [
        "gemma2",
        "gpt_oss",
    ]
