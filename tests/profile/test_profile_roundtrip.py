"""The canonical text: fixed by golden files, and a fixed point of load and dump."""

from __future__ import annotations

import json

import pytest
import yaml
from helpers.golden import check_golden
from hypothesis import given, settings
from profile_samples import GOLDEN, VERDICTS, profiles, speculate

from skipsearch.profile import Profile, dump_profile, load_profile, parse_profile
from skipsearch.profile.dump import as_dict
from skipsearch.profile.schema import json_schema


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_canonical_text_of_each_verdict_is_the_golden_file(verdict: str) -> None:
    check_golden(GOLDEN / f"v1_{verdict}.yaml", dump_profile(VERDICTS[verdict]()))


def test_the_json_schema_is_the_golden_file() -> None:
    check_golden(GOLDEN / "schema.json", json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")


def test_a_version_0_file_loads_as_the_current_version() -> None:
    check_golden(GOLDEN / "v0_migrated.yaml", dump_profile(load_profile(GOLDEN / "v0.yaml")))


@pytest.mark.parametrize("name", ["v1_speculate", "v1_plain", "v1_unmeasured", "v0_migrated"])
def test_loading_and_dumping_a_canonical_file_changes_no_byte(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    assert dump_profile(load_profile(path)).encode() == path.read_bytes()


@settings(max_examples=80, deadline=None)
@given(profiles())
def test_any_profile_survives_dump_and_load(profile: Profile) -> None:
    text = dump_profile(profile)
    loaded = parse_profile(text.encode(), "any.yaml")
    assert loaded == profile
    assert dump_profile(loaded) == text


@settings(max_examples=40, deadline=None)
@given(profiles())
def test_other_yaml_readers_read_the_same_values(profile: Profile) -> None:
    assert yaml.safe_load(dump_profile(profile)) == as_dict(profile)


def test_numbers_keep_their_kind_so_that_whole_floats_stay_floats() -> None:
    text = dump_profile(speculate())
    assert "temperature: 0.0" in text
    assert "n_layers: 16," in text
    written_as_int = text.replace("temperature: 0.0", "temperature: 0")
    assert dump_profile(parse_profile(written_as_int.encode(), "x.yaml")) == text


def test_unordered_layers_and_keys_come_out_in_canonical_order() -> None:
    text = dump_profile(speculate())
    shuffled = text.replace("{kind: skip, attn: [3, 4], mlp: [7]}", "{mlp: [7], attn: [4, 3], kind: skip}")
    assert shuffled != text
    assert dump_profile(parse_profile(shuffled.encode(), "x.yaml")) == text


def test_every_number_in_the_json_schema_has_a_range_and_a_description() -> None:
    schema = json_schema()
    for part in schema["$defs"].values():
        for key, entry in part["properties"].items():
            branches = entry.get("anyOf", [entry])
            for branch in (b for b in branches if b.get("type") in ("integer", "number")):
                assert {"minimum", "exclusiveMinimum"} & branch.keys(), key
                assert {"maximum", "exclusiveMaximum"} & branch.keys(), key
                assert key == "mean" or entry.get("description"), key
