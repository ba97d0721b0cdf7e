"""Kangaroo's adapter: a small layer that turns what leaves a shallow layer into what the head reads.

    f = the model's layers 0 … exit − 1          its own, frozen
    f' = f + Attention(norm(f))                  the adapter; in the form `layer` an MLP follows
    logits = head(norm_A(f'))                    the model's head, norm_A in the place of the final norm

Everything below the exit is the full model's own, so an adapter pass over a text says exactly what rounds of decoding would draft there.
Source: Kangaroo (Liu et al. 2024), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.engine import in_one_piece, states_at
from skipsearch.engine.variants import natively, underneath
from skipsearch.errors import ModelError, ModuleError
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.models import variants
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.card import Card
from skipsearch.modules.weights import check_card, found_tensors

KINDS = {"attention": ("attn",), "layer": ("attn", "mlp")}   # of sub-layers that the adapter has, by form
PREFIX = "adapter."                                          # of its tensors' names in a file, before the names of `models.variants`


class Shallow:
    """A model that ends early: its first layers, the adapter, the head. It drafts into a cache of its own.

    model: whose layers run below the exit; adapter: the one that has the layer more (`variants.with_layer`).
    """

    def __init__(self, model: ModelAdapter, adapter: ModelAdapter, exit_layer: int, form: str):
        self.model, self.adapter, self.exit_layer, self.form = model, adapter, exit_layer, form
        n = model.spec.n_layers
        self._without = None if form == "layer" else SkipMask(n + 1, mlp=(n,))   # what the adapter does not have

    def new_cache(self, capacity: int) -> KVCache:
        """For one text: K/V of the layers below the exit and, behind those of all layers, of the adapter."""
        self.model.new_cache(1, capacity)   # angles and masks for so many positions
        return KVCache(self.model.spec.n_layers + 1, 1, capacity)

    def features(self, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """[B, T] -> [B, T, H], what goes into the exit layer."""
        return states_at(self.model, self.exit_layer, tokens, cache, plan)

    def adapted(self, features: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """[B, T, H] -> [B, T, H], what the head reads, its norm included."""
        return self.adapter.block(self.model.spec.n_layers, features, cache, plan, attn=True, mlp=self.form == "layer")

    def head(self, h: Tensor) -> Tensor:
        return self.adapter.head(h)

    def logits(self, features: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """[1, T, H] -> [1, V], of what follows the last row."""
        n = self.model.spec.n_layers
        if (run := in_one_piece(self.adapter)) is not None:
            return run(features, cache, plan, self._without, n, n + 1, True, True)[:, -1]
        return self.head(self.adapted(features, cache, plan)[:, -1:])[:, -1]


def shallow(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> Shallow:
    """Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    return assembled(model, *found_tensors(ref, folders))


def assembled(model: ModelAdapter, card: Card, tensors: Mapping[str, Tensor], name: str) -> Shallow:
    """As `shallow`, of tensors that are read already. name: the file's, for errors."""
    check_card(card, "kangaroo", model.spec, name)
    assert card.exit_layer is not None   # a card of this kind has one
    base, n = underneath(model), model.spec.n_layers
    try:
        adapter = variants.with_layer(base, card.exit_layer)
        placed = {named(key, n): tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
        norm = {key: tensor for key, tensor in tensors.items() if not key.startswith(PREFIX)}
        if (found := {key.split(".")[1] for key in placed}) != set(KINDS[card.form]):
            raise ModelError(f"an adapter of the form {card.form} has {' and '.join(KINDS[card.form])}, and this one {sorted(found)}")
        adapter = variants.with_final_norm(variants.with_weights(adapter, placed), norm)
    except (ModelError, ValueError, IndexError) as error:
        raise ModuleError(f"{name}: this module does not fit {model.spec.id}: {error}; train one for this model") from None
    return Shallow(model, natively(model, adapter), card.exit_layer, card.form)


def named(key: str, layer: int) -> str:
    """`adapter.attn.…` as `20.attn.…`, where the adapter stands behind 20 layers."""
    return f"{layer}.{key.removeprefix(PREFIX)}"


def untrained(model: ModelAdapter, exit_layer: int, form: str) -> tuple[ModelAdapter, dict[str, Tensor]]:
    """(the model with an adapter that is a copy of its exit layer, the weights of that by the names of a file)."""
    adapter = variants.with_layer(underneath(model), exit_layer)
    n = model.spec.n_layers
    own = [pair for kind in KINDS[form] for pair in variants.weights_of(adapter, n, kind).items()]
    weights = {PREFIX + key.partition(".")[2]: weight for key, weight in own}
    return adapter, weights | variants.final_norm(adapter)


@torch.no_grad()
def predictions(shallow: Shallow, tokens: Sequence[int]) -> Tensor:
    """What the draft says behind each token of a text, [T, V], as any round of decoding would see it."""
    from skipsearch.cache import Planner

    device = shallow.model.spec.device
    cache, plan = shallow.new_cache(len(tokens)), Planner(len(tokens), device).chain(0, len(tokens))
    features = shallow.features(torch.tensor([list(tokens)], device=device), cache, plan)
    return shallow.head(shallow.adapted(features, cache, plan))[0]
