"""Every causal language model class of the installed transformers is decoded exactly or refused for
a reason from a short list.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from .every_class import (
    GOLDEN,
    REASONS,
    Walked,
    families,
    golden,
    plain_ones,
    recurrent_ones,
    table,
    walk,
)

PARTS = 8
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_each_is_exact_or_refused_with_a_reason(part: int) -> None:
    """Greedy under random masks in fp64, compared with the model's own `generate`."""
    found = [walk(family) for family in families()[part::PARTS]]
    print(table(found))
    assert not [one for one in found if one.outcome == "wrong"]
    assert not [one for one in found if one.outcome == "refused" and one.how not in REASONS]
    if json.loads(GOLDEN.read_text("utf-8"))["transformers"] == transformers.__version__:
        known = {one.family: one for one in golden()}
        assert [
            (one.family, one.outcome, one.how) for one in found if one.outcome != "unbuilt"
        ] == [
            (one.family, known[one.family].outcome, known[one.family].how)
            for one in found
            if one.outcome != "unbuilt"
        ]
    exact = [one for one in found if one.outcome == "exact"]
    assert sum(one.accepted for one in exact) > len(exact)
    assert sum(one.rejected for one in exact) > len(exact)


def test_most_of_the_plain_ones_and_many_recurrent_ones_are_exact() -> None:
    """Plain: built tiny, continues text and keeps K/V alone."""
    plain, recurrent = plain_ones(golden()), recurrent_ones(golden())
    exact = {one.family for one in plain if one.outcome == "exact"}
    for kind, found in (("plain", plain), ("recurrent", recurrent)):
        others = [f"{one.family} ({one.how})" for one in found if one.outcome != "exact"]
        print(f"{kind}: {len(found) - len(others)} of {len(found)} exact; not {', '.join(others)}")
    assert not [one for one in golden() if one.outcome == "wrong"]
    assert (len(exact), len(plain)) == (93, 109)
    assert (sum(one.outcome == "exact" for one in recurrent), len(recurrent)) == (18, 26)
    assert exact >= {
        "starcoder2",
        "glm4",
        "gpt_oss",
        "olmo3",
        "smollm3",
        "ernie4_5",
        "exaone4",
        "seed_oss",
        "ministral3",
        "phimoe",
        "qwen2_moe",
        "minimax_m2",
        "bloom",
        "gptj",
        "mpt",
        "llama4_text",
        "deepseek_v3",
    }
    assert {one.family for one in recurrent if one.outcome == "exact"} >= {
        "qwen3_5_text",
        "qwen3_next",
        "falcon_h1",
        "nemotron_h",
        "bamba",
        "granitemoehybrid",
        "olmo_hybrid",
        "kimi_linear",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
    }


def test_the_page_of_models_shows_the_table_of_the_walk() -> None:
    assert table(golden()) in PAGE.read_text("utf-8")


def test_the_table_names_what_was_built_and_no_more() -> None:
    walked = [
        Walked("a", "exact", "structure"),
        Walked("b", "exact", "structure"),
        Walked("c", "unbuilt", "TypeError: no"),
    ]
    assert table(walked).splitlines()[2:] == ["| exact | read from the model itself | a, b (2) |"]
