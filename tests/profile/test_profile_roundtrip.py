"""The canonical text: fixed by golden files, and a fixed point of load and dump."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from helpers.golden import check_golden
from hypothesis import given, settings
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from profile_samples import (
    GOLDEN,
    SAMPLES,
    choosing,
    every,
    mixed,
    profiles,
    speculate,
    with_draft_model,
)

from skipsearch.core.recipe import DRAFTERS, EXITS
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import ProfileError
from skipsearch.profile import Profile, dump_profile, load_profile, parse_profile
from skipsearch.profile.canonical import to_plain_data
from skipsearch.profile.schema import json_schema


@pytest.mark.parametrize("name", SAMPLES)
def test_the_canonical_text_of_each_sample_is_the_golden_file(name: str) -> None:
    check_golden(GOLDEN / f"v3_{name}.yaml", dump_profile(SAMPLES[name]()))


@pytest.mark.parametrize("name", [f"v3_{name}" for name in SAMPLES])
def test_loading_and_dumping_a_canonical_file_changes_no_byte(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    assert dump_profile(load_profile(path)).encode() == path.read_bytes()


@settings(max_examples=30, deadline=None)
@given(profiles())
def test_any_profile_survives_dump_and_load(profile: Profile) -> None:
    text = dump_profile(profile)
    loaded = parse_profile(text.encode(), "any.yaml")
    assert loaded == profile
    assert dump_profile(loaded) == text


@settings(max_examples=15, deadline=None)
@given(profiles())
def test_other_yaml_readers_read_the_same_values(profile: Profile) -> None:
    assert yaml.safe_load(dump_profile(profile)) == to_plain_data(profile)


def test_numbers_keep_their_kind_so_that_whole_floats_stay_floats() -> None:
    text = dump_profile(speculate())
    assert "temperature: 0.0" in text
    assert "n_layers: 16," in text
    written_as_int = text.replace("temperature: 0.0", "temperature: 0")
    assert dump_profile(parse_profile(written_as_int.encode(), "x.yaml")) == text


def test_unordered_layers_and_keys_come_out_in_canonical_order() -> None:
    text = dump_profile(speculate())
    shuffled = text.replace(
        "{kind: skip, attn: [3, 4], mlp: [7], draft_length: 8, ",
        "{draft_length: 8, mlp: [7], attn: [4, 3], kind: skip, ",
    )
    assert shuffled != text
    assert dump_profile(parse_profile(shuffled.encode(), "x.yaml")) == text


def test_what_says_nothing_is_left_out() -> None:
    text, full = dump_profile(speculate()), dump_profile(mixed())
    for key in ("across_requests", "per_match", "by_drafter", "copied_from_prompt", "by_batch"):
        assert key not in text
        assert key in full
    assert "across_requests: true" in full
    nothing_copied = full.replace("copied_from_prompt: 0.31", "copied_from_prompt: 0.0")
    assert dump_profile(parse_profile(nothing_copied.encode(), "x.yaml")) == nothing_copied, (
        "that none were copied was counted"
    )


@cache
def schema_validator() -> Validator:
    schema = json_schema()
    return validator_for(schema)(schema)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_json_schema_allows_what_the_loader_does(name: str) -> None:
    schema_validator().validate(to_plain_data(SAMPLES[name]()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("drafters", 1, "kind"), "magic"),
        (("drafters", 0, "kind"), "skip"),
        (("drafters", 1, "exit", "kind"), "sudden"),
        (("drafters", 0, "attn"), [1]),
        (("drafters", 0, "min_match"), 17),
        (("drafters", 1, "exit", "threshold"), 2),
        (
            ("drafters",),
            [{"kind": "lookup", "min_match": n, "draft_length": 1} for n in range(1, 10)],
        ),
    ],
    ids=str,
)
def test_the_json_schema_refuses_kinds_and_keys_that_it_does_not_know(
    path: tuple[str | int, ...], value: object
) -> None:
    data = to_plain_data(mixed())
    *parents, key = path
    part: Any = data
    for parent in parents:
        part = part[parent]
    part[key] = value
    with pytest.raises(jsonschema.ValidationError):
        schema_validator().validate(data)


@pytest.mark.parametrize(
    ("drafter", "path"),
    [
        (0, "kind"),
        (0, "min_match"),
        (1, "kind"),
        (1, "exit"),
        (1, "exit.kind"),
        (1, "exit.threshold"),
    ],
)
def test_the_json_schema_wants_every_key_as_the_loader_does(drafter: int, path: str) -> None:
    data = to_plain_data(mixed())
    *parents, key = path.split(".")
    part = data["drafters"][drafter]
    for parent in parents:
        part = part[parent]
    del part[key]
    with pytest.raises(jsonschema.ValidationError):
        schema_validator().validate(data)
    with pytest.raises(ProfileError, match=r"this key is missing|it has no kind"):
        parse_profile(json.dumps(data).encode(), "x.yaml")


def test_there_is_a_sample_of_every_kind() -> None:
    drafters = (*every().drafters, *choosing().drafters, *with_draft_model().drafters)
    assert {drafter.kind for drafter in drafters} == {*DRAFTERS}
    assert {drafter.exit.kind for drafter in drafters if isinstance(drafter, Skip)} == {*EXITS}


def test_the_json_schema_knows_every_kind() -> None:
    definitions = json_schema()["$defs"].values()
    kinds = {
        part["properties"]["kind"]["const"]
        for part in definitions
        if "const" in part["properties"].get("kind", {})
    }
    assert kinds == {*DRAFTERS, *EXITS}


def test_every_number_in_the_json_schema_has_a_range_and_a_description() -> None:
    schema = json_schema()
    for part in schema["$defs"].values():
        for key, entry in part["properties"].items():
            branches = entry.get("anyOf", [entry])
            for branch in (b for b in branches if b.get("type") in ("integer", "number")):
                assert {"minimum", "exclusiveMinimum"} & branch.keys(), key
                assert {"maximum", "exclusiveMaximum"} & branch.keys(), key
                assert key == "mean" or entry.get("description"), key
