"""A profile says what was measured: every figure in it comes from the samples, worked out here by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.threads import one_thread
from helpers.tiny import LAYERS, tiny_model_and_reference
from replay.fabricated import drafting, plain, sample

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DrafterStats
from skipsearch.drafters.exits import Exit
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.profile import Profile, dump_profile, parse_profile
from skipsearch.profile.schema import FinishReasons
from skipsearch.profile.show import describe_request_speedup
from skipsearch.replay.workload import Workload
from skipsearch.tasks import Prompt, Task, TaskSampling
from skipsearch.timing.interleaved import PairedTimings, TimedGeneration, Timings
from skipsearch.tuning import profile_builder
from skipsearch.tuning.profile_builder import build_profile

__all__ = ["one_thread"]

MASK = SkipMask(LAYERS, (1, 3), (2,))
ADAPTIVE = Adaptive(threshold=0.4, target_acceptance=0.7, step=0.01, beta1=0.5, beta2=0.9)
RECIPE = Recipe((Skip.from_mask(MASK, 12, ADAPTIVE),))
MIXED = Recipe((Lookup(min_match=2, draft_length=8), *RECIPE.drafters))
TASK = Task(
    "sums",
    2,
    "",
    TaskSampling(),
    11,
    64,
    6,
    0,
    False,
    (),
    (Prompt("c", "1 + 1"),),
    (Prompt("h", "2 + 2"),),
)
PROMPTS = ((5, 17, 40, 3), (1, 2), (60, 2, 2, 31, 8))


def named_model() -> ModelAdapter:
    model = adapt(tiny_model_and_reference()[0].model)  # type: ignore[attr-defined]
    model.spec = replace(model.spec, config_sha256="c" * 64, weights_sha256="e" * 64)
    return model


def compiled(
    baseline: Timings,
    ours: Timings,
    recipe: Recipe = RECIPE,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    temperature: float = 0.0,
    task: Task = TASK,
    stopped_early: bool = False,
) -> Profile:
    work = Workload(
        tuple(map(str, range(len(prompts)))), tuple(prompts), 11, 6, SamplingParams(temperature)
    )
    return build_profile(
        named_model(),
        task,
        work,
        recipe,
        PairedTimings(baseline, ours, "narrow" if stopped_early else "prompts_ended"),
        provenance=profile_builder.make_provenance("gp", "replay", 3, 57, 12.3456),
    )


def test_a_model_that_no_file_says_anything_about_gets_no_profile() -> None:
    work = Workload(("a",), PROMPTS[:1], 11, 6, SamplingParams())
    with pytest.raises(SearchError, match=r"was not loaded from files.*save it and load_model it"):
        build_profile(
            tiny_model_and_reference()[0],
            TASK,
            work,
            RECIPE,
            PairedTimings(plain([1.0]), drafting([1.0])),
            provenance=profile_builder.make_provenance("gp", "replay", 0, 1, 1.0),
        )


# --- verdict


def test_the_verdict_is_speculate_when_the_whole_interval_lies_above_one() -> None:
    profile = compiled(plain([1.0, 2.0, 3.0]), drafting([0.5, 1.0, 1.5]))
    assert profile.measured is not None
    assert profile.measured.speedup.ci95[0] > 1
    assert profile.verdict == "speculate"
    assert (profile.recipe, profile.lost) == (RECIPE, ())


@pytest.mark.parametrize(
    "seconds",
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.2, 1.05, 1.05]],
    ids=["equal", "slower", "not surely faster"],
)
def test_the_verdict_is_plain_when_it_does_not(seconds: list[float]) -> None:
    profile = compiled(plain([1.0, 1.0, 1.0]), drafting(seconds))
    assert profile.measured is not None
    assert profile.measured.speedup.ci95[0] <= 1
    assert profile.verdict == "plain"
    assert profile.recipe == Recipe(), "which decodes plainly"
    assert profile.lost == RECIPE.drafters, "what lost is documented"


def test_a_recipe_that_drafted_nothing_is_no_candidate() -> None:
    """No prompt held anything to look up."""
    profile = compiled(
        plain([1.0] * 3), plain([1.0] * 3), Recipe((Lookup(min_match=16, draft_length=2),))
    )
    assert (profile.verdict, profile.drafters, profile.lost) == ("plain", (), ())
    assert profile.measured is not None
    assert (
        profile.measured.alpha
        is profile.measured.beta
        is profile.measured.verify_ratio
        is profile.measured.copied_from_prompt
        is None
    )
    assert profile.measured.by_drafter == ()


# --- figures


def test_every_figure_comes_from_the_samples() -> None:
    measured = compiled(plain([1.0, 2.0, 3.0]), drafting([0.5, 1.0, 1.5])).measured
    assert measured is not None
    assert measured.baseline_ms_per_token.mean == pytest.approx(6 / 30 * 1e3)
    assert measured.ms_per_token.mean == pytest.approx(3 / 30 * 1e3)
    assert measured.speedup.mean == pytest.approx(2)
    assert measured.alpha == pytest.approx(
        18 / (18 + 9), rel=1e-2
    )  # accepted over accepted and rejecting rounds
    assert measured.accepted_fraction == pytest.approx(18 / 24)
    assert measured.tau == pytest.approx(30 / 12)
    a_pass = 6 / 30
    assert measured.beta == pytest.approx(1.5 / 24 / a_pass, rel=1e-2)
    assert measured.verify_ratio == pytest.approx(1.5 / 12 / a_pass, rel=1e-2)
    assert (measured.prompts, measured.tokens, measured.split) == (3, 33, "holdout")
    assert (measured.context_tokens.p50, measured.context_tokens.max) == (4 + 11, 5 + 11)
    assert measured.ended_on_repeat == 0
    assert (
        measured.lossless.prompts,
        measured.lossless.identical,
        measured.lossless.first_divergence_logit_gap,
    ) == (3, 3, None)


def test_repeats_of_a_prompt_count_once_but_for_time() -> None:
    once, twice = [1.0, 2.0, 3.0], [0.5, 1.0, 1.5]
    repeated = compiled(
        Timings(plain(once).samples * 2), Timings(drafting(twice).samples * 2)
    ).measured
    single = compiled(plain(once), drafting(twice)).measured
    assert repeated == single


def counted(prompt: int, *by_drafter: DrafterStats) -> TimedGeneration:
    """A sample whose tokens were drafted so."""
    made = sample(
        prompt,
        0.5,
        rounds=sum(d.rounds for d in by_drafter),
        drafted=sum(d.drafted for d in by_drafter),
        accepted=sum(d.accepted for d in by_drafter),
    )
    return replace(made, stats=replace(made.stats, by_drafter=list(by_drafter)))


def test_each_drafter_is_counted_over_all_prompts_and_a_repeat_adds_nothing() -> None:
    ours = [
        counted(0, DrafterStats(1, 6, 4, 1, copied=3), DrafterStats(2, 5, 3, 1)),
        counted(1, DrafterStats(), DrafterStats(4, 9, 5, 2)),
        counted(2, DrafterStats(1, 2, 0, 1), DrafterStats(3, 6, 6, 0)),
    ]
    for samples in (ours, ours * 2):
        measured = compiled(plain([1.0] * 3), Timings(samples), MIXED).measured
        assert measured is not None
        assert [(c.kind, c.rounds, c.drafted, c.accepted) for c in measured.by_drafter] == [
            ("lookup", 2, 8, 4),
            ("skip", 9, 20, 14),
        ]
        assert measured.copied_from_prompt == pytest.approx(3 / 33, rel=1e-2)


def test_what_copies_nothing_has_no_share_of_copies_and_what_could_have_has_one_of_zero() -> None:
    for recipe, share in ((RECIPE, None), (MIXED, 0.0)):
        stats = [DrafterStats(2, 4, 3, 1) for _ in recipe.drafters]
        profile = compiled(
            plain([1.0] * 3), Timings([counted(p, *stats) for p in range(3)]), recipe
        )
        assert profile.measured is not None
        assert profile.measured.copied_from_prompt == share
        assert ("copied_from_prompt" in dump_profile(profile)) == (share is not None)


@pytest.mark.parametrize("stopped_early", [False, True])
def test_a_profile_says_why_no_more_prompts_were_measured_and_the_interval_is_of_that(
    stopped_early: bool,
) -> None:
    baseline, ours = plain([1.0, 2.0, 3.0]), drafting([0.5, 1.1, 1.4])
    measured = compiled(baseline, ours, stopped_early=stopped_early).measured
    assert measured is not None
    assert measured.stopped == ("narrow" if stopped_early else "prompts_ended")
    low, high = measured.speedup.ci95
    expected = ours.speedup_over(baseline, stopped_early)
    assert low == pytest.approx(expected.low, rel=0.02)
    assert high == pytest.approx(expected.high, rel=0.02)


def test_the_gain_of_a_whole_request_counts_the_prefill_that_drafts_do_not_shorten() -> None:
    baseline, ours = plain([1.0, 2.0, 3.0]), drafting([0.5, 1.0, 1.5])
    for timings in (baseline, ours):
        for one in timings.samples:
            one.stats.prefill_seconds = 1.0
    measured = compiled(baseline, ours).measured
    assert measured is not None
    assert measured.speedup.mean == pytest.approx(2.0)
    assert measured.request_speedup is not None
    assert measured.request_speedup.mean == pytest.approx(9 / 6)
    assert "whole requests, with reading the prompt: 1.50×" in describe_request_speedup(measured)


def test_prompts_that_ended_on_a_repeat_are_counted() -> None:
    ours = Timings(
        [
            sample(
                p, 0.5, rounds=4, drafted=8, accepted=6, finish_reason="repeat" if p else "length"
            )
            for p in (0, 1, 2, 1)
        ]
    )
    baseline = Timings([sample(p, 1.0) for p in (0, 1, 2, 1)])
    measured = compiled(baseline, ours).measured
    assert measured is not None
    assert measured.ended_on_repeat == 2


def test_measured_answers_are_counted_by_why_they_ended() -> None:
    reasons = ["eos", "stop", "loop"]
    ours = Timings(
        [
            sample(p, 0.5, rounds=4, drafted=8, accepted=6, finish_reason=reason)
            for p, reason in enumerate(reasons)
        ]
    )
    measured = compiled(Timings([sample(p, 1.0) for p in range(3)]), ours).measured
    assert measured is not None
    assert measured.finish_reasons == FinishReasons(end=2, loop=1, cut=0)
    assert not measured.measures_beginnings


def test_a_generation_that_differs_is_counted_with_the_logit_gap_where_it_parts() -> None:
    _, full = tiny_model_and_reference()
    right = [full.greedy(p, 11) for p in PROMPTS]
    wrong = [*right[1][:4], *(63 - t for t in right[1][4:])]
    ours = Timings(
        [
            sample(p, 0.5, wrong if p == 1 else right[p], rounds=4, drafted=8, accepted=6)
            for p in range(3)
        ]
    )
    measured = compiled(Timings([sample(p, 1.0, right[p]) for p in range(3)]), ours).measured
    assert measured is not None
    best = sorted(full.next_logits([*PROMPTS[1], *right[1][:4]]))
    assert (measured.lossless.prompts, measured.lossless.identical) == (3, 2)
    assert measured.lossless.first_divergence_logit_gap == pytest.approx(
        best[-1] - best[-2], rel=1e-2
    )


def test_samples_drawn_at_random_are_not_compared() -> None:
    measured = compiled(
        plain([1.0]), drafting([0.5]), prompts=PROMPTS[:1], temperature=0.7
    ).measured
    assert measured is not None
    assert (
        measured.lossless.prompts,
        measured.lossless.identical,
        measured.lossless.first_divergence_logit_gap,
    ) == (0, 0, None)


# --- the rest


def test_it_says_which_model_task_machine_and_search_it_is_of() -> None:
    profile = compiled(plain([1.0] * 3), drafting([0.5] * 3))
    assert (profile.model.family, profile.model.n_layers, profile.model.dtype) == (
        "llama",
        LAYERS,
        "float64",
    )
    assert (profile.model.config_sha256, profile.model.weights_sha256) == ("c" * 64, "e" * 64)
    assert (profile.task.name, profile.task.version, profile.task.calibration_sha256) == (
        "sums",
        2,
        TASK.calibration_sha256,
    )
    assert profile.hardware is not None
    assert (profile.hardware.kind, profile.hardware.threads) == ("cpu", 1)
    assert profile.drafters == RECIPE.drafters
    made = profile.provenance
    assert (made.searcher, made.objective, made.seed, made.trials, made.search_seconds) == (
        "gp",
        "replay",
        3,
        57,
        12.3,
    )


@pytest.mark.parametrize(
    "exit_policy", [Fixed(), Confidence(threshold=0.3), ADAPTIVE], ids=lambda e: e.kind
)
def test_a_drafter_is_written_with_what_is_needed_to_build_it_again(exit_policy: Exit) -> None:
    recipe = Recipe(
        (Lookup(min_match=3, draft_length=9, per_match=2), Skip.from_mask(MASK, 6, exit_policy))
    )
    profile = compiled(plain([1.0] * 3), drafting([0.5] * 3), recipe)
    assert parse_profile(dump_profile(profile).encode(), "a profile").recipe == recipe


@pytest.mark.parametrize(
    "recipe", [RECIPE, MIXED, Recipe((MIXED.drafters[0],))], ids=lambda r: r.shape
)
def test_it_is_read_back_from_yaml_as_it_was_written(recipe: Recipe) -> None:
    for profile in (
        compiled(plain([1.0] * 3), drafting([0.5] * 3), recipe),
        compiled(plain([0.5] * 3), drafting([1.0] * 3), recipe),
    ):
        assert parse_profile(dump_profile(profile).encode(), "a profile") == profile


def test_the_share_of_choosing_is_of_all_decode_time_and_a_stream_has_two_parts() -> None:
    first, second, third = drafting([1.0, 2.0, 4.0]).samples
    for which, seconds in ((first, 0.5), (second, 0.2)):
        which.stats.choosing_seconds = seconds
    ours = Timings(
        [replace(first, while_learning=True), replace(second, while_learning=True), third]
    )
    found = compiled(plain([2.0, 3.0, 6.0]), ours).measured
    assert found is not None
    assert found.choosing_share == 0.1
    assert found.stream is not None
    learning, settled = found.stream.learning, found.stream.settled
    assert learning is not None
    assert settled is not None
    assert (learning.prompts, settled.prompts) == (2, 1)
    assert learning.speedup.mean == 1.7, "5 / 3, as far as two prompts are sure of it"
    assert settled.speedup.mean == pytest.approx(6 / 4)
    assert (learning.choosing_share, settled.choosing_share) == (0.233, 0.0)
    without = compiled(plain([2.0, 3.0, 6.0]), drafting([1.0, 2.0, 4.0])).measured
    assert without is not None
    assert (without.choosing_share, without.stream) == (None, None)
