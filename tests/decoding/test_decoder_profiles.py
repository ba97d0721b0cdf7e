"""A profile in a `Decoder`: it drafts as the profile says, and no profile changes a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import DecodeError, ProfileError
from skipsearch.profile import Profile, load_profile

from .checks import PROMPTS, assert_partly_accepted

SKIP = Skip(attn=(1, 3), mlp=(2,), draft_length=5, exit=Confidence(threshold=0.25))


def profile(
    verdict: str = "speculate", n_layers: int = LAYERS, drafters: tuple[DrafterSpec, ...] = (SKIP,)
) -> Profile:
    """Return a profile of the shared tiny model."""
    model, _ = tiny_model_and_reference()
    golden = load_profile(Path(__file__).parents[1] / "profile" / "golden" / f"v3_{verdict}.yaml")
    made_for = golden.model.model_copy(
        update={
            "id": model.spec.id,
            "family": "llama",
            "n_layers": n_layers,
            "dtype": "float64",
            "config_sha256": model.spec.config_sha256,
            "weights_sha256": None,
        }
    )
    return golden.model_copy(
        update={"model": made_for, "lost" if verdict == "lost" else "drafters": drafters}
    )


def test_a_profile_sets_the_recipe_and_changes_no_token() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, profile())
    assert decoder.recipe == Recipe((SKIP,))
    result = decoder.generate(PROMPTS[0], 20)
    assert result.tokens == full.greedy(PROMPTS[0], 20)
    assert_partly_accepted(result.stats)


def test_its_drafters_are_asked_in_order_and_each_is_counted() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, profile(drafters=(Lookup(min_match=1, draft_length=4), SKIP)))
    result = decoder.generate(PROMPTS[2], 40)
    assert result.tokens == full.greedy(PROMPTS[2], 40)
    lookup, skip = result.stats.by_drafter
    assert lookup.rounds > 0
    assert skip.rounds > 0
    assert lookup.drafted + skip.drafted == result.stats.drafted


def test_a_profile_is_decoded_as_it_was_measured_or_not_at_all() -> None:
    with pytest.raises(DecodeError, match="belong to a bare mask; a profile or recipe has its own"):
        Decoder(tiny_model_and_reference()[0], profile(), draft_length=2)


def test_an_imported_mask_drafts_and_says_that_nobody_measured_it() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, profile("unmeasured"))
    assert decoder.generate(PROMPTS[0], 8).tokens == full.greedy(PROMPTS[0], 8)
    assert any("never measured" in warning for warning in decoder.warnings)


def test_where_nothing_beat_plain_decoding_it_runs_plain() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, profile("lost"))
    result = decoder.generate(PROMPTS[0], 8)
    assert decoder.recipe == Recipe()
    assert (result.tokens, result.stats.drafted) == (full.greedy(PROMPTS[0], 8), 0)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match=f"6 layers, but llama has {LAYERS}"):
        Decoder(tiny_model_and_reference()[0], profile(n_layers=LAYERS + 1))
