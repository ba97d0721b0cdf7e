"""The rules between fields: what a verdict promises, and how numbers are rounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import SAMPLES, lost, mixed, plain, speculate, unmeasured
from pydantic import ValidationError

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.profile import Interval, Profile, round_significant

LOOKUP = {"kind": "lookup", "min_match": 2, "draft_length": 8}


def rebuilt(profile: Profile, **changes: Any) -> Profile:
    """The profile with values at paths (`model__dtype`, `drafters__0__attn`) replaced, checked
    anew.
    """
    data = json.loads(profile.model_dump_json())
    for path, value in changes.items():
        *parents, key = (int(key) if key.isdecimal() else key for key in path.split("__"))
        part = data
        for parent in parents:
            part = part[parent]
        part[key] = value
    return Profile.model_validate(data)


def test_the_mask_is_the_drafters() -> None:
    assert speculate().mask == SkipMask(16, attn=(3, 4), mlp=(7,))
    assert mixed().mask == SkipMask(16, attn=(3, 4), mlp=(7,))
    assert lost().mask == SkipMask(16, attn=(3, 4), mlp=(7,))
    assert plain().mask == SkipMask(16)


def test_what_decoding_runs_is_not_what_lost() -> None:
    assert (lost().recipe, lost().measured_recipe) == (Recipe(), Recipe(lost().lost))
    assert mixed().recipe == mixed().measured_recipe == Recipe(mixed().drafters)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_profile_is_a_value(name: str) -> None:
    profile = SAMPLES[name]()
    assert hash(profile) == hash(SAMPLES[name]())
    with pytest.raises(ValidationError):
        profile.verdict = "plain"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"measured": None}, "it is null, which only an unmeasured profile may have"),
        ({"hardware": None}, "it is null"),
        ({"software": None}, "it is null"),
        ({"engine": None}, "it is null"),
        ({"model__config_sha256": None}, "it is null"),
        ({"model__dtype": None}, "it is null"),
        ({"task__calibration_sha256": None}, "it is null"),
        ({"provenance__seed": None}, "it is null"),
        ({"verdict": "unmeasured"}, "it must be null: the verdict is unmeasured"),
        ({"drafters__0__attn": [], "drafters__0__mlp": []}, "it skips nothing, so it is no draft"),
        ({"drafters__0__attn": [16]}, "attn layer 16 is outside 0..15"),
        ({"drafters__0__draft_length": 0}, "greater than or equal to 1"),
        ({"drafters__0__draft_length": 65}, "less than or equal to 64"),
        (
            {"drafters": []},
            "the verdict is speculate, so drafters must not be \\[\\]; or set verdict: plain",
        ),
        (
            {
                "drafters": [
                    {"kind": "lookup", "min_match": n, "draft_length": 4} for n in range(1, 10)
                ]
            },
            "at most 8",
        ),
        (
            {"drafters": [LOOKUP, LOOKUP]},
            r"it is the same as drafters\[0\], which is asked before it, so it never drafts",
        ),
        ({"lost": [LOOKUP]}, "only a plain verdict has candidates that lost"),
        (
            {"verdict": "plain"},
            "the verdict is plain, so drafters must be \\[\\]; or set verdict: speculate",
        ),
        ({"measured__alpha": None}, "null exactly where nothing is drafted"),
        (
            {
                "measured__by_drafter": [
                    {"kind": "lookup", "rounds": 1, "drafted": 1, "accepted": 1}
                ]
            },
            "it counts the drafters of the recipe",
        ),
        (
            {"measured__by_drafter": [{"kind": "skip", "rounds": 2, "drafted": 1, "accepted": 1}]},
            "at least the rounds",
        ),
        (
            {"measured__by_drafter": [{"kind": "skip", "rounds": 1, "drafted": 1, "accepted": 2}]},
            "at least the accepted tokens",
        ),
        ({"measured__copied_from_prompt": 1.1}, "less than or equal to 1"),
        (
            {
                "measured__by_batch": [
                    {"requests": n, "speedup": {"mean": 1.1, "ci95": [1.0, 1.2]}} for n in (4, 2)
                ]
            },
            "its sizes ascend",
        ),
        (
            {"measured__by_batch": [{"requests": 0, "speedup": {"mean": 1.1, "ci95": [1.0, 1.2]}}]},
            "greater than or equal to 1",
        ),
        ({"measured__ended_on_repeat": 33}, "no more than the 32 prompts measured"),
        ({"measured__lossless__identical": 33}, "no more than the 32 prompts compared"),
        (
            {"measured__lossless__identical": 31},
            "null exactly when all are identical, here 31 of 32",
        ),
        (
            {"measured__lossless__first_divergence_logit_gap": 0.1},
            "null exactly when all are identical",
        ),
        ({"measured__context_tokens__p50": 413}, "the median cannot be above the maximum of 412"),
        ({"measured__speedup__ci95": [1.4, 1.5]}, "low <= mean <= high"),
        ({"measured__speedup__ci95": [1.5, 1.2]}, "low <= mean <= high"),
        ({"measured__split": "calibration"}, "holdout"),
    ],
)
def test_a_measured_profile_must_show_its_evidence(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        rebuilt(speculate(), **changes)


@pytest.mark.parametrize(
    ("speedups", "size"),
    [
        ({}, None),
        ({1: 1.4, 8: 1.1}, None),
        ({1: 1.4, 4: 1.1, 8: 0.9}, 8),
        ({1: 1.4, 4: 0.9, 8: 0.7}, 4),
        ({2: 0.9, 4: 1.2, 8: 1.0}, 8),
        ({1: 0.9, 2: 0.8}, 1),
    ],
    ids=str,
)
def test_plain_decoding_wins_from_the_size_behind_the_last_at_which_drafting_does(
    speedups: dict[int, float], size: int | None
) -> None:
    by_batch = [
        {"requests": n, "speedup": {"mean": mean, "ci95": [mean, mean]}}
        for n, mean in speedups.items()
    ]
    assert rebuilt(speculate(), measured__by_batch=by_batch).plain_from_batch == size
    assert unmeasured().plain_from_batch is None


def test_a_plain_verdict_may_keep_the_best_mask_that_lost_or_none() -> None:
    assert rebuilt(lost()).mask.n_skipped == 3
    with pytest.raises(ValidationError, match="exactly where nothing is drafted"):
        rebuilt(plain(), measured__alpha=0.5)
    with pytest.raises(ValidationError, match="exactly where nothing is drafted"):
        rebuilt(plain(), lost=[LOOKUP])


def test_an_unmeasured_profile_may_know_the_models_hash_but_not_the_hardware() -> None:
    assert rebuilt(unmeasured(), model__config_sha256="a" * 64).model.config_sha256 == "a" * 64
    with pytest.raises(ValidationError, match="it must be null"):
        rebuilt(unmeasured(), engine="graph")


def test_a_divergence_comes_with_its_logit_gap() -> None:
    changed = rebuilt(
        speculate(),
        measured__lossless={"prompts": 32, "identical": 31, "first_divergence_logit_gap": 1e-5},
    )
    assert changed.measured is not None
    assert changed.measured.lossless.identical == 31


@pytest.mark.parametrize(
    ("raw", "mean", "ci95"),
    [
        ((1.21312, 1.18213, 1.24777), 1.213, (1.182, 1.248)),  # half-width 0.033: three decimals
        ((4.48123, 4.48001, 4.48298), 4.4812, (4.48, 4.483)),
        ((123.456, 101.2, 161.9), 123.0, (101.0, 162.0)),
        ((1.0, 1.0, 1.0), 1.0, (1.0, 1.0)),
        (
            (1.5, 1.52, 1.61),
            1.5,
            (1.5, 1.61),
        ),  # a skewed bootstrap: the interval is stretched to the mean
    ],
)
def test_an_interval_is_rounded_outwards_to_what_it_supports(
    raw: tuple[float, ...], mean: float, ci95: tuple[float, float]
) -> None:
    assert Interval.from_rounded(*raw) == Interval(mean=mean, ci95=ci95)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1), st.floats(1, 1e2))
def test_rounding_never_narrows_an_interval_by_more_than_a_float_error(
    mean: float, below: float, above: float
) -> None:
    rounded = Interval.from_rounded(mean, mean * below, mean * above)
    assert rounded.ci95[0] <= mean * below * (1 + 1e-9)
    assert rounded.ci95[1] >= mean * above * (1 - 1e-9)
    assert abs(rounded.mean - mean) <= 0.06 * mean


def test_round_sig_keeps_significant_digits_at_any_size() -> None:
    assert [round_significant(v) for v in (0.0, 0.87654, 1234.5, -0.00012345, 9.999)] == [
        0.0,
        0.877,
        1230.0,
        -0.000123,
        10.0,
    ]
    assert round_significant(1184.2345, digits=5) == 1184.2
