"""The rules between fields: what a verdict promises, and how numbers are rounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import VERDICTS, plain, speculate, unmeasured
from pydantic import ValidationError

from skipsearch.mask import SkipMask
from skipsearch.profile import Interval, Profile, round_sig
from skipsearch.profile.schema import SkipDrafter


def rebuilt(profile: Profile, **changes: Any) -> Profile:
    """The profile with values at dotted paths (`model__dtype`) replaced, checked anew."""
    data = profile.model_dump()
    for path, value in changes.items():
        *parents, key = path.split("__")
        part = data
        for parent in parents:
            part = part[parent]
        part[key] = value
    return Profile.model_validate(data)


def test_the_mask_is_the_drafters() -> None:
    assert speculate().mask == SkipMask(16, attn=(3, 4), mlp=(7,))
    assert plain().mask == SkipMask(16)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_profile_is_a_value(verdict: str) -> None:
    profile = VERDICTS[verdict]()
    assert hash(profile) == hash(VERDICTS[verdict]())
    with pytest.raises(ValidationError):
        profile.verdict = "plain"  # type: ignore[misc]


@pytest.mark.parametrize(("changes", "rule"), [
    ({"measured": None}, "it is null, which only an unmeasured profile may have"),
    ({"hardware": None}, "it is null"),
    ({"software": None}, "it is null"),
    ({"engine": None}, "it is null"),
    ({"model__config_sha256": None}, "it is null"),
    ({"model__dtype": None}, "it is null"),
    ({"task__calibration_sha256": None}, "it is null"),
    ({"provenance__seed": None}, "it is null"),
    ({"verdict": "unmeasured"}, "it must be null: the verdict is unmeasured"),
    ({"drafter": SkipDrafter(attn=(), mlp=()).model_dump()}, "skips nothing, which only a plain verdict may"),
    ({"drafter": SkipDrafter(attn=(16,), mlp=()).model_dump()}, "attn layer 16 is outside 0..15"),
    ({"draft_length": 0}, "it is 0 exactly where the mask is empty"),
    ({"measured__alpha": None}, "null exactly where nothing is drafted"),
    ({"measured__ended_on_repeat": 33}, "no more than the 32 prompts measured"),
    ({"measured__lossless__identical": 33}, "no more than the 32 prompts compared"),
    ({"measured__lossless__identical": 31}, "null exactly when all are identical, here 31 of 32"),
    ({"measured__lossless__first_divergence_logit_gap": 0.1}, "null exactly when all are identical"),
    ({"measured__context_tokens__p50": 413}, "the median cannot be above the maximum of 412"),
    ({"measured__speedup__ci95": (1.4, 1.5)}, "low <= mean <= high"),
    ({"measured__speedup__ci95": (1.5, 1.2)}, "low <= mean <= high"),
    ({"measured__split": "calibration"}, "holdout"),
])
def test_a_measured_profile_must_show_its_evidence(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        rebuilt(speculate(), **changes)


def test_a_plain_verdict_may_keep_the_best_mask_that_lost_or_none() -> None:
    loser = rebuilt(speculate(), verdict="plain", measured__speedup={"mean": 0.97, "ci95": (0.95, 0.99)})
    assert loser.mask.n_skipped == 3
    with pytest.raises(ValidationError, match="exactly where nothing is drafted"):
        rebuilt(plain(), measured__alpha=0.5)
    with pytest.raises(ValidationError, match="exactly where the mask is empty"):
        rebuilt(plain(), draft_length=8)


def test_an_unmeasured_profile_may_know_the_models_hash_but_not_the_hardware() -> None:
    assert rebuilt(unmeasured(), model__config_sha256="a" * 64).model.config_sha256 == "a" * 64
    with pytest.raises(ValidationError, match="it must be null"):
        rebuilt(unmeasured(), engine="graph")


def test_a_divergence_comes_with_its_logit_gap() -> None:
    changed = rebuilt(speculate(), measured__lossless={"prompts": 32, "identical": 31, "first_divergence_logit_gap": 1e-5})
    assert changed.measured is not None
    assert changed.measured.lossless.identical == 31


@pytest.mark.parametrize(("raw", "mean", "ci95"), [
    ((1.21312, 1.18213, 1.24777), 1.213, (1.182, 1.248)),   # half-width 0.033: three decimals
    ((4.48123, 4.48001, 4.48298), 4.4812, (4.48, 4.483)),
    ((123.456, 101.2, 161.9), 123.0, (101.0, 162.0)),
    ((1.0, 1.0, 1.0), 1.0, (1.0, 1.0)),
    ((1.5, 1.52, 1.61), 1.5, (1.5, 1.61)),                   # a skewed bootstrap: the interval is stretched to the mean
])
def test_an_interval_is_rounded_outwards_to_what_it_supports(
        raw: tuple[float, ...], mean: float, ci95: tuple[float, float]) -> None:
    assert Interval.rounded(*raw) == Interval(mean=mean, ci95=ci95)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1), st.floats(1, 1e2))
def test_rounding_never_narrows_an_interval_by_more_than_a_float_error(mean: float, below: float, above: float) -> None:
    rounded = Interval.rounded(mean, mean * below, mean * above)
    assert rounded.ci95[0] <= mean * below * (1 + 1e-9)
    assert rounded.ci95[1] >= mean * above * (1 - 1e-9)
    assert abs(rounded.mean - mean) <= 0.06 * mean


def test_round_sig_keeps_significant_digits_at_any_size() -> None:
    assert [round_sig(v) for v in (0.0, 0.87654, 1234.5, -0.00012345, 9.999)] == [0.0, 0.877, 1230.0, -0.000123, 10.0]
    assert round_sig(1184.2345, digits=5) == 1184.2
