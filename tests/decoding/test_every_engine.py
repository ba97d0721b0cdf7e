"""The checks of this folder and the planted bugs, on each engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.marks import engine_params
from helpers.properties import with_examples
from helpers.tiny import (
    NATIVE_8BIT,
    NATIVE_INT8_KV,
    FullModel,
    tiny_model_and_reference,
    use_engine,
)
from hypothesis import given

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.errors import ModelError

from .checks import (
    MASKS,
    PROMPTS,
    Drafting,
    assert_partly_accepted,
    check_endings,
    check_greedy,
    check_streams_side_by_side,
)
from .count_checks import check_counts
from .planted import BUGS
from .planted.cache import check_greedy_on_padded_passes
from .test_greedy_losslessness import draftings, requests

# These bugs are planted into `KVCache.write`, which native code does not go through: it writes K/V
# itself.
IN_WRITE = {
    "nan_left_in_an_unwritten_slot",
    "stale_kv_at_accepted_positions",
    "full_model_kv_missing",
}
NATIVE = ("native", NATIVE_8BIT, NATIVE_INT8_KV)
CHECKS = (
    check_greedy,
    check_greedy_on_padded_passes,
    check_streams_side_by_side,
    check_endings,
    check_counts,
)


@pytest.fixture(
    params=engine_params("lean", "native", NATIVE_8BIT, thorough=("graph", NATIVE_INT8_KV)),
    autouse=True,
)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_engine(request.param):
        yield request.param


def test_the_engine_of_the_moment_is_used(engine: str) -> None:
    model, full = tiny_model_and_reference()
    assert (
        type(model)
        .__name__.lower()
        .startswith("fused" if engine == "lean" else engine.partition("-")[0])
    )
    assert model.spec.quantization == (engine if engine.startswith("native-") else None)
    assert isinstance(full, FullModel)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes(check) -> None:
    check()


@pytest.mark.parametrize("bug", [name for name, (_, check) in BUGS.items() if check in CHECKS])
def test_a_check_fails_while_the_bug_is_planted(bug: str, engine: str) -> None:
    if engine in NATIVE and bug in IN_WRITE:
        pytest.skip(f"{engine} code writes K/V itself")
    plant, check = BUGS[bug]
    with plant(), pytest.raises((AssertionError, ModelError)):
        check()


def test_greedy_tokens_are_the_full_models_own_whatever_is_asked() -> None:
    total = DecodeStats()

    @with_examples(25)
    @given(draftings, requests)
    def holds(drafting: Drafting, request: tuple[tuple[int, ...], int]) -> None:
        nonlocal total
        total += check_greedy([drafting], [request])

    holds()
    assert_partly_accepted(total)


def test_a_text_that_crosses_several_sizes_of_the_key_buffer_is_exact() -> None:
    """The buffer has 256 slots, then 512.

    An engine with static shapes changes its recorded passes within the request.
    """
    model, full = tiny_model_and_reference()
    prompt = tuple(i * 7 % 64 for i in range(235))
    decoder = Decoder(model, MASKS[0], draft_length=5)
    assert decoder.generate(prompt, 20).tokens == full.greedy(prompt, 20)
    assert decoder.generate(PROMPTS[0], 20).tokens == full.greedy(PROMPTS[0], 20)
