"""Drafts from modules are lossless on every engine, greedy and sampled.

They draft alone and after lookup, in interleaved requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import pytest
from helpers.marks import engine_params
from helpers.modules import (
    module_folder,
    save_kangaroo,
    save_s3d,
    small_kangaroo,
    small_module,
    small_mtp,
    small_s3d,
)
from helpers.properties import with_examples
from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference, use_engine
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import DrafterSpec, Recipe, Siblings
from skipsearch.core.stats import DecodeStats, DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.models import ModelAdapter, adapt

from .adapted_checks import check_adapted, check_adapted_drafts, check_adapted_sampling
from .checks import FEW_TOKENS, PROMPTS, Drafting, assert_partly_accepted
from .kangaroo_checks import (
    check_kangaroo_drafts,
    check_kangaroo_passes,
    check_kangaroo_restricted,
    check_kangaroo_siblings,
    check_kangaroo_side_by_side,
)
from .mtp_checks import check_mtp_drafts, check_mtp_siblings, check_mtp_turns
from .prefix_checks import check_prefixes
from .s3d_checks import (
    TREE,
    check_s3d_drafts,
    check_s3d_restricted,
    check_s3d_tree_sampling,
    check_s3d_trees,
)
from .sampling_checks import Warp, check_sampling
from .trained_checks import (
    check_adapted_committed,
    check_enumerated,
    check_every_prompt,
    check_kangaroo_committed,
    check_mtp_committed,
    check_s3d_committed,
    small_specs,
)

NATIVE = ("native", "native-8bit-float-activations")
CHECKS = (
    check_adapted,
    check_adapted_drafts,
    check_adapted_committed,
    check_kangaroo_drafts,
    check_kangaroo_restricted,
    check_kangaroo_siblings,
    check_kangaroo_side_by_side,
    check_kangaroo_committed,
    check_mtp_drafts,
    check_mtp_siblings,
    check_mtp_turns,
    check_mtp_committed,
    check_s3d_drafts,
    check_s3d_restricted,
    check_s3d_trees,
    check_s3d_committed,
)
trained = st.sampled_from([0.0, 0.1, 0.5, 30.0]).flatmap(
    lambda noise: st.sampled_from(
        [
            small_module(noise),
            small_kangaroo("attention", noise),
            small_kangaroo("layer", noise),
            small_mtp(noise),
            small_s3d(),
            small_s3d(2),
        ]
    )
)
exits = st.just(make_exit("fixed")) | st.floats(0, 1).map(
    lambda t: make_exit("confidence", threshold=t)
)
lookups = st.none() | st.builds(Lookup, min_match=st.integers(1, 3), draft_length=st.integers(1, 6))
siblings = st.none() | st.builds(Siblings, below=st.floats(0, 1), most=st.integers(1, 3))
requests = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS)
        | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
        st.integers(1, 18),
    ),
    min_size=2,
    max_size=3,
)


@pytest.fixture(
    params=engine_params(
        "native", thorough=("hf", "lean", "native-8bit-float-activations"), slow=("graph",)
    )
)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_engine(request.param):
        yield request.param


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes_on_every_engine(check, engine: str) -> None:
    stats = check()
    if isinstance(stats, DecodeStats):
        assert_partly_accepted(stats)


def fuzzed(times: int) -> dict[str, Fuzz]:
    """Decode random recipes and requests on the current engine; return counts by drafter kind."""
    found = defaultdict[str, Fuzz](Fuzz)
    model, full = tiny_model_and_reference()

    @with_examples(times)
    @given(
        trained,
        st.integers(1, 6),
        exits,
        lookups,
        siblings,
        st.sampled_from([None, FEW_TOKENS]),
        st.sampled_from(["stored", "int8", "int4"]),
        st.booleans(),
        requests,
    )
    def holds(
        spec: DrafterSpec,
        length: int,
        policy: object,
        lookup: Lookup | None,
        siblings: Siblings | None,
        vocabulary: Vocabulary | None,
        weights: str,
        guarded: bool,
        several: list[tuple[tuple[int, ...], int]],
    ) -> None:
        more = (
            {"tree": TREE if siblings else None}
            if spec.kind == "s3d"
            else {"exit": policy, "siblings": siblings}
        )
        more |= {"draft_length": length, "vocabulary": vocabulary}
        if spec.kind == "mtp" and model.spec.engine == "native":
            more["weights"] = weights
        drafter = spec.model_copy(update=more)
        recipe = Recipe((drafter,) if lookup is None else (lookup, drafter))
        prices = [DrafterCost(0.4, 1.2, 3.0, 0.1)] * len(recipe.drafters) if guarded else ()
        decoder = Decoder(model, recipe, drafter_costs=prices, module_folders=[module_folder()])
        read: list[list[int]] = [[] for _ in several]
        total = found[recipe.shape]
        for chunks in zip_longest(*(decoder.stream(prompt, n) for prompt, n in several)):
            for tokens, chunk in zip(read, chunks, strict=True):
                tokens.extend(chunk.tokens if chunk else ())
                total.stats += chunk.stats if chunk and chunk.stats else DecodeStats()
        assert read == [full.greedy(prompt, n) for prompt, n in several]
        total.requests += len(several)

    holds()
    return found


@dataclass
class Fuzz:
    requests: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)


def test_interleaved_requests_get_the_full_models_own_tokens_for_every_module_and_setting(
    engine: str,
) -> None:
    found = fuzzed(20)
    assert_partly_accepted(sum((total.stats for total in found.values()), DecodeStats()))


@pytest.mark.slow
def test_that_holds_of_thousands_of_requests(engine: str) -> None:
    """Run it by hand, in float64: `pytest -m slow tests/decoding/test_trained_drafts.py -s`."""
    found = fuzzed(1300)
    assert set(found) == {
        "adapted",
        "kangaroo",
        "mtp",
        "s3d",
        "lookup,adapted",
        "lookup,kangaroo",
        "lookup,mtp",
        "lookup,s3d",
    }
    for shape, total in sorted(found.items()):
        assert_partly_accepted(total.stats)
        print(
            f"\n{engine}, {shape}: {total.requests} requests, {total.stats.drafted} drafted, "
            f"{total.stats.accepted} accepted",
            end="",
        )
    print(f"\n{engine}: {sum(total.requests for total in found.values())} requests, none wrong")


@pytest.mark.parametrize("name", ["adapted", "kangaroo", "mtp", "s3d", "s3d, tree"])
def test_every_text_has_the_full_models_own_probability(name: str) -> None:
    for found in check_enumerated([name]):
        assert found.ways > len(found.texts), "several ways lead to a text"


def test_greedy_text_behind_every_short_prompt_is_the_full_models_own() -> None:
    check_every_prompt(longest=2)


@pytest.mark.parametrize(
    "engine",
    engine_params(
        thorough=("hf", "native"), slow=("lean", "graph", "native-8bit-float-activations")
    ),
    indirect=True,
)
@pytest.mark.parametrize("name", small_specs())
def test_that_holds_of_every_method_on_every_engine(name: str, engine: str) -> None:
    check_enumerated([name])
    for temperature in (0.8, 1.5):
        check_enumerated([name], Warp(temperature), 3)
    check_every_prompt([name])


@pytest.mark.slow
@pytest.mark.parametrize("name", small_specs())
def test_that_holds_without_limits_of_drafts_of_two_tokens(name: str, engine: str) -> None:
    """All tokens of the vocabulary are possible, so thousands of outcomes are enumerated.

    Run it by hand, with `-s`.
    """
    alone, behind = check_enumerated([name], Warp(1.5))
    print(
        f"\n{engine}, {name}: {len(alone.texts)} texts in {alone.ways} ways, {behind.ways} behind "
        "lookup"
    )


@pytest.mark.parametrize(
    "spec",
    [small_module(0.1, 4), small_kangaroo("attention", 0.1, 4), small_mtp(0.1, 4), small_s3d(2)],
    ids=lambda spec: spec.kind,
)
def test_exact_passes_verify_their_drafts_too(spec: DrafterSpec) -> None:
    model, full = tiny_model_and_reference()
    found = Decoder(model, Recipe((spec,)), exact=True, module_folders=[module_folder()]).generate(
        PROMPTS[0], 16
    )
    assert found.tokens == full.greedy(PROMPTS[0], 16)
    assert found.stats.drafted


def test_kangaroos_drafts_are_verified_from_the_exit_layer_on() -> None:
    check_kangaroo_passes()


@pytest.mark.parametrize("siblings", [None, Siblings(below=1.0, most=2)], ids=["chain", "siblings"])
def test_a_prompt_that_goes_on_from_the_last_one_drafts_as_if_it_were_the_first(
    siblings: Siblings | None, engine: str
) -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(
        model,
        Recipe((small_kangaroo("attention", 0.1, 4).model_copy(update={"siblings": siblings}),)),
        module_folders=[module_folder()],
    )
    session, prompt = decoder.new_session(), list(PROMPTS[0])
    for _ in range(3):
        found, alone = session.generate(prompt, 8), decoder.generate(prompt, 8)
        assert found.tokens == alone.tokens == full.greedy(prompt, 8)
        assert (found.stats.rounds, found.stats.drafted) == (
            alone.stats.rounds,
            alone.stats.drafted,
        )
        prompt += [*found.tokens, 5]
    assert found.stats.cached_tokens


@dataclass(frozen=True)
class HeadDrafting(Drafting):
    def decoder(self, model: ModelAdapter) -> Decoder:
        recipe = Recipe((Lookup(min_match=1, draft_length=3), small_mtp(0.1, 4)))
        return Decoder(model, recipe, module_folders=[module_folder()])


def test_any_chat_that_a_head_drafts_gets_the_answers_of_a_fresh_decoder(engine: str) -> None:
    assert_partly_accepted(check_prefixes(drafting=HeadDrafting()))


def test_a_head_drafts_after_a_prompt_in_parts_as_after_one_pass(engine: str) -> None:
    model, full = tiny_model_and_reference()
    decoder, prompt = HeadDrafting().decoder(model), PROMPTS[2]
    streams = [
        [*decoder.stream(prompt, 20, trace=True, prompt_rows=n_rows)] for n_rows in (None, 2)
    ]
    whole, parts = ([chunk for chunk in stream if chunk.tokens] for stream in streams)
    assert len(streams[1]) - len(parts) == (len(prompt) - 1) // 2
    assert [chunk.proposal for chunk in parts] == [chunk.proposal for chunk in whole]
    assert [token for chunk in parts for token in chunk.tokens] == full.greedy(prompt, 20)
    stats = parts[-1].stats
    assert stats is not None
    assert_partly_accepted(stats)


def test_what_kangaroo_reads_of_the_verify_pass_is_no_choosing_of_masks() -> None:
    model, _ = tiny_model_and_reference()
    stats = (
        Decoder(model, Recipe((small_kangaroo(),)), module_folders=[module_folder()])
        .generate(PROMPTS[2], 20)
        .stats
    )
    assert 0 == stats.mask_selection_share < stats.watching_seconds < stats.decode_seconds


def test_two_drafters_that_watch_leave_each_other_the_states_they_want() -> None:
    model, full = tiny_model_and_reference()
    recipe = Recipe(
        (
            small_kangaroo("attention", 0.1, 3, 0.9),
            CLaSp(skip=2, interval=1, draft_length=4, exit=make_exit("fixed")),
        )
    )
    total = sum(
        (
            Decoder(model, recipe, module_folders=[module_folder()]).generate(prompt, 18).stats
            for prompt in PROMPTS
        ),
        DecodeStats(),
    )
    assert [
        Decoder(model, recipe, module_folders=[module_folder()]).generate(prompt, 18).tokens
        for prompt in PROMPTS
    ] == [full.greedy(prompt, 18) for prompt in PROMPTS]
    assert_partly_accepted(total)
    assert 0 < total.choosing_seconds < total.watching_seconds, "of which only one chooses masks"


@pytest.mark.thorough
def test_samples_of_adapted_drafts_are_distributed_as_the_full_models_own() -> None:
    assert_partly_accepted(check_adapted_sampling())


@pytest.mark.thorough
def test_samples_of_s3ds_drafts_are_distributed_as_the_full_models_own() -> None:
    hf = tiny_llama(3, vocab=8, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    recipe = Recipe(
        (save_s3d(model, SkipMask(3, (1,), (1,)), 1, "sampling-s3d.safetensors", 3, seed=-5),)
    )
    assert_partly_accepted(
        check_sampling(
            Warp(0.8),
            samples=600,
            model=model,
            recipe=recipe,
            length=3,
            prompt=(2, 0, 2, 0),
            next_logits=full.next_logits,
            modules=[module_folder()],
        )
    )


@pytest.mark.thorough
def test_samples_of_s3ds_trees_are_distributed_as_the_full_models_own() -> None:
    assert_partly_accepted(check_s3d_tree_sampling())


@pytest.mark.thorough
def test_samples_of_kangaroos_drafts_are_distributed_as_the_full_models_own() -> None:
    hf = tiny_llama(3, vocab=5, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    recipe = Recipe(
        (
            Lookup(min_match=2, draft_length=1),
            save_kangaroo(model, 1, "attention", 0.3, "sampling-early.safetensors", 2),
        )
    )
    assert_partly_accepted(
        check_sampling(
            Warp(0.8),
            samples=600,
            model=model,
            recipe=recipe,
            length=3,
            prompt=(2, 0, 2, 0),
            next_logits=full.next_logits,
            modules=[module_folder()],
        )
    )
