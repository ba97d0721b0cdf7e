"""What s3d's drafts are, by the definition: the thinned model over unknown tokens, behind the full model's K/V of the text."""

from __future__ import annotations

import torch
from helpers.drafting import wrapped
from helpers.modules import folder, small_s3d
from helpers.tiny import small_world
from torch import Tensor

from skipsearch.cache import Planner
from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.s3d import S3D
from skipsearch.engine import forward, onward
from skipsearch.modules.s3d import UNKNOWN
from skipsearch.modules.weights import load_tensors
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats

from .checks import PROMPTS
from .count_checks import Recorder

LOOKUP = Lookup(min_match=1, draft_length=3)


@torch.no_grad()
def by_definition(spec: S3D, text: list[int], rows: int) -> Tensor:
    """[rows, V]: logits of a draft behind a text, its rows run one after another, each behind those before it."""
    model, _ = small_world()
    drafting = spec.build(model, [folder()]).simultaneous.model  # type: ignore[attr-defined]
    unknown = load_tensors(folder() / spec.module.file)[1][UNKNOWN]
    n = len(text) - 1
    cache, planner = model.new_cache(1, n + rows), Planner(n + rows, torch.device("cpu"))
    if n:
        forward(model, torch.tensor([text[:-1]]), cache, planner.chain(0, n))
    found = []
    for k in range(rows):
        h = model.embed(torch.tensor([text[-1:]])) if k == 0 else unknown[None, k - 1:k]
        found.append(drafting.head(onward(drafting, h, cache, planner.chain(n + k, 1), spec.mask(model.spec.n_layers)))[0, 0])
    return torch.stack(found)


def check_s3d_drafts() -> DecodeStats:
    """Every round's draft is what the definition gives, with low-rank changes and without, alone and behind lookup."""
    model, full = small_world()
    total = DecodeStats()
    for rank in (None, 2):
        spec = small_s3d(rank)
        for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
            recorders: list[Recorder] = []

            def recording(drafter, recorders=recorders):  # type: ignore[no-untyped-def]
                recorders.append(Recorder(drafter))
                return recorders[-1]

            decoder = wrapped(Decoder(model, recipe, modules=[folder()]), recording)
            for prompt in PROMPTS[:3]:
                found = decoder.generate(prompt, 18)
                assert found.tokens == full.greedy(prompt, 18)
                total += found.stats
            for history, draft, most in zip(recorders[-1].histories, recorders[-1].drafts, recorders[-1].limits, strict=True):
                assert draft == by_definition(spec, history, min(most, 4)).argmax(-1).tolist(), (rank, recipe.shape)
    assert 0 < total.accepted < total.drafted
    return total
