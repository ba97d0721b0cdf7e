"""What s3d's drafts are, by the definition: the thinned model over unknown tokens, behind the full
model's K/V of the text.
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
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.s3d.spec import S3D, DraftTree
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS
from skipsearch.drafters.trained.module_weights import load_module
from skipsearch.engine import forward, run_layers
from skipsearch.models import adapt
from skipsearch.models.kv_cache import Planner

from .checks import PROMPTS
from .count_checks import recorded
from .sampling_checks import Warp, check_sampling

TREE = DraftTree(
    parents=(0, 1, 2, 0, 0, 1, 4, 6), ranks=(0, 0, 0, 1, 2, 1, 0, 0)
)  # a trunk of three, and what branches off
LOOKUP = Lookup(min_match=1, draft_length=3)


@torch.no_grad()
def by_definition(spec: S3D, text: list[int], rows: int) -> Tensor:
    """[rows, V]: logits of a draft behind a text, its rows run one after another, each behind those
    before it.
    """
    model, _ = tiny_model_and_reference()
    drafting = spec.build(model, [module_folder()]).multi_token_draft.model  # type: ignore[attr-defined]
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
    return torch.stack(found)


def check_s3d_drafts() -> DecodeStats:
    """Every round's draft is what the definition gives, with low-rank changes and without, alone
    and behind lookup.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for rank in (None, 2):
        spec = small_s3d(rank)
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


def check_s3d_trees() -> DecodeStats:
    """The same with a tree: each of its nodes is the choice of its rank in the row of its depth, as
    far as there are rows.
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
    """Samples are distributed as the full model's own, found by enumeration."""
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
    """A drafter of whose drafts every token is one of the model's, and every distribution one over
    them.
    """

    def __init__(self, inner: Any):
        self.inner, self.looked = inner, 0

    def new_session(self) -> Named:
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
    """What stands for an unknown token is never drafted itself, chain or tree, greedy or
    sampled.
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
