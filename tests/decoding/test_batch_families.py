"""Batches over models of other families, on other engines, with drafts of every kind.

Each row gets the tokens that it gets alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet
from helpers.marks import slow, thorough
from helpers.threads import one_thread
from helpers.tiny import FullModel, tiny_model_and_reference, use_engine, with_eos
from models.every_class import build
from models.tiny import FUSED, TINY, adapted, hf_model, new_hf_model
from models.tiny import VOCAB as FAMILY_VOCAB

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.errors import DecodeError
from skipsearch.models import ModelAdapter, adapt

from .batch_checks import GUESTS, LOOKUP, check_batch, guests, trained
from .checks import PROMPTS, Drafting, assert_partly_accepted
from .recurrent_checks import CHAINS, KINDS, recurrent_world

__all__ = ["one_thread"]

QUICK = ("falcon-rw", "mistral-window", "qwen3:lean")


def draftings(layers: int) -> tuple[Drafting, ...]:
    return (
        Drafting(SkipMask(layers, (1,)), 3),
        Drafting(SkipMask(layers, (0,), (2,)), 4, siblings=Siblings(below=0.6, most=2)),
        Drafting(SkipMask(layers, mlp=(1,)), 3, lookup=LOOKUP, guarded=True),
    )


def check_family(model: ModelAdapter, full: FullModel) -> DecodeStats:
    total = DecodeStats()
    for seed, drafting in enumerate(draftings(model.spec.n_layers)):
        asked = guests(seed + 10, 8, 14, FAMILY_VOCAB, model.spec.context_length)
        total += check_batch(asked, drafting, rows=4, world=(with_eos(model), full))
    assert_partly_accepted(total)
    return total


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *thorough(*(name for name in TINY if name not in QUICK)),
        *slow(*(name for name in FUSED if name not in QUICK)),
    ],
)
def test_rows_of_every_family_get_what_they_get_alone(name: str) -> None:
    """Families differ in windows, ALiBi, learned positions, caps, experts and norms.

    They run as modules and fused.
    """
    check_family(adapted(name), FullModel(hf_model(name)))


@pytest.mark.parametrize(
    "family",
    [
        "bloom",
        *thorough("starcoder2", "mimo_v2_flash"),
        *slow("deepseek_v3", "llama4_text", "ctrl"),
    ],
)
def test_rows_of_models_read_from_their_structure_too(family: str) -> None:
    hf = build(family)
    model = adapt(hf)
    assert model.spec.ragged_batches
    check_family(model, FullModel(hf))


def test_models_with_one_bias_for_all_rows_run_row_by_row() -> None:
    hf = build("mpt")
    model = adapt(hf)
    assert not model.spec.ragged_batches
    total = check_batch(
        guests(10, 8, 14, FAMILY_VOCAB, model.spec.context_length),
        draftings(3)[0],
        world=(with_eos(model), FullModel(hf)),
    )
    assert_partly_accepted(total)


@pytest.mark.parametrize("family", ["lfm2", *thorough(*(name for name in KINDS if name != "lfm2"))])
def test_rows_of_recurrent_models_join_and_leave(family: str) -> None:
    total = sum(
        (
            check_batch(
                guests(seed + 20, 6, 12), CHAINS[seed], rows=3, world=recurrent_world(family)
            )
            for seed in (0, 2)
        ),
        DecodeStats(),
    )
    assert_partly_accepted(total)


def test_what_recurrent_models_do_not_draft_is_refused_for_batches_too() -> None:
    model, _ = recurrent_world("lfm2")
    with pytest.raises(DecodeError, match="leave siblings out"):
        draftings(5)[1].decoder(model).new_batch(2)


# --- drafts of every kind


# On engines except hf. `make test` tries them on native code alone.
ALWAYS = ("adapted with siblings", "kangaroo", "s3d with a tree", "clasp 0")


def cases(names: Sequence[str], engines: Sequence[str]) -> list[ParameterSet]:
    """Return (engine, name) of each case."""
    return [
        pytest.param(
            engine,
            name,
            id=f"{engine}-{name}",
            marks=[
                *(
                    []
                    if name in ALWAYS and engine == "native"
                    else [
                        pytest.mark.thorough
                        if engine == "hf" or name in ALWAYS
                        else pytest.mark.slow
                    ]
                ),
                *([pytest.mark.xdist_group(engine)] if engine == "native" else []),
            ],
        )
        for engine in engines
        for name in names
    ]


@pytest.mark.parametrize(
    ("engine", "name"), cases(list(trained()), ("hf", "lean", "native", "graph"))
)
def test_rows_with_any_drafter_get_what_they_get_alone(engine: str, name: str) -> None:
    with use_engine(engine):
        assert_partly_accepted(
            check_batch(drafting=trained()[name], world=tiny_model_and_reference())
        )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", "lean", "native", "graph"])
def test_hundreds_of_batches_with_any_drafter(engine: str) -> None:
    total, names, seen = DecodeStats(), list(trained()), Counter[str]()
    with use_engine(engine):
        world = tiny_model_and_reference()
    for seed in range(150):
        drafting, eos = trained()[names[seed % len(names)]], (7, 41) if seed % 3 == 0 else ()
        total += check_batch(
            guests(seed, 10), drafting, rows=1 + seed * 5 % 8, eos=eos, world=world, seen=seen
        )
    print(
        f"{engine}: {dict(seen)}, {total.drafted} drafted, {total.accepted} accepted, "
        f"{total.rejecting_rounds} rejections"
    )
    assert_partly_accepted(total)


@pytest.mark.parametrize(("engine", "name"), cases(ALWAYS, ("hf", "native", "lean")))
def test_exact_rows_with_any_drafter(engine: str, name: str) -> None:
    with use_engine(engine):
        assert check_batch(
            GUESTS[:4], replace(trained()[name], exact=True), world=tiny_model_and_reference()
        ).drafted


@pytest.mark.parametrize("name", ["gemma2", "olmo3:lean", *thorough("qwen3", "gpt_neox")])
def test_exact_rows_of_other_families_are_the_same_to_the_bit_in_bfloat16(name: str) -> None:
    hf = new_hf_model(name.partition(":")[0]).bfloat16()
    model = with_eos(adapt(hf, fuse=name.endswith(":lean")))
    plain = Decoder(model, exact=True)
    drafted = Decoder(model, SkipMask(model.spec.n_layers, (1,)), draft_length=3, exact=True)
    asked = [
        Request([t % FAMILY_VOCAB for t in prompt], 12 + 3 * i) for i, prompt in enumerate(PROMPTS)
    ]
    found = drafted.generate_batch(asked, 3)
    assert [one.tokens for one in found] == [plain.generate(one).tokens for one in asked]
    assert_partly_accepted(sum((one.stats for one in found), DecodeStats()))
