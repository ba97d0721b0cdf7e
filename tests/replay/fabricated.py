"""Timings written by hand, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Generation
from skipsearch.timing.interleaved import TimedGeneration, Timings


def sample(
    prompt: int,
    seconds: float,
    tokens: Sequence[int] = tuple(range(11)),
    *,
    rounds: int | None = None,
    drafted: int = 0,
    accepted: int = 0,
    finish_reason: str = "length",
) -> TimedGeneration:
    """One generation. Plain decoding unless rounds are given: then half of the seconds went into
    drafting.
    """
    in_rounds = len(tokens) - 1
    plain = rounds is None
    n_rounds = in_rounds if rounds is None else rounds
    stats = DecodeStats(
        prompt_tokens=5,
        tokens=len(tokens),
        rounds=n_rounds,
        round_tokens=in_rounds,
        drafted=drafted,
        accepted=accepted,
        rejecting_rounds=0 if plain else n_rounds - 1,
        draft_seconds=0.0 if plain else seconds / 2,
        verify_seconds=seconds if plain else seconds / 2,
        decode_seconds=seconds,
    )
    return TimedGeneration(
        prompt, seconds, in_rounds, stats, Generation(list(tokens), finish_reason, stats)
    )


def plain(seconds: Sequence[float]) -> Timings:
    """A prompt each."""
    return Timings([sample(prompt, s) for prompt, s in enumerate(seconds)])


def drafting(seconds: Sequence[float]) -> Timings:
    """A prompt each: 4 rounds, 8 drafted tokens, 6 accepted, 10 emitted by rounds."""
    return Timings(
        [sample(prompt, s, rounds=4, drafted=8, accepted=6) for prompt, s in enumerate(seconds)]
    )
