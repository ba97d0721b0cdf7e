"""Whatever the bytes, only a `Profile` or a `ProfileError` comes out, quickly and in little
memory.
"""

from __future__ import annotations

import random
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_samples import GOLDEN

from skipsearch.errors import ProfileError
from skipsearch.profile import dump_profile, parse_profile

SEEDS = [path.read_bytes() for path in sorted(GOLDEN.glob("*.yaml"))]
SNIPPETS = [
    b"&a ",
    b"*a",
    b"!!python/object/apply:os.system [ls]",
    b"!x ",
    b"<<: ",
    b"? ",
    b"- ",
    b": ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"|\n",
    b">-\n",
    b"'",
    b'"',
    b"\\U99999999",
    b"\\x00",
    b"\\uD800",
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"\xed\xa0\x80",
    b"%YAML 1.1\n---\n",
    b"---\n",
    b"...\n",
    b"#",
    b"\t",
    b"\r",
    b"\n",
    b".inf",
    b".nan",
    b"~",
    b"1e999",
    b"-0.0",
    b"0x1F",
    b"0o17",
    b"1:30",
    b"1_000",
    b"true",
    b"null",
    b"9" * 5000,
    b"[" * 50,
    b"{a: " * 50,
    b"schema_version: 0\n",
    b"schema_version: 1\n",
    b"schema_version: 99\n",
    b"kind: lookup",
    b"kind: skip",
    b"exit: {kind: fixed}",
    b"drafters:\n",
    b"lost: ",
    b"min_match: 1",
    b"per_match: null",
    b"by_drafter: []",
    b"by_batch: []",
    b"copied_from_prompt: 0.0",
    b"across_requests: false",
    b"2026-01-31",
    b"\xf0\x9f\x98\x80",
    b" " * 3000,
]


def mutate(rng: random.Random) -> bytes:
    """A golden file, changed in one to five places: bytes, lines, numbers, or a snippet that YAML
    readers stumble over.
    """
    content = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 5)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 1, 4, 40, 400]))
        change = rng.randrange(6)
        if change == 0:
            content[start:end] = rng.choice(SNIPPETS)
        elif change == 1:
            content[start:end] = b""
        elif change == 2:
            content[start:start] = content[start:end] * rng.choice([1, 2, 30])
        elif change == 3:
            content[start:end] = rng.randbytes(end - start)
        elif change == 4:
            other = rng.choice(SEEDS)
            content[start:end] = other[start : start + rng.choice([10, 100, 1000])]
        else:
            lines = bytes(content).split(b"\n")
            rng.shuffle(lines)
            content = bytearray(b"\n".join(lines[: rng.randint(1, len(lines))]))
    return bytes(content)


def survive(content: bytes) -> bool:
    """Whether it is a profile, which must then be as good as any other."""
    try:
        profile = parse_profile(content, "x.yaml")
    except ProfileError as error:
        sentence = str(error)
    else:
        assert parse_profile(dump_profile(profile).encode(), "x.yaml") == profile
        return True
    assert sentence.isprintable()
    return False


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**63))
def test_mutated_profiles_load_or_are_refused(seed: int) -> None:
    survive(mutate(random.Random(seed)))


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=300)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    assert not survive(content)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_profiles_load_or_are_refused() -> None:
    before, slowest, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, 0
    for seed in range(100_000):
        content = mutate(random.Random(seed))
        start = time.perf_counter()
        loaded += survive(content)
        slowest = max(slowest, time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"100,000 inputs: {loaded} loaded, slowest {slowest * 1e3:.1f} ms, memory grew by "
        f"{grown:.0f} MiB"
    )
    assert 0 < loaded < 100_000
    assert grown < 100
