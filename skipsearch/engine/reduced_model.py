"""Models that read less: weights in fewer bits, and a head for some tokens only.

They are for draft passes. They share embedding, norms and cache layout with the verifying model, so
a draft reads the exact K/V of all committed tokens. Its own K/V are in the slots of drafted tokens,
which the verify pass overwrites.

Weights of the layers are rounded to the nearest number, in groups of 32 inputs with one scale each,
by `engine.native.blocks.quantize`. The copy depends on the stored weights alone. Its head has eight
bits on the engine native, and is the model's own on other engines.
Sources: ML-SpecQD (arXiv 2503.13565) and QuantSpec (2502.10424) for drafts in fewer bits, FR-Spec
(2502.14856) for the vocabulary.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from skipsearch.core.reading import BITS_OF_WEIGHTS, DRAFT_WEIGHTS, DraftWeights, Reading
from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.blocks import round_weight
from skipsearch.engine.native.draft_copy import (
    HEAD_BITS,
    SCALE_BITS,
    PanelHeadRows,
    SharedHeadRows,
    bits_per_weight,
    list_layer_matrices,
    round_matrices,
    rounds_head,
)
from skipsearch.engine.native.structs import PANEL_ROWS
from skipsearch.engine.on_same_engine import overlay_weights
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.families.unmodified import experts_of
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.int4_linear import can_pack_int4, pack_int4
from skipsearch.models.fused.linear import Linear, pack_linear
from skipsearch.models.head_rows import HeadRows, TorchHeadRows, fill_up
from skipsearch.models.weight_overlay import SUBLAYER_KINDS, get_sublayer_weights

_copies: WeakKeyDictionary[Any, dict[str, ModelAdapter]] = WeakKeyDictionary()
_copying = threading.Lock()


@dataclass(frozen=True)
class ReducedModel:
    """A model that reads what a `Reading` says.

    model: the model for passes with the whole head. new_head: makes the rows of the head for a
    request; None: drafts use the whole head. nbytes: memory besides the verifying model's.
    """

    model: ModelAdapter
    new_head: Callable[[], HeadRows] | None
    nbytes: int

    def restrict(self, rows: HeadRows) -> ModelAdapter:
        """Return the model whose head has these rows only. Its logits are [..., rows.count]."""
        return _with_head_rows(self.model, rows)


def list_draft_weights(model: ModelAdapter) -> tuple[DraftWeights, ...]:
    """Return the formats in which a draft of this model can be faster than as it is stored."""
    base = model.fused_model if isinstance(model, GraphAdapter) else model
    if isinstance(base, FusedAdapter) and base.experts is None:
        return ("stored", "int4") if can_pack_int4(base.layers[0][1].down) else ("stored",)
    if not isinstance(model, NativeAdapter):
        return ("stored",)
    stored_bits = bits_per_weight(list_layer_matrices(model))
    return tuple(
        weights
        for weights in DRAFT_WEIGHTS
        if weights == "stored" or BITS_OF_WEIGHTS[weights] + SCALE_BITS < 0.9 * stored_bits
    )


def can_restrict_head(model: ModelAdapter) -> bool:
    """Return whether a draft of this model can have a head for some tokens only."""
    if isinstance(model, HFAdapter):
        try:
            _find_linear_head(model)
        except ModelError:
            return False
        return True
    return isinstance(model, NativeAdapter | FusedAdapter | GraphAdapter)


def make_reduced_model(model: ModelAdapter, reading: Reading) -> ReducedModel:
    """Return the model for drafts that read what `reading` says.

    Copies are shared between all drafts of a model.
    Raises: ModelError if this model or its engine has no such draft; ValueError for a token outside
    the vocabulary; MemoryError.
    """
    drafting = get_draft_copy(model, reading.weights)
    nbytes = 0 if drafting is model else _copy_bytes(model, drafting)
    if reading.vocabulary is None:
        return ReducedModel(drafting, None, nbytes)
    multiple = PANEL_ROWS if isinstance(model, NativeAdapter) else 1
    tokens = torch.tensor(
        fill_up(reading.vocabulary.token_ids(), model.spec.vocab_size, multiple),
        device=model.spec.device,
    )
    if isinstance(drafting, NativeAdapter):
        shared = SharedHeadRows(drafting, tokens)
        return ReducedModel(drafting, partial(PanelHeadRows, shared), nbytes + shared.nbytes)
    weight, bias = _head_of(drafting)
    rows = weight[tokens]
    new_head = partial(TorchHeadRows, weight, bias, tokens, rows)
    return ReducedModel(drafting, new_head, nbytes + rows.nbytes)


def get_draft_copy(model: ModelAdapter, weights: DraftWeights) -> ModelAdapter:
    """Return the model with rounded weights, which all drafts of the model share.

    Raises: ModelError; MemoryError.
    """
    if weights == "stored":
        return model
    with _copying:
        copies = _copies.setdefault(model, {})
        if weights not in copies:
            copies[weights] = _round(model, BITS_OF_WEIGHTS[weights])
        return copies[weights]


def release_draft_copies(model: ModelAdapter, used: Collection[str]) -> None:
    """Forget the copies of a model in formats that are not in `used`."""
    with _copying:
        copies = _copies.get(model, {})
        for weights in list(copies):
            if weights not in used:
                del copies[weights]


def estimate_draft_bytes(model: ModelAdapter, reading: Reading) -> int:
    """Return about how many bytes drafts take besides the model's own."""
    hidden, vocab_size = model.spec.hidden_size, model.spec.vocab_size
    stored_bits = head_bits = 8.0 * model.spec.dtype.itemsize
    head_bytes = hidden * vocab_size * head_bits / 8
    if isinstance(model, NativeAdapter):
        stored_bits = bits_per_weight(list_layer_matrices(model))
        unembed = model.fused_model.unembed
        head_bits, head_bytes = bits_per_weight([unembed]), unembed.nbytes
    layer_bytes = max(0.0, model.read_bytes + _unread_bytes(model) - head_bytes)
    copied = 0.0
    if reading.bits is not None:
        copied = layer_bytes * (reading.bits + SCALE_BITS) / stored_bits
        if isinstance(model, NativeAdapter) and rounds_head(model):
            head_bits = HEAD_BITS + SCALE_BITS
            copied += hidden * vocab_size * head_bits / 8
    rows = 0 if reading.vocabulary is None else len(reading.vocabulary.token_ids())
    return int(copied + rows * hidden * head_bits / 8)


def _round(model: ModelAdapter, bits: int) -> ModelAdapter:
    """Return the model with the matrices of its layers rounded."""
    if isinstance(model, NativeAdapter):
        return round_matrices(model, bits)
    base = model.fused_model if isinstance(model, GraphAdapter) else model
    if not isinstance(base, HFAdapter | FusedAdapter):
        raise _no_draft_copy(model)
    if isinstance(base, FusedAdapter):
        rounded = base.with_matrices(partial(_round_matrix, bits=bits))
        return GraphAdapter(rounded) if isinstance(model, GraphAdapter) else rounded
    weights = {
        name: round_weight(weight, bits) if weight.dim() == 2 else weight
        for layer in range(model.spec.n_layers)
        for kind in SUBLAYER_KINDS
        for name, weight in get_sublayer_weights(base, layer, kind).items()
    }
    return overlay_weights(model, weights)


def _round_matrix(matrix: Linear, bits: int) -> Linear:
    if bits == BITS_OF_WEIGHTS["int4"] and can_pack_int4(matrix):
        return pack_int4(matrix)
    return pack_linear(round_weight(matrix.to_dense(), bits), matrix.bias)


def _unread_bytes(model: ModelAdapter) -> int:
    """Return the bytes of the experts that a pass over one row does not read."""
    experts = experts_of(model)
    return 0 if experts is None else experts.unread_bytes


def _copy_bytes(model: ModelAdapter, copied: ModelAdapter) -> int:
    """Return the bytes of the matrices that a copy does not share with its model."""
    if isinstance(model, NativeAdapter) and isinstance(copied, NativeAdapter):
        head = [copied.fused_model.unembed] if rounds_head(model) else []
        return sum(matrix.nbytes for matrix in [*list_layer_matrices(copied), *head])
    return copied.read_bytes + _unread_bytes(copied) - _head_of(model)[0].nbytes


def _head_of(model: ModelAdapter) -> tuple[Tensor, Tensor | None]:
    """Return (weight [V, H], bias [V]) of a head; the weight of the engine native is in panels.

    Raises: ModelError if the head cannot be split.
    """
    if isinstance(model, NativeAdapter):
        return model.fused_model.unembed.weight, model.fused_model.unembed.bias
    base = model.fused_model if isinstance(model, GraphAdapter) else model
    if isinstance(base, FusedAdapter):
        return base.unembed.to_dense(), base.unembed.bias
    if isinstance(base, HFAdapter):
        head = _find_linear_head(base)
        return head.weight.detach(), None if head.bias is None else head.bias.detach()
    raise _no_draft_copy(model)


def _find_linear_head(model: HFAdapter) -> nn.Linear:
    """Return the module that computes logits. Raises: ModelError if there is none on one device."""
    for step in model._parts.head_steps:
        if type(step) is nn.Linear and step.out_features == model.spec.vocab_size:
            return step
    raise _no_draft_copy(model)


def _with_head_rows(model: ModelAdapter, rows: HeadRows) -> ModelAdapter:
    if isinstance(model, NativeAdapter):
        assert isinstance(rows, PanelHeadRows)
        return model.with_head_rows(rows)
    assert isinstance(rows, TorchHeadRows)
    restricted = _with_head(model, rows)
    return model.with_head(restricted.head) if isinstance(model, GraphAdapter) else restricted


def _with_head(model: ModelAdapter, head: Any) -> ModelAdapter:
    """Return a model that torch runs, with another head: a `Linear`, or a module."""
    base = copy.copy(model.fused_model if isinstance(model, GraphAdapter) else model)
    if isinstance(base, FusedAdapter):
        base.unembed = head
        return base
    assert isinstance(base, HFAdapter)
    old = _find_linear_head(base)
    steps = [head if step is old else step for step in base._parts.head_steps]
    base._parts = replace(base._parts, head_steps=steps)
    return base


def _no_draft_copy(model: ModelAdapter) -> ModelError:
    return ModelError(
        "a draft with fewer bits or fewer tokens needs a family of the table, driven by hf, lean, "
        f"native or graph on one device, and {model.spec.id} is a {model.spec.family} model driven "
        f"by {model.spec.engine}"
    )
