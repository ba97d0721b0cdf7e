"""Checks of drafts of a second model: text, drafts by the definition, and distributions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from helpers.draft_models import draft_model_of, draft_spec, make_relative
from helpers.tiny import FullModel, tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.models import ModelAdapter, adapt

from .checks import FEW_TOKENS, PROMPTS, REQUESTS, assert_partly_accepted
from .count_checks import recorded
from .enumeration_checks import Law, check_law
from .sampling_checks import Warp

KINDS = ("qwen2", "pruned", "captured", "gguf", "recurrent")
LOOKUP = Lookup(min_match=1, draft_length=3)
UNSURE = make_exit("confidence", threshold=0.3)
FEW = 6  # tokens of the model whose texts are enumerated
OF_TWO = Warp(1.3, top_k=3)


def list_specs(model: ModelAdapter) -> list[DraftModel]:
    """Settings of every kind for a draft model."""
    specs = [draft_spec(model), draft_spec(model, 9, UNSURE, attn=(1,), mlp=(0,))]
    if not model.spec.is_recurrent:
        specs += [
            draft_spec(model, 5, siblings=Siblings(below=0.9, most=2)),
            draft_spec(model, 5, UNSURE, vocabulary=FEW_TOKENS),
        ]
    return specs


def check_draft_models(kind: str = "pruned", engine: str = "native") -> DecodeStats:
    """Check greedy text, alone and half of the specs after lookup; some drafts are rejected."""
    with use_engine(engine):
        model, full = tiny_model_and_reference()
    draft_model, _ = draft_model_of(kind)
    total = DecodeStats()
    for i, spec in enumerate(list_specs(draft_model)):
        for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec)))[: 2 - i % 2]:
            decoder, by_spec = Decoder(model, recipe), DecodeStats()
            for prompt, n in REQUESTS:
                result = decoder.generate(prompt, n)
                assert result.tokens == full.greedy(prompt, n), (spec, prompt)
                by_spec += result.stats
            assert_partly_accepted(by_spec)
            total += by_spec
    return total


def check_draft_model_drafts(kind: str = "qwen2") -> DecodeStats:
    """Check that every draft is the draft model's own continuation of the text."""
    model, full = tiny_model_and_reference()
    draft_model, own = draft_model_of(kind)
    total = DecodeStats()
    for recipe in (Recipe((draft_spec(draft_model),)), Recipe((LOOKUP, draft_spec(draft_model)))):
        stats, rounds = recorded(model, full, recipe, PROMPTS, 12)
        for found in rounds:
            assert found.chain == own.greedy(found.history, len(found.chain)), found
        total += stats
    assert_partly_accepted(total)
    return total


@cache
def _few_tokens() -> tuple[Any, Any]:
    """Return a model of few tokens and a relative of it that has two more at its end."""
    hf = tiny_llama(layers=2, vocab=FEW, hidden=16)
    return hf, make_relative(hf, layers=1, vocab_size=FEW + 2)


def check_draft_model_law(
    siblings: Siblings | None = None,
    vocabulary: Vocabulary | None = None,
    n_more: int = 0,
    warp: Warp = OF_TWO,
) -> Law:
    """Check that every sampled text has the full model's probability.

    n_more: tokens that the draft model has besides those of the full model, 0 or 2.
    """
    hf, longer = _few_tokens()
    draft_hf = longer if n_more else make_relative(hf, layers=1)
    draft_model, model = adapt(draft_hf), adapt(hf)
    if n_more:
        # The tail is likely, so that a draft would often propose it.
        longer.lm_head.weight[FEW:] = longer.lm_head.weight[:n_more] * 1.5
        model.tokenizer, draft_model.tokenizer = Names(FEW), Names(FEW + n_more)
    spec = draft_spec(draft_model, 2, siblings=siblings, vocabulary=vocabulary)
    return check_law(Decoder(model, Recipe((spec,))), FullModel(hf), (1, 4), 3, warp)


class Names:
    """A tokenizer that names tokens and reads no text. order: the number of each token."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, count: int, order: torch.Tensor | None = None):
        self.order = list(range(count)) if order is None else order.tolist()

    def get_vocab(self) -> dict[str, int]:
        return {f"t{number}": token for token, number in enumerate(self.order)}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(f"t{self.order[token]}" for token in tokens)
