"""The port `Matcher`: masks, roll-back, forced tokens, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.byte_tokenizer import byte_tokenizer

from skipsearch.constraints import Matcher, compile_constraint
from skipsearch.core.constraint import Constraint
from skipsearch.engine import load_model
from skipsearch.errors import DecodeError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TEXT = json.dumps({"name": "Ada", "kind": "cat"})
VOCAB, EOS = 4096, 0


@cache
def tokenizer() -> Any:
    return load_model("demo", engine="hf").tokenizer


def start(**kind: Any) -> Matcher:
    constraint = Constraint(**(kind or {"json_schema": SCHEMA}))
    return compile_constraint(constraint, tokenizer(), VOCAB, (EOS,)).new_matcher()


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


def legal_tokens(matcher: Matcher) -> set[int]:
    mask = np.zeros(VOCAB, dtype=bool)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(mask).tolist())


@pytest.mark.parametrize("is_open", [False, True])
def test_an_object_gets_further_properties_only_if_its_schema_says_so(is_open: bool) -> None:
    schema = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    matcher = start(json_schema={**schema, "additionalProperties": True} if is_open else schema)
    matcher.advance(encode(TEXT[:-1]))
    comma, end = encode(", ")[0], encode("}")[0]
    assert matcher.count_legal([end]) == 1
    assert matcher.count_legal([comma]) == is_open


def test_a_token_is_in_the_mask_if_and_only_if_it_counts_as_legal() -> None:
    matcher = start()
    for token in encode(TEXT):
        legal = legal_tokens(matcher)
        assert token in legal
        for other in range(0, VOCAB, 7):
            assert (matcher.count_legal([other]) == 1) == (other in legal)
        matcher.advance([token])
    assert legal_tokens(matcher) == {EOS}
    assert matcher.is_complete


def test_rolling_back_returns_to_every_earlier_state() -> None:
    matcher, tokens = start(), [*encode(TEXT), EOS]
    states = []
    for token in tokens:
        states.append(legal_tokens(matcher))
        matcher.advance([token])
    assert matcher.has_ended
    for n in range(1, len(tokens) + 1):
        matcher.roll_back(n)
        assert not matcher.has_ended
        assert legal_tokens(matcher) == states[-n]
        matcher.advance(tokens[-n:])


def test_counting_legal_tokens_changes_nothing_and_stops_at_the_first_illegal_one() -> None:
    matcher, tokens = start(), encode(TEXT)
    before = legal_tokens(matcher)
    assert matcher.count_legal([*tokens, EOS, EOS]) == len(tokens) + 1
    assert matcher.count_legal([*tokens[:3], EOS]) == 3
    assert matcher.count_legal([EOS]) == 0
    assert matcher.count_legal([]) == 0
    assert legal_tokens(matcher) == before


def test_forced_tokens_are_those_the_tokenizer_makes_of_the_forced_text() -> None:
    matcher = start()
    forced = matcher.forced_tokens()
    assert forced
    assert '{"name": "'.startswith(tokenizer().decode(forced))
    assert matcher.count_legal(forced) == len(forced)
    matcher.advance(encode('{"name": "Ada'))
    assert matcher.forced_tokens() == []


def test_json_has_one_way_to_write_white_space_unless_the_schema_allows_any() -> None:
    spaced = json.dumps({"name": "Ada", "kind": "cat"}, indent=1)
    assert start().count_legal(encode(spaced)) < len(encode(spaced))
    free = start(json_schema={**SCHEMA, "x-guidance": {"whitespace_flexible": True}})
    assert free.count_legal(encode(spaced)) == len(encode(spaced))


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ({"regex": "[a-c]{2,4}x"}, "abcx", "abdx"),
        ({"grammar": 'start: "yes" | "no"'}, "yes", "maybe"),
        ({"grammar": 'root ::= "left" | "right"'}, "right", "up"),  # llama.cpp's form
        ({"json_schema": {}}, '[1, {"a": null}]', "[1, }"),
    ],
    ids=str,
)
def test_every_kind_of_constraint_takes_its_texts_alone(
    kind: dict[str, Any], right: str, wrong: str
) -> None:
    matcher = start(**kind)
    assert matcher.count_legal([*encode(right), EOS]) == len(encode(right)) + 1
    assert matcher.count_legal(encode(wrong)) < len(encode(wrong))


def test_states_of_one_constraint_are_independent() -> None:
    compiled = compile_constraint(Constraint(json_schema=SCHEMA), tokenizer(), VOCAB, (EOS,))
    first, second = compiled.new_matcher(), compiled.new_matcher()
    first.advance(encode(TEXT)[:4])
    assert legal_tokens(second) != legal_tokens(first)
    second.advance(encode(TEXT))
    assert legal_tokens(second) == {EOS}


def test_a_constraint_is_compiled_once_for_a_tokenizer() -> None:
    """The thread that decodes must not compile what the check of the request compiled."""
    first, second = (
        compile_constraint(Constraint(json_schema=dict(SCHEMA)), tokenizer(), VOCAB, (EOS,))
        for _ in range(2)
    )
    assert first is second


@pytest.mark.parametrize(
    "wanted", [{"regex": "[^\\x00-\\U0010ffff]"}, {"grammar": "root ::= root"}]
)
def test_a_constraint_without_any_text_is_refused_before_an_answer(wanted: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match=r"no text .* leave it out"):
        compile_constraint(Constraint(**wanted), tokenizer(), VOCAB, (EOS,))


def test_an_illegal_token_is_an_error_in_one_sentence() -> None:
    matcher = start()
    with pytest.raises(DecodeError, match="cannot be followed further"):
        matcher.advance(encode("no JSON"))


def test_nothing_is_legal_after_the_end() -> None:
    matcher = start()
    matcher.advance([*encode(TEXT), EOS])
    assert matcher.count_legal([EOS]) == 0
    assert matcher.forced_tokens() == []
    with pytest.raises(DecodeError, match="after the end"):
        legal_tokens(matcher)


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "string", "enum": []}}, "anyOf is empty"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json_schema": {"$ref": "#"}}, "cannot be followed"),
        ({"json_schema": {"type": "strnig"}}, "strnig"),
        ({"regex": "(unclosed"}, "regular expression"),
        ({"grammar": "start: missing_rule"}, "missing_rule"),
        ({"grammar": "\x1b[2J"}, "a grammar"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_with_its_name(
    constraint: dict[str, Any], named: str
) -> None:
    with pytest.raises(DecodeError, match="constraint") as caught:
        start(**constraint)
    assert named in str(caught.value)
    assert str(caught.value).isprintable()


HOSTILE = {
    "repeated repetition": {"regex": "((((a{100}){100}){100}){100})"},
    "nested stars": {"regex": "(((a*)*)*)*b"},
    "an array of arrays": {
        "json_schema": {
            "type": "array",
            "minItems": 10**6,
            "items": {"type": "array", "minItems": 10**6},
        }
    },
    "many alternatives": {
        "json_schema": {"anyOf": [{"const": "x" * 30 + str(i)} for i in range(3000)]}
    },
    "a rule of itself": {"grammar": 'start: start start | "a"'},
    "an ambiguous sum": {"grammar": 'start: e\ne: e "+" e | "1" | e e'},
    "optional keys": {
        "json_schema": {
            "type": "object",
            "properties": {f"key{i}": {"type": "integer"} for i in range(2000)},
        }
    },
}


# Each constraint is followed in a child of one process, which has imported and loaded everything.
FOLLOW = """
import json, os, resource, sys
from constraints.test_matcher import EOS, legal_tokens, start, tokenizer
from skipsearch.errors import DecodeError

tokenizer()

def follow(constraint):
    try:
        matcher = start(**constraint)
        for _ in range(20):
            legal = legal_tokens(matcher) - {EOS}
            if not legal:
                break
            matcher.advance([min(legal)])
    except DecodeError as error:
        print(error, file=sys.stderr)

outcomes = {}
for name, constraint in json.load(sys.stdin).items():
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        code = 1
        try:
            follow(constraint)
            code = 0
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    outcomes[name] = [status, usage.ru_maxrss]
outcomes["nothing"] = [0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, int]]:
    """Exit status and kilobytes of each hostile constraint, and of a process that follows none."""
    ended = subprocess.run(
        [sys.executable, "-c", FOLLOW],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", ".."])},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-500:]
    followed: dict[str, tuple[int, int]] = json.loads(ended.stdout)
    return followed


@pytest.mark.xdist_group("hostile constraints")  # they share a process
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_ends_within_bounds(
    name: str, outcomes: dict[str, tuple[int, int]]
) -> None:
    """It is refused, or followed for some tokens; neither takes a minute nor a gigabyte."""
    status, kilobytes = outcomes[name]
    assert status == 0
    assert kilobytes - outcomes["nothing"][1] < 1_000_000


def test_a_model_without_what_a_constraint_needs_is_refused() -> None:
    constraint = Constraint(regex="a")
    with pytest.raises(DecodeError, match="tokenizer"):
        compile_constraint(constraint, None, VOCAB, (EOS,))
    with pytest.raises(DecodeError, match="end-of-sequence"):
        compile_constraint(constraint, tokenizer(), VOCAB, ())


def test_the_vocabulary_of_the_model_may_be_larger_than_the_tokenizers() -> None:
    small = byte_tokenizer()
    matcher = compile_constraint(Constraint(regex="[abc]+"), small, 100, (63,)).new_matcher()
    mask = np.zeros(100, dtype=bool)
    matcher.fill_mask(mask)
    assert not mask[len(small) :].any()
    assert mask.any()
