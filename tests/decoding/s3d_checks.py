"""Checks of the drafts of s3d against the definition.

The thinned model runs over unknown tokens, after the full model's K/V of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers.drafting import wrap_drafters
from helpers.modules import module_folder, save_s3d, small_s3d
from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.s3d.spec import S3D, DraftTree
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS, load_multi_token
from skipsearch.drafters.trained.module_weights import load_module
from skipsearch.engine import forward, run_layers
from skipsearch.models import adapt
from skipsearch.models.kv_cache import Planner

from .checks import FEW_TOKENS, PROMPTS, restrict_logits
from .count_checks import recorded
from .sampling_checks import Warp, check_sampling

TREE = DraftTree(
    parents=(0, 1, 2, 0, 0, 1, 4, 6), ranks=(0, 0, 0, 1, 2, 1, 0, 0)
)  # a trunk of three, and what branches off
LOOKUP = Lookup(min_match=1, draft_length=3)


@torch.no_grad()
def by_definition(spec: S3D, text: list[int], rows: int) -> Tensor:
    """Return the draft's logits [rows, V] after a text, one row after another."""
    model, _ = tiny_model_and_reference()
    drafting = load_multi_token(model, spec.module, [module_folder()]).model
    unknown = load_module(module_folder() / spec.module.file)[1][MASK_EMBEDDINGS].to(
        model.spec.device
    )
    n = len(text) - 1
    cache, planner = model.new_cache(1, n + rows), Planner(n + rows, model.spec.device)
    if n:
        forward(
            model,
            torch.tensor([text[:-1]], device=model.spec.device),
            cache,
            planner.plan_chain(0, n),
        )
    found = []
    for k in range(rows):
        h = (
            model.embed(torch.tensor([text[-1:]], device=model.spec.device))
            if k == 0
            else unknown[None, k - 1 : k]
        )
        found.append(
            drafting.head(
                run_layers(
                    drafting, h, cache, planner.plan_chain(n + k, 1), spec.mask(model.spec.n_layers)
                )
            )[0, 0]
        )
    return restrict_logits(torch.stack(found), model, spec.vocabulary, text)


def check_s3d_drafts(vocabulary: Vocabulary | None = None) -> DecodeStats:
    """Check that every draft is that of the definition, with low-rank updates and without.

    It drafts alone and after lookup.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for rank in (None, 2):
        spec = small_s3d(rank).model_copy(update={"vocabulary": vocabulary})
        for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
            stats, rounds = recorded(model, full, recipe, PROMPTS[:3], 18, [module_folder()])
            total += stats
            for found in rounds:
                expected = (
                    by_definition(spec, found.history, min(found.most, 4)).argmax(-1).tolist()
                )
                assert found.chain == expected, (rank, recipe.shape)
    assert 0 < total.accepted < total.drafted
    return total


def check_s3d_restricted() -> DecodeStats:
    """Check drafts that know a vocabulary and the tokens of the text only."""
    return check_s3d_drafts(FEW_TOKENS)


def check_s3d_trees() -> DecodeStats:
    """Check the same with a tree.

    A node is the choice of its rank in the row of its depth, if there is such a row.
    """
    model, full = tiny_model_and_reference()
    spec = small_s3d().model_copy(update={"tree": TREE})
    total = DecodeStats()
    for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
        stats, rounds = recorded(model, full, recipe, PROMPTS, 18, [module_folder()])
        total += stats
        for found in rounds:
            ranked = by_definition(spec, found.history, min(found.most, 4)).topk(3).indices.tolist()
            nodes = [
                ranked[depth - 1][rank]
                for depth, rank in zip(TREE.depths, TREE.ranks, strict=True)
                if depth <= len(ranked)
            ]
            assert [*found.chain, *found.others] == nodes
            assert len(found.chain) == min(TREE.n_main, len(ranked))
    assert 0 < total.accepted < total.drafted
    return total


def check_s3d_tree_sampling() -> DecodeStats:
    """Check by enumeration that samples have the full model's distribution."""
    hf = tiny_llama(3, vocab=5, hidden=16, layers=3)
    model, full = adapt(hf), FullModel(hf)
    spec = save_s3d(
        model, SkipMask(3, (1,), (1,)), 1, "sampling-tree.safetensors", 3, seed=-5
    ).model_copy(update={"tree": TREE})
    return check_sampling(
        Warp(0.8),
        samples=600,
        model=model,
        recipe=Recipe((spec,)),
        length=4,
        prompt=(2, 0, 2, 0),
        next_logits=full.next_logits,
        modules=[module_folder()],
    )


class Named(DraftSession):
    """A drafter that checks that tokens and distributions are of the model's vocabulary."""

    def __init__(self, drafter: Any):
        self.drafter, self.looked = drafter, 0

    def new_session(self) -> Named:
        self.inner = self.drafter.new_session()
        return self

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        draft = self.inner.draft(ctx, most)
        assert int(draft.tokens.max()) < VOCAB
        assert draft.probs is None or draft.probs.shape[1] == VOCAB
        self.looked += 1
        return draft  # type: ignore[no-any-return]

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.inner.verified(ctx, path)


def check_s3d_names_tokens() -> None:
    """Check that the marker of an unknown token is never drafted.

    Drafts are chains and trees, greedy and sampled.
    """
    model, _ = tiny_model_and_reference()
    for spec in (small_s3d(), small_s3d(2), small_s3d().model_copy(update={"tree": TREE})):
        decoder = wrap_drafters(
            Decoder(model, Recipe((spec,)), module_folders=[module_folder()]), Named
        )
        for temperature in (0.0, 1.0):
            decoder.generate(PROMPTS[0], 12, temperature=temperature)
        [(_, named)] = decoder.loop.drafters
        assert named.looked > 3  # type: ignore[attr-defined]
