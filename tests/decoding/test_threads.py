"""One model serves several threads, on every engine: all requests get the right tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.marks import engine_params
from helpers.tiny import tiny_model_and_reference, use_engine

from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models import ModelAdapter

from .checks import MASKS, PROMPTS

THREADS, REQUESTS = (
    4,
    26,
)  # of each thread: with one decoder and with four, 208 generations of each recipe
LONG = tuple(
    i * 7 % 64 for i in range(180)
)  # its cache is larger than the others', so that tables grow while others read them
RECIPES = {
    "plain": Recipe(),
    "lookup,skip": Recipe(
        (
            Lookup(min_match=1, draft_length=4),
            Skip.from_mask(MASKS[0], 5, Adaptive(threshold=0.3, step=0.5)),
        )
    ),
}


@pytest.fixture(params=engine_params("native", thorough=("hf", "lean", "graph")), autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns within a pass, not once in a while
    with use_engine(request.param):
        yield request.param
    sys.setswitchinterval(before)


def requests(thread: int) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts and lengths, in another order for each thread.

    The long request runs while the other threads work.
    """
    prompts = [*PROMPTS, LONG]
    return [(prompts[(thread + n) % len(prompts)], 4 + (thread + n) % 9) for n in range(REQUESTS)]


def together(decoders: Sequence[Decoder]) -> list[list[list[int]]]:
    """Run all threads at once; return the tokens of each thread's requests."""

    def work(thread: int) -> list[list[int]]:
        return [decoders[thread].generate(prompt, n).tokens for prompt, n in requests(thread)]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def one_for_all(model: ModelAdapter, recipe: Recipe) -> list[Decoder]:
    return [Decoder(model, recipe)] * THREADS


def one_each(model: ModelAdapter, recipe: Recipe) -> list[Decoder]:
    return [Decoder(model, recipe) for _ in range(THREADS)]


@pytest.mark.parametrize("decoders", [one_for_all, one_each])
@pytest.mark.parametrize("shape", RECIPES)
def test_threads_get_the_tokens_they_would_get_alone(
    shape: str, decoders: Callable[[ModelAdapter, Recipe], list[Decoder]]
) -> None:
    model, full = tiny_model_and_reference()
    for thread, found in enumerate(together(decoders(model, RECIPES[shape]))):
        assert found == [full.greedy(prompt, n) for prompt, n in requests(thread)]
