"""Checks of recipes: the proposals of lookup, the text that it sees, and the guard."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.drafting import wrap_drafters
from helpers.tiny import tiny_model_and_reference

from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.decoding.guard import Guard
from skipsearch.drafters.lookup.spec import Lookup

from .checks import PROMPTS
from .count_checks import Recorder
from .sampling_checks import Warp, check_sampling

LOOKUP = Lookup(min_match=2, draft_length=5)


def expected(text: Sequence[int], spec: Lookup, most: int) -> list[int]:
    """Return what lookup proposes after a text, by the definition.

    These are the tokens after the latest of the longest earlier occurrences of the end of the text.
    """
    for length in range(min(16, len(text) - 1), spec.min_match - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == list(text[-length:]):
                copied = list(text)
                for at in range(end, end + most):  # it may run into itself
                    copied.append(copied[at])
                return copied[len(text) :]
    return []


def check_lookup() -> None:
    """Check that each request's proposals follow from its own text alone.

    Requests run one after another or interleaved.
    """
    model, full = tiny_model_and_reference()
    recorder: list[Recorder] = []

    def recording(drafter):  # type: ignore[no-untyped-def]
        recorder.append(Recorder(drafter))
        return recorder[-1]

    decoder = wrap_drafters(Decoder(model, Recipe((LOOKUP,))), recording)
    proposed = 0
    for prompt, n in ((PROMPTS[0], 24), (PROMPTS[2], 30), ((7, 7, 7), 20), (PROMPTS[0], 24)):
        assert decoder.generate(prompt, n).tokens == full.greedy(prompt, n)
    for history, draft, most in zip(
        recorder[0].histories, recorder[0].drafts, recorder[0].limits, strict=True
    ):
        assert draft == expected(history, LOOKUP, most)
        proposed += len(draft)
    assert proposed > 20
    alone = wrap_drafters(Decoder(model, Recipe((LOOKUP,))), recording)
    alone.generate(PROMPTS[0], 24)
    assert recorder[1].drafts == recorder[0].drafts[-len(recorder[1].drafts) :], (
        "the last request drafted as it would have alone"
    )
    assert recorder[1].drafts == recorder[0].drafts[: len(recorder[1].drafts)]


def recalled(
    answers: Sequence[Sequence[int]], history: Sequence[int], spec: Lookup, most: int
) -> list[int]:
    """Return what a memory of earlier answers proposes, by the definition.

    If an answer has a longer end of the text than the text itself, these are the tokens after the
    longest one there, in the latest answer, at its latest position.
    """
    for length in range(min(16, len(history)), 0, -1):
        if any(
            list(history[k - length : k]) == list(history[-length:])
            for k in range(length, len(history))
        ):
            break  # the text itself has a match as long as this one
        for answer in reversed(answers):
            for end in range(len(answer), length - 1, -1):
                if list(answer[end - length : end]) == list(history[-length:]):
                    return list(answer[end : end + min(most, spec.max_copy(length))])
    return []


def check_memory() -> None:
    """Check that with a memory, proposals follow from the text and from earlier answers.

    No proposal continues from one answer into the next. Tokens are the full model's own.
    """
    model, full = tiny_model_and_reference()
    recorder: list[Recorder] = []

    def recording(drafter):  # type: ignore[no-untyped-def]
        recorder.append(Recorder(drafter))
        return recorder[-1]

    decoder = wrap_drafters(Decoder(model, Recipe((LOOKUP,)), remember_tokens=1000), recording)
    answers: list[list[int]] = []
    from_memory = accepted = rejected = 0
    for prompt in (PROMPTS[0], PROMPTS[2], (7, 7, 7), PROMPTS[0], (5, 6), (7, 7)):
        before = len(recorder[0].drafts)
        result = decoder.generate(prompt, 24)
        assert result.tokens == full.greedy(prompt, 24)
        for history, draft, most in list(
            zip(recorder[0].histories, recorder[0].drafts, recorder[0].limits, strict=True)
        )[before:]:
            other = recalled(answers, history, LOOKUP, most)
            from_memory += bool(other)
            assert draft == (other or expected(history, LOOKUP, most))
        accepted, rejected = (
            accepted + result.stats.accepted,
            rejected + result.stats.rejecting_rounds,
        )
        answers.append(result.tokens)
    assert from_memory > 5
    assert accepted
    assert rejected


def check_guard() -> None:
    """Check that a drafter that loses time rests by the rule, and that a request starts afresh."""
    model, full = tiny_model_and_reference()
    hard = DrafterCost(0.0, 3.0, 1.0, 0.2)  # a verify pass so dear that nothing pays
    rounds = []
    for _ in range(2):
        decoder = Decoder(model, Recipe((LOOKUP,)), drafter_costs=[hard])
        for prompt in ((7, 7, 7), (5, 6, 5, 6)):
            result = decoder.generate(prompt, 40)
            assert result.tokens == full.greedy(prompt, 40)
            rounds.append(result.stats.by_drafter[0].rounds)
    free = Decoder(model, Recipe((LOOKUP,))).generate((7, 7, 7), 40).stats.by_drafter[0].rounds
    assert 0 < rounds[0] < free
    assert rounds[1] > 0
    assert rounds[:2] == rounds[2:]
    guard = Guard([hard])
    guard.record_round(0, 1, 0)
    assert guard.is_paused(0)


def check_certain_sampling() -> None:
    """Check that looked-up tokens are certain in the accept test, so that samples are right."""
    check_sampling(
        Warp(1.0),
        samples=1500,
        recipe=Recipe((Lookup(min_match=1, draft_length=2),)),
        prompt=(2, 0, 1, 2, 0),
    )
