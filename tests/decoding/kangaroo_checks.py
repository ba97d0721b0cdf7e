"""Checks of the drafts of kangaroo against the definition.

First layers, adapter and head run over the whole text again for every token.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from helpers.modules import module_folder, small_kangaroo
from helpers.tiny import FullModel, tiny_model_and_reference, use_engine
from torch import Tensor

from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.trained.module_weights import load_module
from skipsearch.models.families.hf_adapter import HFAdapter

from .checks import FEW_TOKENS, PROMPTS, restrict_logits
from .count_checks import recorded

UNSURE = 0.6
LOOKUP = Lookup(min_match=1, draft_length=3)


def by_definition(full: FullModel, spec: Kangaroo, text: list[int]) -> Tensor:
    """Return the draft's logits [V] after a text, computed with Hugging Face's modules alone."""
    llama, tensors = full.hf.model, load_module(module_folder() / spec.module.file)[1]
    ids, place = torch.tensor([text]), torch.arange(len(text))[None]
    h = llama.embed_tokens(ids)
    around = {"position_embeddings": llama.rotary_emb(h, place), "attention_mask": None}
    for layer in llama.layers[: spec.exit_layer]:
        h = layer(h, **around)
        h = h[0] if isinstance(h, tuple) else h
    template = llama.layers[spec.exit_layer]

    def called(module: torch.nn.Module, part: str, *inputs: Tensor, **options: object) -> Tensor:
        own = {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        found = torch.func.functional_call(module, own, inputs, options)
        return found[0] if isinstance(found, tuple) else found

    normed = called(template.input_layernorm, "adapter.attn.norm.", h)
    h = h + called(template.self_attn, "adapter.attn.run.", hidden_states=normed, **around)
    if any(name.startswith("adapter.mlp") for name in tensors):
        h = h + called(
            template.mlp,
            "adapter.mlp.run.",
            called(template.post_attention_layernorm, "adapter.mlp.norm.", h),
        )
    return full.hf.lm_head(called(llama.norm, "norm.", h))[0, -1]


@torch.no_grad()
def check_kangaroo_drafts(
    forms: tuple[str, ...] = ("attention", "layer"),
    siblings: Siblings | None = None,
    vocabulary: Vocabulary | None = None,
) -> DecodeStats:
    """Check that every draft is that of the definition, alone and after lookup.

    A draft ends at the first unsure token.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for form in forms:
        settings = {"siblings": siblings, "vocabulary": vocabulary}
        spec = small_kangaroo(form, 0.1, 5, UNSURE).model_copy(update=settings)
        for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
            stats, rounds = recorded(model, full, recipe, PROMPTS[:3], 20, [module_folder()])
            total += stats
            for found in rounds:
                expected, beside = list[int](), list[int]()
                while len(expected) < found.most:
                    logits = by_definition(full, spec, [*found.history, *expected])
                    logits = restrict_logits(logits, model, vocabulary, found.history)
                    first, *others = logits.topk(
                        1 + (siblings.most if siblings else 0)
                    ).indices.tolist()
                    expected.append(first)
                    confidence = float(logits.softmax(-1).max())
                    beside += others if siblings and confidence < siblings.below else []
                    if confidence < UNSURE:
                        break
                assert (found.chain, found.others) == (expected, beside), (form, recipe.shape)
    assert 0 < total.accepted < total.drafted
    return total


def check_kangaroo_siblings() -> DecodeStats:
    """Check the same with siblings of unsure tokens, some of which are accepted."""
    total = check_kangaroo_drafts(("attention",), Siblings(below=0.9, most=3))
    assert total.accepted > 0
    return total


def check_kangaroo_restricted() -> DecodeStats:
    """Check drafts that know a vocabulary and the tokens of the text only."""
    return check_kangaroo_drafts(("attention",), vocabulary=FEW_TOKENS)


def check_kangaroo_passes() -> None:
    """Check the number of passes for N drafted tokens.

    These are N + 1 passes of one row below the exit, N of the adapter, and one of N + 1 rows above.
    """
    with use_engine("hf"):
        model, full = tiny_model_and_reference()
    spec, block, passes = (
        small_kangaroo("attention", 0.1, 5, UNSURE),
        HFAdapter.block,
        Counter[tuple[int, int]](),
    )

    def counted(self: HFAdapter, i: int, h: Tensor, *arguments: Any, **options: Any) -> Tensor:
        passes[i, h.shape[1]] += 1
        return block(self, i, h, *arguments, **options)

    for prompt in PROMPTS[:3]:
        passes.clear()
        with patch.object(HFAdapter, "block", counted):
            stats, rounds = recorded(model, full, Recipe((spec,)), [prompt], 20, [module_folder()])
        drafted = Counter(len(found.chain) for found in rounds)
        undrafted, n = stats.rounds - len(rounds), model.spec.n_layers
        passes -= Counter((i, len(prompt)) for i in range(n + 1))  # the prefill
        for i in range(spec.exit_layer):
            assert (
                passes.pop((i, 1))
                == sum((length + 1) * times for length, times in drafted.items()) + undrafted
            )
        for i in range(spec.exit_layer, n):
            assert passes.pop((i, 1), 0) == undrafted
            for length, times in drafted.items():
                assert passes.pop((i, length + 1)) == times
        two_rows = passes.pop(
            (n, 2), 0
        )  # after a round that was accepted whole, or one without a draft
        assert two_rows <= stats.rounds - stats.rejecting_rounds
        assert passes.pop((n, 1), 0) + two_rows == stats.drafted
        assert not passes


def check_kangaroo_side_by_side() -> None:
    """Check that interleaved requests have separate K/V of the adapter."""
    model, full = tiny_model_and_reference()
    decoder = Decoder(
        model,
        Recipe((LOOKUP, small_kangaroo("attention", 0.1, 4))),
        module_folders=[module_folder()],
    )
    read: list[list[int]] = [[] for _ in PROMPTS]
    for chunks in zip_longest(*(decoder.stream(prompt, 16) for prompt in PROMPTS)):
        for tokens, chunk in zip(read, chunks, strict=True):
            tokens.extend(chunk.tokens if chunk else ())
    assert read == [full.greedy(prompt, 16) for prompt in PROMPTS]
