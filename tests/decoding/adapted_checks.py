"""Checks of drafts with trained weights: they change the speed of decoding, and never its text."""

from __future__ import annotations

from itertools import zip_longest

from helpers.modules import SMALL_MASK, module_folder, noisy_copies, save_adapted, small_module
from helpers.tiny import FullModel, tiny_llama, tiny_model_and_reference

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.models import adapt

from .checks import PROMPTS
from .sampling_checks import Warp, check_sampling

LOOKUP = Lookup(min_match=1, draft_length=3)


def recipes(noise: float = 0.1) -> list[Recipe]:
    """Return recipes of the module alone and after lookup."""
    spec = small_module(noise, 4)
    return [Recipe((spec,)), Recipe((LOOKUP, spec))]


def check_adapted() -> DecodeStats:
    """Check that interleaved requests on one decoder get the full model's own tokens.

    One of the modules drafts nonsense.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for recipe in [*recipes(), *recipes(30.0)]:
        decoder = Decoder(model, recipe, module_folders=[module_folder()])
        read: list[list[int]] = [[] for _ in PROMPTS]
        for chunks in zip_longest(*(decoder.stream(prompt, 16) for prompt in PROMPTS)):
            for tokens, chunk in zip(read, chunks, strict=True):
                tokens.extend(chunk.tokens if chunk else ())
                total += chunk.stats if chunk and chunk.stats else DecodeStats()
        assert read == [full.greedy(prompt, 16) for prompt in PROMPTS]
    return total


def check_adapted_drafts() -> None:
    """Check what modules draft.

    A module with the model's own weights drafts what the mask alone drafts. A module with other
    weights drafts other tokens.
    """
    model, _ = tiny_model_and_reference()
    same = save_adapted(
        model, SMALL_MASK, noisy_copies(model, SMALL_MASK, 0.0), "same.safetensors", draft_length=4
    )
    counts = [
        Decoder(model, Recipe((spec,)), module_folders=[module_folder()])
        .generate(PROMPTS[0], 24)
        .stats
        for spec in (same, small_module(30.0, 4))
    ]
    plain = (
        Decoder(model, SMALL_MASK, draft_length=4, exit_policy=same.exit)
        .generate(PROMPTS[0], 24)
        .stats
    )
    assert (counts[0].rounds, counts[0].accepted) == (plain.rounds, plain.accepted)
    assert counts[1].accepted != plain.accepted


def check_adapted_sampling() -> DecodeStats:
    """Check by enumeration that samples have the full model's distribution."""
    hf = tiny_llama(3, vocab=5, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    mask = SkipMask(3, (0,), (1,))
    spec = save_adapted(
        model, mask, noisy_copies(model, mask, 0.3), "sampling.safetensors", draft_length=2
    )
    recipe = Recipe((Lookup(min_match=2, draft_length=1), spec))
    return check_sampling(
        Warp(0.8),
        samples=600,
        model=model,
        recipe=recipe,
        length=3,
        prompt=(2, 0, 2, 0),
        next_logits=full.next_logits,
        modules=[module_folder()],
    )
