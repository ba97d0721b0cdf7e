"""`SkipMask`: a value that says which of the 2L sub-layers a draft leaves out."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask, format_sublayer_count
from skipsearch.errors import MaskError, SkipSearchError

masks = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.integers(0, 1), min_size=2 * n, max_size=2 * n).map(SkipMask.from_bits)
)


@with_examples(100)
@given(masks)
def test_bits_and_sublayers_are_two_spellings_of_a_mask(mask: SkipMask) -> None:
    assert (
        SkipMask.from_bits(mask.bits)
        == mask
        == SkipMask.from_sublayers(mask.n_layers, mask.sublayers)
    )
    assert len(mask.bits) == 2 * mask.n_layers
    assert sum(mask.bits) == len(mask.sublayers) == mask.n_skipped == len(mask.attn) + len(mask.mlp)
    assert hash(SkipMask.from_bits(mask.bits)) == hash(mask)


def test_sublayers_are_counted_as_the_model_runs_them() -> None:
    mask = SkipMask(3, attn=(0, 2), mlp=(1,))
    assert mask.bits == (
        1,
        0,
        0,
        1,
        1,
        0,
    )  # attention 0, MLP 0, attention 1, MLP 1, attention 2, MLP 2
    assert mask.sublayers == {0, 3, 4}
    assert str(mask) == ".#.\n#.#"


@with_examples(100)
@given(masks, st.data())
def test_flipping_changes_exactly_the_named_sublayers_and_flipping_again_undoes_it(
    mask: SkipMask, data: st.DataObject
) -> None:
    flips = data.draw(st.sets(st.integers(0, 2 * mask.n_layers - 1)))
    flipped = mask.flip(*flips)
    assert {
        i for i, (a, b) in enumerate(zip(mask.bits, flipped.bits, strict=True)) if a != b
    } == flips
    assert flipped.flip(*flips) == mask


def test_indices_are_kept_sorted_however_they_come() -> None:
    assert SkipMask(5, [4, 1], {3, 0}) == SkipMask(5, (1, 4), (0, 3))  # type: ignore[arg-type]
    assert SkipMask.from_layers(5, iter([3, 1])) == SkipMask(5, (1, 3), (1, 3))


def test_nothing_skipped_is_a_mask_and_so_is_everything() -> None:
    assert SkipMask(4).bits == (0,) * 8
    assert SkipMask.from_layers(4, range(4)).bits == (1,) * 8


def test_a_mask_is_a_value() -> None:
    mask = SkipMask(4, (1,), (2,))
    with pytest.raises(FrozenInstanceError):
        mask.attn = ()  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask
    assert len({mask, SkipMask(4, (1,), (2,)), SkipMask(5, (1,), (2,))}) == 2


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: SkipMask(4, (4,)), r"attn layer 4 is outside 0\.\.3"),
        (lambda: SkipMask(4, (), (-1,)), r"mlp layer -1 is outside 0\.\.3"),
        (lambda: SkipMask(4, (1, 1)), "attn layer 1 is listed more than once"),
        (lambda: SkipMask(4, (1.0,)), "attn index 1.0 is not a whole number"),  # type: ignore[arg-type]
        (lambda: SkipMask(4, (True,)), "attn index True is not a whole number"),
        (lambda: SkipMask(4, ("1",)), "attn index '1' is not a whole number"),  # type: ignore[arg-type]
        (lambda: SkipMask(0), "n_layers is 0"),
        (lambda: SkipMask(True), "n_layers is True"),
        (lambda: SkipMask.from_bits([0, 1, 0]), "2·L bits"),
        (lambda: SkipMask.from_bits([0, 2]), "bits of 0 or 1"),
        (lambda: SkipMask.from_bits([0, 0.5]), "bits of 0 or 1"),
        (lambda: SkipMask.from_bits([]), "n_layers is 0"),
        (lambda: SkipMask.from_sublayers(2, [4]), r"attn layer 2 is outside 0\.\.1"),
        (lambda: SkipMask(2).flip(-1), "mlp layer -1 is outside"),
    ],
)
def test_what_no_model_can_have_is_refused_in_one_sentence(build: Any, sentence: str) -> None:
    with pytest.raises(MaskError, match=sentence) as refused:
        build()
    assert isinstance(refused.value, SkipSearchError)
    assert isinstance(refused.value, ValueError)
    assert "\n" not in str(refused.value)


def test_sublayers_are_counted_in_words() -> None:
    assert [format_sublayer_count(n) for n in (0, 1, 2)] == [
        "0 sub-layers",
        "1 sub-layer",
        "2 sub-layers",
    ]
