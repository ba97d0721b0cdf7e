"""Draft heads: one decoder layer over the full model's last hidden states and the next tokens.

    x_i = P [norm_e(embed(t_{i+1})); norm_h(h_i)]    h_i: output of the last layer at token t_i
    y_i = layer(x_0, …, x_i)                         a decoder layer with its own K/V
    logits of t_{i+2} = head(norm(y_i))              the model's embedding and head

The next draft step reads y_i in place of h_{i+1}, which no pass has computed yet. After a round,
the K/V of accepted tokens are computed again from the full model's hidden states. A draft step thus
attends to exact rows of all committed tokens and to the draft's own rows after them.
Sources: DeepSeek-V3 (arXiv 2412.19437), equations 21 to 23; FastMTP (2509.18362) for one head that
all steps share.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.core.reading import BITS_OF_WEIGHTS, DraftWeights
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.card import ModuleCard
from skipsearch.drafters.trained.module_weights import check_card, load_referenced
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.draft_head import NativeHeadRunner, NativeInputMix
from skipsearch.engine.on_same_engine import base_adapter, on_same_engine
from skipsearch.errors import ModelError, ModuleError
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan

# Names of tensors in a module file; after the prefix, the names of `models.weight_overlay` follow.
LAYER_PREFIX = "layer."
PROJECTION, EMBEDDING_NORM, HIDDEN_NORM = "proj.weight", "norm_e.weight", "norm_h.weight"
NORM_EPS = 1e-6


@dataclass
class InputMix:
    """The input of the head's layer, from a hidden state and the next token's embedding."""

    projection: Tensor  # [H, 2H], its left half for the embedding
    embedding_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input. embedded, hidden, result: [B, T, H]."""
        shape = self.embedding_norm.shape
        both = torch.cat(
            [
                F.rms_norm(embedded, shape, self.embedding_norm.to(embedded.dtype), NORM_EPS),
                F.rms_norm(hidden, shape, self.hidden_norm.to(hidden.dtype), NORM_EPS),
            ],
            dim=-1,
        )
        return F.linear(both, self.projection)


class DraftHead(Protocol):
    """A draft head on a model.

    model: the full model. adapter: the model whose `head` computes the logits of a step; drafts may
    restrict its vocabulary. runner: runs whole drafts in one call, and has copies in fewer bits;
    None: the engine has no such call.
    """

    model: ModelAdapter
    adapter: ModelAdapter
    runner: NativeHeadRunner | None = None

    def rounded(self, weights: DraftWeights) -> DraftHead:
        """Return the head with matrices in fewer bits; itself for `stored`.

        Raises: ModelError if this head or its engine has no such draft; MemoryError.
        """

    def new_cache(self, capacity: int) -> KVCache:
        """Return a cache for the head's K/V of one text."""

    def read_states(self, hidden: Tensor) -> Tensor:
        """Return what the head reads of the last layer's output, [B, T, H] -> [B, T, H]."""

    def run(self, hidden: Tensor, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """Run the head's layer.

        hidden: [B, T, H], from `read_states` or from the step before. tokens: [B, T], each after
        its hidden state. Returns the states [B, T, H] of the next step.
        """

    def compute_logits(self, adapter: ModelAdapter, hidden: Tensor) -> Tensor:
        """Return the logits of a step from the states that `run` returned.

        adapter: that of this head, or the same with fewer rows of the head.
        """


class TrainedHead(DraftHead):
    """A head that `train mtp` made.

    adapter: the model with the head's layer as one more layer, and the head's norm as its final
    norm (`weight_overlay.append_layer`).
    """

    def __init__(self, model: ModelAdapter, adapter: ModelAdapter, mix: InputMix):
        self.model, self.adapter, self.mix = model, adapter, mix
        self.layer = model.spec.n_layers  # the number of the appended layer
        if isinstance(adapter, NativeAdapter) and adapter.model_struct.embed_scale:
            norms = mix.embedding_norm, mix.hidden_norm
            packed = NativeInputMix.pack(adapter, mix.projection, norms, NORM_EPS)
            self.runner = NativeHeadRunner(adapter, packed)

    def rounded(self, weights: DraftWeights) -> TrainedHead:
        if weights == "stored":
            return self
        if self.runner is None:
            raise ModelError(
                f"a draft head in {weights} needs the engine native, and {self.model.spec.id} is "
                f"driven by {self.model.spec.engine}; remove `weights`"
            )
        head = copy.copy(self)
        runner = head.runner = self.runner.rounded(BITS_OF_WEIGHTS[weights])
        head.adapter = runner.adapter
        return head

    def new_cache(self, capacity: int) -> KVCache:
        self.model.new_cache(1, capacity)  # extends rotary tables and masks to `capacity`
        return KVCache(self.layer + 1, 1, capacity)

    def read_states(self, hidden: Tensor) -> Tensor:
        return hidden

    def run(self, hidden: Tensor, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        if self.runner is not None:
            return self.runner.run(hidden, tokens, cache, plan)
        x = self.mix(self.model.embed(tokens, plan.positions), hidden)
        return self.adapter.block(self.layer, x, cache, plan)

    def compute_logits(self, adapter: ModelAdapter, hidden: Tensor) -> Tensor:
        return adapter.head(hidden)


def load_draft_head(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> TrainedHead:
    """Load the head of a module.

    Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    return build_draft_head(model, *load_referenced(ref, folders))


def build_draft_head(
    model: ModelAdapter, card: ModuleCard, tensors: Mapping[str, Tensor], name: str
) -> TrainedHead:
    """Build the head from tensors that were read already. name: their file's name, for errors.

    Raises: ModuleError for tensors that do not fit the model.
    """
    check_card(card, "mtp", model.spec, name)
    base, n, width = base_adapter(model), model.spec.n_layers, model.spec.hidden_size
    shapes = {PROJECTION: (width, 2 * width), EMBEDDING_NORM: (width,), HIDDEN_NORM: (width,)}
    try:
        for key, shape in shapes.items():
            if key not in tensors or tuple(tensors[key].shape) != shape:
                raise ModelError(f"a head has {key} of shape {shape}")
        layer = {
            f"{n}.{key.removeprefix(LAYER_PREFIX)}": tensor
            for key, tensor in tensors.items()
            if key.startswith(LAYER_PREFIX)
        }
        if {key.split(".")[1] for key in layer} != set(weight_overlay.SUBLAYER_KINDS):
            raise ModelError("a head has an attention and an MLP")
        norm = {
            key: tensor
            for key, tensor in tensors.items()
            if key not in shapes and not key.startswith(LAYER_PREFIX)
        }
        adapter = weight_overlay.append_layer(base, n - 1)
        adapter = weight_overlay.overlay_final_norm(
            weight_overlay.overlay_sublayer_weights(adapter, layer), norm
        )
    except (ModelError, ValueError, IndexError) as error:
        raise ModuleError(
            f"{name}: this module does not fit {model.spec.id}: {error}; train one for this model"
        ) from None
    placed = (tensors[key].to(model.spec.device, model.spec.dtype) for key in shapes)
    return TrainedHead(model, on_same_engine(model, adapter), InputMix(*placed))


def plan_depth(n_rows: int, depth: int, device: torch.device, first: int = 0) -> PassPlan:
    """Plan the pass of draft step `depth`, from 0, of the rounds that start at rows of a text.

    The rows of depth 0 are 0 … n_rows − 1. Rounds start at the rows from `first` on. Depth d has
    the rows first + d … n_rows − 1. The keys of a depth follow those of the depth before. Row j
    attends to the keys of depth 0 up to row j − depth, and to one key of each later depth k, that
    of row j − depth + k: these are the keys that decoding has in this step.
    """
    starts = [0, *(first + k for k in range(1, depth + 1))]  # first row of each depth
    row = torch.arange(starts[-1], n_rows, device=device)[:, None]
    keys = [torch.arange(start, n_rows, device=device)[None] for start in starts]
    visible = [keys[0] <= row - depth]
    visible += [keys[k] == row - depth + k for k in range(1, depth + 1)]
    mask = torch.cat(visible, dim=1)[None, None]
    n_keys, is_chain = mask.shape[-1], depth == 0
    slots = torch.arange(n_keys - len(row), n_keys, device=device)[None]
    return PassPlan(
        row.T.contiguous(),
        slots,
        n_keys,
        None if is_chain else mask,
        n_keys - len(row),
        is_chain,
        None if is_chain else torch.cat(keys, dim=1),
    )
