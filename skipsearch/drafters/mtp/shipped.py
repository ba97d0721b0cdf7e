"""A draft head that the checkpoint ships, run by transformers' own layer.

    x_i = P [norm_e(embed(t_{i+1})); norm_h(norm(h_i))]    norm: the model's final norm
    y_i = norm_y(layer(x_0, …, x_i))                       a decoder layer with its own K/V
    logits of t_{i+2} = y_i U                              U: the model's output matrix

The next draft step reads y_i in place of norm(h_{i+1}).
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; `MtpModel` of transformers; the MTP model of
Qwen3-Next in vLLM.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from skipsearch.errors import ModelError, ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.unmodified import UnmodifiedModel
from skipsearch.models.generic.attention_pattern import AttentionPattern
from skipsearch.models.generic.cache_view import TransformersCacheView
from skipsearch.models.kv_cache import KVCache, PassPlan
from skipsearch.models.loading.shipped_heads import (
    can_load_head,
    load_shipped_head,
    ships_draft_head,
)

_heads: WeakKeyDictionary[Any, ShippedHead] = WeakKeyDictionary()  # by model


class ShippedHead:
    """The first head of a checkpoint. All drafts of a model share it.

    module: transformers' `MtpModel` of one layer.
    """

    def __init__(self, model: ModelAdapter, module: Any, final_norm: Any):
        self.model = self.adapter = model
        self.module, self.final_norm = module, final_norm
        # As in the model's own layers, which are loaded with the same kernels.
        self.pattern = AttentionPattern("shown")

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, capacity)

    def read_states(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.final_norm(hidden)
        return states

    def run(self, hidden: Tensor, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        embedded = self.module.embed_tokens(tokens)
        states: Tensor = self.module.layers[0](
            embedded,
            hidden,
            position_embeddings=self.module.rotary_emb(embedded, position_ids=plan.positions),
            attention_mask=self.pattern.make_mask(plan, embedded.dtype),
            position_ids=plan.positions,
            past_key_values=TransformersCacheView(plan, cache),
        )
        return states

    def compute_logits(self, adapter: ModelAdapter, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.shared_head(hidden)
        return logits


def ships_loadable_head(model: ModelAdapter) -> bool:
    """Return whether the folder of a model has a draft head that `load_head_of` can load."""
    if not isinstance(model, UnmodifiedModel) or not can_load_head(model.spec.family):
        return False
    config: Any = model.model.config
    try:
        return ships_draft_head(config.name_or_path, model.spec.n_layers)
    except ModelError:  # a model that was made in memory
        return False


def load_head_of(model: ModelAdapter) -> ShippedHead:
    """Load the head that a model ships, once for each model.

    Raises: ModuleError if it ships none that can be loaded.
    """
    if (head := _heads.get(model)) is None:
        if not isinstance(model, UnmodifiedModel) or not can_load_head(model.spec.family):
            raise ModuleError(
                f"mtp without a module drafts with the head that a model ships, and skipsearch can "
                f"load none of {model.spec.id}, a {model.spec.family} model driven by "
                f"{model.spec.engine}: name a head that `skipsearch train mtp` made"
            )
        module: Any = model.model
        try:
            shipped = load_shipped_head(module, model.spec.family)
            head = ShippedHead(model, shipped, module.get_decoder().norm)
        except ModelError as error:
            raise ModuleError(str(error)) from None
        _heads[model] = head
    return head
