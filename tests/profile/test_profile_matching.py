"""A profile for another architecture is refused; any other difference is a warning about speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profile_samples import GREEDY, plain, speculate, unmeasured

from skipsearch.errors import ProfileError
from skipsearch.profile.compatibility import (
    MachineFacts,
    ModelFacts,
    compatibility_warnings,
    sampling_warnings,
)
from skipsearch.profile.schema import Profile, ProfileSampling

MODEL = ModelFacts(
    id="demo",
    family="llama",
    n_layers=16,
    config_sha256="c0" * 32,
    weights_sha256="ab" * 32,
    dtype="float32",
)
MACHINE = MachineFacts(
    kind="cuda",
    name="NVIDIA H200",
    engine="graph",
    software={"skipsearch": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "cuda": "13.0"},
)


def test_where_everything_agrees_nothing_is_said() -> None:
    assert compatibility_warnings(speculate(), MODEL, MACHINE) == []
    assert compatibility_warnings(speculate(), MODEL) == []


@pytest.mark.parametrize(
    ("difference", "values"),
    [
        ({"family": "gpt2"}, "family llama, but demo has gpt2"),
        ({"n_layers": 40}, "16 layers, but demo has 40"),
        ({"config_sha256": "d1" * 32}, r"hash c0c0c0c0c0c0…, but demo has d1d1d1d1d1d1…"),
    ],
)
def test_another_architecture_is_refused_with_both_values_and_the_way_out(
    difference: dict[str, object], values: str
) -> None:
    with pytest.raises(ProfileError, match=values) as caught:
        compatibility_warnings(speculate(), replace(MODEL, **difference), MACHINE)
    assert "skipsearch tune --model demo" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "machine", "words"),
    [
        (
            {"id": "demo-2", "weights_sha256": "cd" * 32},
            {},
            ["made for demo, used with demo-2", "the weights are not those"],
        ),
        ({"weights_sha256": "cd" * 32}, {}, ["the weights are not those"]),
        ({"dtype": "bfloat16"}, {}, ["measured in float32, used in bfloat16"]),
        ({"quantization": "int8"}, {}, ["measured with quantisation none, used with int8"]),
        ({}, {"name": "NVIDIA L4"}, ["measured on NVIDIA H200, used on NVIDIA L4"]),
        ({}, {"count": 2}, ["measured on 1 device(s), used on 2"]),
        ({}, {"engine": "hf"}, ["measured with engine graph, used with hf"]),
        ({}, {"software": {"torch": "2.14.0"}}, ["measured with torch 2.13.0, used with 2.14.0"]),
    ],
)
def test_a_difference_that_only_costs_speed_is_a_warning(
    model: dict[str, object], machine: dict[str, object], words: list[str]
) -> None:
    warnings = compatibility_warnings(
        speculate(), replace(MODEL, **model), replace(MACHINE, **machine)
    )
    assert len(warnings) == len(words)
    for warning, said in zip(warnings, words, strict=True):
        assert said in warning
        assert warning.endswith("; the output stays the full model's own")


def test_another_temperature_changes_the_rate_of_acceptance_not_the_distribution() -> None:
    warm = ProfileSampling(temperature=0.8, top_p=0.95, top_k=0)
    (warning,) = sampling_warnings(speculate(), warm)
    assert "made for temperature 0, top-p 1, top-k 0" in warning
    assert "used with temperature 0.8, top-p 0.95, top-k 0" in warning
    assert "full model's own distribution" in warning
    assert sampling_warnings(speculate(), GREEDY) == []


def test_top_p_does_not_matter_to_greedy_decoding() -> None:
    used = ProfileSampling(temperature=0.0, top_p=0.9, top_k=5)
    assert sampling_warnings(speculate(), used) == []


def test_equal_weights_make_name_and_revision_irrelevant() -> None:
    assert (
        compatibility_warnings(speculate(), replace(MODEL, id="copy", revision="main"), MACHINE)
        == []
    )


def test_another_revision_is_a_warning_where_the_weights_cannot_be_compared() -> None:
    data = speculate().model_dump()
    data["model"]["revision"] = "v1"
    (warning,) = compatibility_warnings(
        Profile.model_validate(data), replace(MODEL, revision="v2", weights_sha256=None), MACHINE
    )
    assert "made for revision v1, used with v2" in warning


def test_what_an_unmeasured_profile_leaves_null_is_not_compared() -> None:
    llama = ModelFacts(
        id="meta-llama/Llama-2-13b-hf",
        family="llama",
        n_layers=40,
        revision="main",
        config_sha256="a" * 64,
        weights_sha256="b" * 64,
        dtype="float16",
        quantization="int8",
    )
    (warning,) = compatibility_warnings(unmeasured(), llama, MACHINE)
    assert "never measured, so its speed is unknown" in warning


def test_a_plain_verdict_is_matched_like_any_other() -> None:
    assert compatibility_warnings(plain(), MODEL, MACHINE) == []
    with pytest.raises(ProfileError):
        compatibility_warnings(plain(), replace(MODEL, n_layers=40), MACHINE)
