"""The counts of a decoder, recounted from its drafts and the full model's own text."""

from __future__ import annotations

from helpers.drafting import decoder_with
from helpers.properties import with_examples
from helpers.tiny import LAYERS, FullModel, tiny_llama, tiny_model_and_reference
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.session import SkipDrafter
from skipsearch.models import adapt

from .checks import MASKS, PROMPTS, assert_partly_accepted
from .count_checks import Recorder, check_counts

light_masks = st.sets(st.integers(0, 2 * LAYERS - 1), max_size=4).map(
    lambda s: SkipMask.from_sublayers(LAYERS, s)
)


def test_every_count_is_that_of_an_independent_recount_and_so_is_what_the_policy_is_told() -> None:
    total = DecodeStats()

    @with_examples(30)
    @given(
        light_masks,
        st.integers(1, 12),
        st.integers(1, 12),
        st.sampled_from(PROMPTS),
        st.integers(1, 20),
    )
    def holds(
        mask: SkipMask, draft_length: int, last: int, prompt: tuple[int, ...], limit: int
    ) -> None:
        nonlocal total
        total += check_counts([(mask, draft_length, last, prompt, limit)])

    holds()
    assert_partly_accepted(total)
    assert 0 < total.rejecting_rounds < total.rounds


def test_alpha_and_tau_follow_from_the_counts() -> None:
    stats = check_counts()
    assert stats.alpha == stats.accepted / (stats.accepted + stats.rejecting_rounds)
    assert stats.accepted_fraction == stats.accepted / stats.drafted
    assert stats.tau == stats.round_tokens / stats.rounds


def test_a_round_cut_short_by_an_end_of_sequence_emits_only_what_stands_before_it() -> None:
    _, full = tiny_model_and_reference()
    tokens = full.greedy(PROMPTS[0], 12)
    end = tokens[4]
    model = adapt(tiny_llama(eos=end))
    result = Decoder(model, SkipMask(LAYERS), draft_length=8, exit_policy=Fixed()).generate(
        PROMPTS[0], 12
    )
    n = tokens.index(end) + 1
    assert result.tokens == tokens[:n]
    assert (result.stats.tokens, result.stats.round_tokens, result.stats.rounds) == (n, n - 1, 1)
    assert result.stats.accepted == result.stats.drafted == 8, (
        "accepted counts what the full model judged, shown or not"
    )


def test_a_low_confidence_token_ends_its_draft_and_is_verified() -> None:
    model, full = tiny_model_and_reference()
    recorder = Recorder(SkipDrafter(MASKS[0], Confidence(threshold=1.0)))
    result = decoder_with(model, recorder, 6).generate(PROMPTS[0], 20)
    assert result.tokens == full.greedy(PROMPTS[0], 20)
    assert {len(d) for d in recorder.drafts} == {1}
    assert 0 < result.stats.accepted < result.stats.drafted == len(recorder.drafts)


def test_what_a_policy_learns_ends_with_its_request_unless_it_is_shared() -> None:
    """The threshold of Draft & Verify stays across requests, by `across_requests`."""
    model, _ = tiny_model_and_reference()
    for shared in (False, True):
        fast = Adaptive(threshold=0.2, step=1.0, beta2=0.5, across_requests=shared)
        decoder = Decoder(model, MASKS[0], exit_policy=fast)
        drafted = [decoder.generate(PROMPTS[0], 12).stats.drafted for _ in range(3)]
        assert (len(set(drafted)) > 1) is shared


def test_a_seed_repeats_a_sample_whatever_was_asked_in_between() -> None:
    model, _ = tiny_model_and_reference()
    decoder = Decoder(model, MASKS[0], exit_policy=Adaptive(threshold=0.5, step=1.0, beta2=0.5))
    first = decoder.generate(PROMPTS[0], 30, temperature=1.0, seed=7)
    decoder.generate(PROMPTS[2], 40, temperature=1.0, seed=1)
    again = decoder.generate(PROMPTS[0], 30, temperature=1.0, seed=7)
    assert (again.tokens, again.stats.drafted) == (first.tokens, first.stats.drafted)


def test_times_are_kept_apart_and_add_up() -> None:
    model, _ = tiny_model_and_reference()
    stats = Decoder(model, MASKS[0]).generate(PROMPTS[0], 12).stats
    assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds) > 0
    assert abs(stats.decode_seconds - stats.draft_seconds - stats.verify_seconds) < 1e-6


def test_one_token_is_the_prefills_own_and_takes_no_round() -> None:
    hf = tiny_llama()
    result = Decoder(adapt(hf), MASKS[0]).generate(PROMPTS[0], 1)
    assert result.tokens == FullModel(hf).greedy(PROMPTS[0], 1)
    assert (
        result.stats.tokens,
        result.stats.rounds,
        result.stats.tau,
        result.stats.seconds_per_token,
    ) == (1, 0, None, None)
