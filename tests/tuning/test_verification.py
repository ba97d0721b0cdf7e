"""What becomes of a claim: each outcome from two intervals, and what a verification measures and
tells.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from helpers.threads import one_thread
from helpers.tiny import LAYERS, tiny_model_and_reference
from replay.fabricated import drafting, plain

from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import ProfileError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.profile import Interval, Profile, dump_profile, load_profile, parse_profile
from skipsearch.tasks import Prompt, Task, TaskSampling
from skipsearch.timing.interleaved import PairedTimings
from skipsearch.tuning import verification
from skipsearch.tuning.verification import OUTCOMES, Verification, verify

__all__ = ["one_thread"]

GOLDEN = Path(__file__).parents[1] / "profile" / "golden"
TASK = Task(
    "pycode",
    1,
    "",
    TaskSampling(),
    12,
    64,
    6,
    0,
    False,
    (),
    (Prompt("c", "abc"),),
    tuple(Prompt(f"h{i}", text) for i, text in enumerate(("def ", "abcab", "x = 1", "):\n  a"))),
)


def claimed(
    verdict: str = "speculate",
    speedup: tuple[float, float, float] = (1.34, 1.31, 1.37),
    gap: float | None = None,
) -> Profile:
    golden = load_profile(GOLDEN / f"v3_{'lost' if verdict == 'plain' else verdict}.yaml")
    if golden.measured is None:
        return golden
    mean, low, high = speedup
    lossless = golden.measured.lossless.model_copy(
        update={"identical": 32 if gap is None else 30, "first_divergence_logit_gap": gap}
    )
    measured = golden.measured.model_copy(
        update={"speedup": Interval(mean=mean, ci95=(low, high)), "lossless": lossless}
    )
    return golden.model_copy(update={"measured": measured})


def found(
    claim: Profile, speedup: tuple[float, float, float], gap: float | None = None
) -> Verification:
    verdict = "speculate" if speedup[1] > 1 else "plain"
    return Verification(
        claim, claimed("speculate", speedup, gap).model_copy(update={"verdict": verdict}), ()
    )


# --- outcomes


@pytest.mark.parametrize(
    ("here", "outcome", "holds"),
    [
        ((1.35, 1.30, 1.40), "holds", True),
        ((1.28, 1.20, 1.31), "holds", True),
        ((1.60, 1.50, 1.70), "faster", True),
        ((1.20, 1.10, 1.30), "slower", False),
        ((1.02, 0.95, 1.08), "slower", False),
        ((1.20, 0.99, 1.40), "undecided", False),
        ((0.90, 0.85, 0.99), "loses", False),
    ],
)
def test_a_claim_of_speed_holds_where_the_intervals_overlap_above_one(
    here: tuple[float, float, float], outcome: str, holds: bool
) -> None:
    verified = found(claimed(), here)
    assert (verified.outcome, verified.holds) == (outcome, holds)


@pytest.mark.parametrize(
    ("here", "outcome", "holds"),
    [
        ((0.95, 0.90, 1.00), "plain", True),
        ((1.05, 0.98, 1.12), "plain", True),
        ((1.20, 1.10, 1.30), "beats", False),
    ],
)
def test_a_claim_that_nothing_beat_plain_decoding_holds_until_the_draft_that_lost_wins(
    here: tuple[float, float, float], outcome: str, holds: bool
) -> None:
    verified = found(claimed("plain"), here)
    assert (verified.outcome, verified.holds) == (outcome, holds)


@pytest.mark.parametrize(
    ("here", "outcome"), [((1.20, 1.10, 1.30), "pays"), ((1.20, 0.99, 1.30), "does_not_pay")]
)
def test_an_unmeasured_profile_claims_nothing_that_could_hold(
    here: tuple[float, float, float], outcome: str
) -> None:
    verified = found(claimed("unmeasured"), here)
    assert (verified.outcome, verified.holds) == (outcome, False)
    assert OUTCOMES[outcome].startswith("nothing was claimed")


@pytest.mark.parametrize(
    ("there", "here", "lossless"),
    [
        (None, None, True),
        (0.02, None, True),
        (0.02, 0.02, True),
        (0.02, 0.03, False),
        (None, 0.001, False),
    ],
)
def test_tokens_may_differ_by_no_more_than_rounding_did_where_the_claim_was_made(
    there: float | None, here: float | None, lossless: bool
) -> None:
    verified = found(claimed(gap=there), (1.34, 1.31, 1.37), here)
    assert verified.outcome == "holds"
    assert (verified.lossless, verified.holds) == (lossless, lossless)
    assert ("tokens differ" in verified.sentence) == (not lossless)
    assert f"{32 if here is None else 30} of 32 prompts" in verified.describe_losslessness()


# --- the measurement


def tiny() -> ModelAdapter:
    model = adapt(tiny_model_and_reference()[0].model, byte_tokenizer())  # type: ignore[attr-defined]
    model.spec = replace(model.spec, id="tiny", config_sha256="c0" * 32, weights_sha256="ab" * 32)
    return model


SKIP = Skip(attn=(1, 3), mlp=(2,), draft_length=5, exit=Confidence(threshold=0.25))


def of_tiny(
    verdict: str, task: str = "pycode", drafters: tuple[DrafterSpec, ...] = (SKIP,)
) -> Profile:
    golden = load_profile(GOLDEN / f"v3_{'lost' if verdict == 'plain' else verdict}.yaml")
    unknown = (
        {"config_sha256": None, "weights_sha256": None, "dtype": None}
        if verdict == "unmeasured"
        else {"dtype": "float64"}
    )
    made_for = golden.model.model_copy(
        update={"id": "tiny", "family": "llama", "n_layers": LAYERS, **unknown}
    )
    made_on = golden.task.model_copy(update={"name": task})
    return golden.model_copy(
        update={
            "model": made_for,
            "task": made_on,
            "lost" if verdict == "plain" else "drafters": drafters,
        }
    )


def test_it_decodes_the_holdout_prompts_with_the_draft_and_plainly_and_compares_the_tokens() -> (
    None
):
    here = verify(tiny(), of_tiny("speculate"), TASK).remeasured.measured
    assert here is not None
    assert (here.prompts, here.split) == (4, "holdout")
    assert (here.lossless.prompts, here.lossless.identical) == (4, 4)
    assert here.alpha is not None
    assert 0 < here.alpha < 1
    assert here.tau > 1


def test_a_recipe_is_measured_with_all_its_drafters_and_each_is_counted() -> None:
    claim = of_tiny("speculate", drafters=(Lookup(min_match=1, draft_length=4), SKIP))
    here = verify(tiny(), claim, TASK).remeasured
    assert here.measured_recipe == claim.recipe
    assert here.measured is not None
    lookup, skip = here.measured.by_drafter
    assert (lookup.kind, skip.kind) == ("lookup", "skip")
    assert lookup.rounds > 0
    assert skip.rounds > 0
    assert here.measured.copied_from_prompt is not None


def test_the_figures_are_the_compilers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification,
        "measure_speedup",
        lambda *_: PairedTimings(plain([1.0, 2.0, 3.0]), drafting([0.5, 1.0, 1.5])),
    )
    verified = verify(tiny(), of_tiny("speculate"), TASK)
    assert verified.remeasured.measured is not None
    assert verified.remeasured.measured.speedup.mean == pytest.approx(2)
    assert verified.outcome == "faster"


def test_what_was_measured_here_says_when_and_of_which_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        verification, "measure_speedup", lambda *_: PairedTimings(plain([1.0]), drafting([0.5]))
    )
    claim = of_tiny("speculate")
    there, here = claim.provenance, verify(tiny(), claim, TASK).remeasured.provenance
    assert (here.searcher, here.objective, here.seed, here.trials, here.search_seconds) == (
        there.searcher,
        there.objective,
        there.seed,
        there.trials,
        there.search_seconds,
    )
    assert here.created is not None
    assert there.created is not None
    assert here.created > there.created


def test_a_plain_verdict_is_verified_by_drafting_with_what_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(*decoders_and_rest):  # type: ignore[no-untyped-def]
        assert [d.recipe for d in decoders_and_rest[:2]] == [Recipe(), Recipe((SKIP,))]
        return PairedTimings(plain([1.0, 2.0]), drafting([1.0, 2.0]))

    monkeypatch.setattr(verification, "measure_speedup", look)
    assert verify(tiny(), of_tiny("plain"), TASK).outcome == "plain"


def test_a_profile_without_a_draft_has_nothing_to_verify() -> None:
    with pytest.raises(
        ProfileError,
        match=r"names no draft that lost, so there is nothing to measure: `skipsearch tune` finds "
        r"out",
    ):
        verify(tiny(), load_profile(GOLDEN / "v3_plain.yaml"), TASK)


def test_a_profile_of_another_architecture_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification, "measure_speedup", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(ProfileError, match="16 layers, but tiny has 5"):
        verify(tiny(), claimed(), TASK)


def test_fewer_prompts_can_be_asked_for() -> None:
    measured = verify(tiny(), of_tiny("speculate"), TASK, n_prompts=2).remeasured.measured
    assert measured is not None
    assert measured.prompts == 2


def test_what_is_not_as_it_was_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification, "measure_speedup", lambda *_: PairedTimings(plain([1.0]), drafting([0.5]))
    )
    told = "\n".join(verify(tiny(), of_tiny("speculate"), TASK).differences)
    for difference in (
        "measured on NVIDIA H200, used on",
        "measured with engine graph, used with hf",
        "measured with torch 2.13.0,",
        "task pycode has other text here",
    ):
        assert difference in told
    assert "chat template" not in told
    other = of_tiny("speculate", task="prose")
    warm = other.task.sampling.model_copy(update={"temperature": 0.8})
    other = other.model_copy(
        update={
            "task": other.task.model_copy(
                update={"chat_template_sha256": "7e" * 32, "sampling": warm}
            )
        }
    )
    told = "\n".join(verify(tiny(), other, TASK).differences)
    for difference in (
        "made for task prose, verified on pycode",
        "went through another chat template",
        "made for temperature 0.8",
    ):
        assert difference in told


def test_an_unmeasured_profile_comes_out_measured_with_its_source_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        verification,
        "measure_speedup",
        lambda *_: PairedTimings(plain([1.0, 2.0]), drafting([0.5, 1.0])),
    )
    imported = of_tiny("unmeasured", task="any")
    here = verify(tiny(), imported, TASK).remeasured
    assert (here.verdict, here.task.name, here.model.config_sha256) == (
        "speculate",
        "pycode",
        "c0" * 32,
    )
    assert here.recipe == imported.recipe
    made = here.provenance
    assert (made.searcher, made.source, made.objective, made.trials, made.search_seconds) == (
        "import",
        imported.provenance.source,
        "wall",
        1,
        0.0,
    )
    assert parse_profile(dump_profile(here).encode(), "x.yaml") == here
