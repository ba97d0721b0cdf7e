"""A profile in a `Decoder`: it drafts as the profile says, and no profile changes a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny import LAYERS, small_world

from skipsearch.decoding import Decoder
from skipsearch.drafters.skip import SkipDrafter
from skipsearch.errors import ProfileError
from skipsearch.mask import SkipMask
from skipsearch.profile import Profile, load_profile
from skipsearch.profile.schema import ConfidenceExit
from skipsearch.profile.schema import SkipDrafter as StoredDrafter

from .checks import PROMPTS, assert_partly_accepted

MASK = SkipMask(LAYERS, (1, 3), (2,))


def profile(verdict: str = "speculate", n_layers: int = LAYERS) -> Profile:
    """A profile of the shared tiny model."""
    model, _ = small_world()
    golden = load_profile(Path(__file__).parents[1] / "profile" / "golden" / f"v1_{verdict}.yaml")
    made_for = golden.model.model_copy(update={"id": model.spec.id, "family": "llama", "n_layers": n_layers, "dtype": "float64",
                                               "config_sha256": model.spec.config_sha256, "weights_sha256": None})
    return golden.model_copy(update={"model": made_for, "drafter": StoredDrafter(attn=MASK.attn, mlp=MASK.mlp), "draft_length": 5,
                                     "exit": ConfidenceExit(threshold=0.25)})


def test_a_profile_sets_mask_draft_length_and_exit_and_changes_no_token() -> None:
    model, full = small_world()
    decoder = Decoder(model, profile())
    drafter = decoder.loop.drafter
    assert isinstance(drafter, SkipDrafter)
    assert (drafter.mask, decoder.loop.draft_length) == (MASK, 5)
    assert (drafter.exit.kind, drafter.exit.parameters()) == ("confidence", {"threshold": 0.25})
    result = decoder.generate(PROMPTS[0], 20)
    assert result.tokens == full.greedy(PROMPTS[0], 20)
    assert_partly_accepted(result.stats)


def test_a_draft_length_of_ones_own_wins_over_the_profiles() -> None:
    assert Decoder(small_world()[0], profile(), draft_length=2).loop.draft_length == 2


def test_an_imported_mask_drafts_and_says_that_nobody_measured_it() -> None:
    model, full = small_world()
    decoder = Decoder(model, profile("unmeasured"))
    assert decoder.generate(PROMPTS[0], 8).tokens == full.greedy(PROMPTS[0], 8)
    assert any("never measured" in warning for warning in decoder.warnings)


def test_where_nothing_beat_plain_decoding_it_runs_plain() -> None:
    model, full = small_world()
    decoder = Decoder(model, profile("plain"))
    result = decoder.generate(PROMPTS[0], 8)
    assert decoder.loop.drafter is None
    assert (result.tokens, result.stats.drafted) == (full.greedy(PROMPTS[0], 8), 0)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match=f"6 layers, but llama has {LAYERS}"):
        Decoder(small_world()[0], profile(n_layers=LAYERS + 1))
