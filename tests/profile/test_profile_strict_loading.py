"""What the loader refuses, and that it says where, what and why in one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from profile_samples import mixed, speculate

from skipsearch.core import strict_yaml
from skipsearch.core.strict_yaml import MAX_BYTES
from skipsearch.errors import ProfileError
from skipsearch.profile import dump_profile, load_profile, parse_profile

GOOD = dump_profile(speculate())
MIXED = dump_profile(mixed())


def refusal(content: str | bytes) -> str:
    with pytest.raises(ProfileError) as caught:
        parse_profile(content.encode() if isinstance(content, str) else content, "x.yaml")
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith("x.yaml")
    return sentence


def changed(old: str, new: str, text: str = GOOD) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


@pytest.fixture(params=["libyaml", "pure python"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of PyYAML's parsers, which word and place some errors differently, obey the same
    rules.
    """
    loader = (
        yaml.SafeLoader if request.param == "pure python" else getattr(yaml, "CSafeLoader", None)
    )
    if loader is None:
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(strict_yaml, "_PARSER", loader)


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "rule"),
    [
        (
            "n_layers: 16",
            "n_layers: true",
            2,
            "model.n_layers",
            "true stands here; it should be a whole number",
        ),
        ("n_layers: 16", "n_layers: 16.0", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: 0x10", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: 020", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: 1_6", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: 0:16", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: +16", 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", 'n_layers: "16"', 2, "model.n_layers", "it should be a whole number"),
        ("n_layers: 16", "n_layers: 0", 2, "model.n_layers", "greater than or equal to 1"),
        (
            "n_layers: 16",
            "n_layers: 99999999999999999999999999",
            2,
            "model.n_layers",
            "less than or equal to 1024",
        ),
        ("n_layers: 16", "layers: 16", 2, "model.layers", "unknown key; did you mean n_layers?"),
        ("n_layers: 16, ", "", 2, "model.n_layers", "this key is missing"),
        ("revision: null", "revision: ~", 2, "model.revision", "`~` stands here; write null"),
        ("revision: null", "revision: ", 2, "model.revision", "nothing stands here; write null"),
        ("revision: null", "revision: 1234567", 2, "model.revision", "put it in quotes"),
        ("dtype: float32", "dtype: fp32", 2, "model.dtype", "'float32'"),
        ("name: pycode", "name: ../pycode", 3, "task.name", "it should match pattern"),
        ("temperature: 0.0", "temperature: .inf", 3, "task.sampling.temperature", "finite number"),
        ("temperature: 0.0", "temperature: 1e999", 3, "task.sampling.temperature", "too large"),
        (
            "temperature: 0.0",
            "temperature: no",
            3,
            "task.sampling.temperature",
            '"no" stands here; it should be a number',
        ),
        (
            "temperature: 0.0",
            "temperature: -1",
            3,
            "task.sampling.temperature",
            "greater than or equal to 0",
        ),
        ("kind: skip", "kind: magic", 8, "drafters[0]", "its kind must be one of 'lookup', 'skip'"),
        ("{kind: skip, attn", "{attn", 8, "drafters[0]", "it has no kind"),
        (
            "attn: [3, 4]",
            "attn: [3, 16]",
            8,
            "drafters[0]",
            "attn layer 16 is outside 0..15; was this mask made for another model?",
        ),
        ("attn: [3, 4]", "attn: [3, 3]", 8, "drafters[0].attn", "layer 3 is listed more than once"),
        ("attn: [3, 4]", "attn: [3, -4]", 8, "drafters[0].attn[1]", "greater than or equal to 0"),
        (
            "attn: [3, 4]",
            "attn: [3, null]",
            8,
            "drafters[0].attn[1]",
            "it should be a whole number",
        ),
        ("attn: [3, 4]", "attn: 3", 8, "drafters[0].attn", "it should be a list"),
        ("attn: [3, 4], ", "", 8, "drafters[0].attn", "this key is missing"),
        ("kind: skip, attn", "kind: skip, skip: 1, attn", 8, "drafters[0].skip", "unknown key"),
        (
            "kind: skip, attn",
            "kind: skip, min_match: 2, attn",
            8,
            "drafters[0].min_match",
            "unknown key",
        ),
        (
            "draft_length: 8",
            "draft_length: 0",
            8,
            "drafters[0].draft_length",
            "greater than or equal to 1",
        ),
        (
            "draft_length: 8",
            "draft_length: 8, draft_length: 9",
            8,
            "drafters[0].draft_length",
            "this key is written twice",
        ),
        ("lost:       []", "lost:       []\nlost: []", 10, "lost", "this key is written twice"),
        ("lost:       []\n", "", 1, "lost", "this key is missing"),
        ("lost:       []", "lost: {}", 9, "lost", "it should be a list"),
        ("kind: adaptive, ", "kind: fixed, ", 8, "drafters[0].exit.threshold", "unknown key"),
        (
            "kind: adaptive, ",
            "kind: sudden, ",
            8,
            "drafters[0].exit",
            "its kind must be one of 'fixed', 'confidence', 'adaptive'",
        ),
        (
            "kind: adaptive, ",
            "kind: adaptive, adaptive: 1, ",
            8,
            "drafters[0].exit.adaptive",
            "unknown key",
        ),
        (
            "threshold: 0.6",
            "threshold: 1.6",
            8,
            "drafters[0].exit.threshold",
            "less than or equal to 1",
        ),
        (
            "threshold: 0.6, ",
            "",
            8,
            "drafters[0].exit.threshold",
            "this key is missing; write every key",
        ),
        (
            "threshold: 0.6",
            "threshold: &t 0.6",
            8,
            "drafters[0].exit.threshold",
            "anchors (`&t`) are not allowed",
        ),
        (
            "threshold: 0.6",
            "threshold: *t",
            8,
            "drafters[0].exit.threshold",
            "aliases (`*t`) are not allowed",
        ),
        (
            "threshold: 0.6",
            "threshold: !!float 0.6",
            8,
            "drafters[0].exit.threshold",
            "tags (`tag:yaml.org,2002:float`) are not allowed",
        ),
        (
            "threshold: 0.6",
            "threshold: !!python/name:os.system 0.6",
            8,
            "drafters[0].exit.threshold",
            "tags",
        ),
        ("alpha: 0.87", "alpha: 87", 14, "measured.alpha", "less than or equal to 1"),
        (
            "alpha: 0.87",
            "alpha: [[[[[[[[1]]]]]]]]",
            14,
            "measured.alpha[0][0][0][0][0][0]",
            "nested deeper than 8 levels",
        ),
        ("tau: 3.42", f"tau: {'9' * 60}", 16, "measured.tau", "a number may have 40 characters"),
        ("ci95: [1.31, 1.366]", "ci95: [1.31]", 13, "measured.speedup.ci95[1]", "missing"),
        ("split: holdout", "split: calibration", 23, "measured.split", "'holdout'"),
        ("torch: 2.13.0", "torch: 2.13", 25, "software.torch", "put it in quotes"),
        ("schema_version: 3", "schema_version: 4", 1, "", "update skipsearch"),
        ("schema_version: 3", "schema_version: true", 1, "", "schema_version must be 3"),
        ("schema_version: 3", "schema_version: 2", 1, "", "tune again"),
        ("schema_version: 3\n", "", 1, "", "schema_version must be 3"),
    ],
)
def test_a_refusal_names_file_line_key_and_rule(
    old: str, new: str, line: int, key: str, rule: str
) -> None:
    sentence = refusal(changed(old, new))
    assert sentence.startswith(f"x.yaml, line {line}{', ' + key if key else ''}: ")
    assert rule in sentence


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "rule"),
    [
        ("kind: lookup", "kind: lokup", 8, "drafters[0]", "; did you mean lookup?"),
        (
            "kind: lookup",
            "kind: look",
            8,
            "drafters[0]",
            "its kind must be one of 'lookup', 'skip'",
        ),
        ("min_match: 2", "min_match: 0", 8, "drafters[0].min_match", "greater than or equal to 1"),
        ("min_match: 2", "min_match: 17", 8, "drafters[0].min_match", "less than or equal to 16"),
        ("min_match: 2", "exit: {kind: fixed}, min_match: 2", 8, "drafters[0].exit", "unknown key"),
        ("min_match: 2", "attn: [1], min_match: 2", 8, "drafters[0].attn", "unknown key"),
        ("per_match: 4", "per_match: 0", 8, "drafters[0].per_match", "greater than or equal to 1"),
        (
            "across_requests: true",
            "across_requests: 1",
            9,
            "drafters[1].exit.across_requests",
            "it should be a valid boolean",
        ),
        ("attn: [3, 4]", "attn: [3, 99]", 9, "drafters[1]", "attn layer 99 is outside 0..15"),
        (
            "  - {kind: lookup",
            "  - {kind: lookup, min_match: 2, draft_length: 16, per_match: 4}\n  - {kind: lookup",
            9,
            "drafters[1]",
            "it is the same as drafters[0], which is asked before it, so it never drafts; remove "
            "it",
        ),
        (
            "drafters:\n",
            "drafters:\n" + "  - {kind: lookup, min_match: 1, draft_length: 1}\n" * 7,
            7,
            "drafters",
            "there are too many; 8 are the most",
        ),
        (
            "{kind: lookup, rounds: 400",
            "{kind: skip, rounds: 400",
            26,
            "measured.by_drafter",
            "it counts the drafters of the recipe, in their order",
        ),
        (
            "rounds: 400",
            "rounds: 3201",
            26,
            "measured.by_drafter[0].drafted",
            "it is at least the rounds and at least the accepted tokens",
        ),
        (
            "verdict:    speculate",
            "verdict:    plain",
            7,
            "drafters",
            "the verdict is plain, so drafters must be []",
        ),
    ],
)
def test_so_does_one_of_a_recipe_of_several_drafters(
    old: str, new: str, line: int, key: str, rule: str
) -> None:
    sentence = refusal(changed(old, new, MIXED))
    assert sentence.startswith(f"x.yaml, line {line}, {key}: ")
    assert rule in sentence


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"just text", "a profile is a map"),
        (b"[1, 2]", "a profile is a map"),
        (b"\xef\xbb\xbf" + GOOD.encode(), "byte order mark"),
        (GOOD.encode("utf-16"), "not UTF-8"),
        (GOOD.encode().replace(b"H200", b"H\xff00"), "line 4: byte"),
        (GOOD.encode() + b"\x00", "control character"),
        (GOOD.encode() + b"---\n" + GOOD.encode(), "found another document"),
        (b"%YAML 1.2\n---\n" + GOOD.encode(), "directives"),
        (GOOD.encode() + b"? [a, b]\n: 1\n", "a key must be a word"),
        (GOOD.encode() + b"1: 2\n", "a key must be a word"),
        (GOOD.encode() + b"x: {a: 1", "this is not YAML"),
        (GOOD.encode() + b"<<: {verdict: plain}\n", "<<: unknown key"),
        (b"#" * (MAX_BYTES + 1), "larger than 128 KiB"),
        (b"[" * MAX_BYTES, "nested deeper"),
        (b"- " * (MAX_BYTES // 2), "nested deeper"),
        (b"[" + b"1," * (MAX_BYTES // 2 - 1), "more than 8192 values"),
        (b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "anchors"),
        (b'a: "\\U99999999"', "this is not YAML"),
    ],
)
def test_what_is_no_profile_at_all_is_refused(content: bytes, rule: str) -> None:
    assert rule in refusal(content)


@pytest.mark.parametrize("date", ["2026-01-31", "2026-01-31T12:00:00Z"])
def test_unquoted_dates_are_plain_text(date: str) -> None:
    profile = parse_profile(changed('"2026-01-31T12:00:00Z"', date).encode(), "x.yaml")
    assert profile.provenance.created == date


def test_yes_and_no_are_words_where_words_belong() -> None:
    assert (
        parse_profile(changed("engine:     graph", "engine: no").encode(), "x.yaml").engine == "no"
    )


def test_several_faults_are_counted_and_the_first_is_told() -> None:
    sentence = refusal(changed("tau: 3.42", "tau: 0").replace("prompts: 32", "prompts: -1"))
    assert re.match(r"x\.yaml, line 16, measured\.tau: 0 stands here.* \(and 2 more\)$", sentence)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(GOOD)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    for path, what in [
        ("missing.yaml", "no such file"),
        ("link.yaml", "symbolic link"),
        ("pipe.yaml", "device or pipe"),
        ("", "folder"),
        ("real.yaml/x", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("n" * 300, "cannot be read"),
    ]:
        with pytest.raises(ProfileError, match=what):
            load_profile(f"{tmp_path}/{path}")
    with pytest.raises(ProfileError, match="device or pipe"):
        load_profile("/dev/zero")


def test_the_package_loads_without_torch_and_numpy() -> None:
    code = (
        "import skipsearch.profile, sys; "
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


def test_a_misspelt_key_and_what_it_leaves_missing_are_one_fault() -> None:
    assert refusal(changed("draft_length: 8", "draft_lenght: 8")).endswith(
        "draft_lenght: unknown key; did you mean draft_length?"
    )
    both = changed("draft_length: 8", "draft_lenght: 8").replace("n_layers: 16", "n_layers: 0")
    assert refusal(both).endswith("(and 1 more)")
