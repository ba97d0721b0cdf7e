"""A draft head that the checkpoint ships, run by transformers' own layer.

    x_i = P [norm_e(embed(t_{i+1})); norm_h(norm(h_i))]    norm: the model's final norm
    y_i = norm_y(layer(x_0, …, x_i))                       a decoder layer with its own K/V
    logits of t_{i+2} = y_i U                              U: the model's output matrix

The next draft step reads y_i in place of norm(h_{i+1}).
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; `MtpModel` of transformers; the MTP model of
Qwen3-Next in vLLM.
"""

from __future__ import annotations

from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from torch import Tensor

from skipsearch.core.reading import DraftWeights
from skipsearch.drafters.mtp.weights import DraftHead
from skipsearch.errors import ModelError, ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.generic.attention_pattern import AttentionPattern
from skipsearch.models.generic.cache_view import TransformersCacheView
from skipsearch.models.generic.generic_adapter import GenericAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan
from skipsearch.models.loading.shipped_heads import (
    can_load_head,
    has_shipped_head,
    load_shipped_head,
)

# `MtpModel` of one layer by model. It shares modules of the model, and not the adapter itself.
_modules: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class ShippedHead(DraftHead):
    """The first head of a checkpoint.

    module: transformers' `MtpModel` of one layer, which all drafts of a model share.
    """

    def __init__(self, model: GenericAdapter, module: Any):
        self.model: ModelAdapter = model
        self.adapter: ModelAdapter = model
        hf_model: Any = model.model
        self.module, self.final_norm = module, hf_model.get_decoder().norm
        # The layer has full attention, and takes a mask of the form that the model's layers take.
        forms = [p.mask_kind for p in model.attention_patterns if p.mask_kind != "none"]
        self.pattern = AttentionPattern(forms[-1] if forms else "shown")

    def rounded(self, weights: DraftWeights) -> ShippedHead:
        if weights == "stored":
            return self
        raise ModelError(
            f"a draft head that the model ships has no copy in {weights}: remove `weights`"
        )

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
    """Return whether the files of a model have a draft head that `load_head_of` can load."""
    if not _can_load_head_of(model):
        return False
    try:
        return has_shipped_head(model.model)
    except ModelError:  # a model that was made in memory
        return False


def _can_load_head_of(model: ModelAdapter) -> TypeGuard[GenericAdapter]:
    return isinstance(model, GenericAdapter) and can_load_head(model.spec.family)


def load_head_of(model: ModelAdapter) -> ShippedHead:
    """Return the head that a model ships. Its weights are loaded once for each model.

    Raises: ModuleError if it ships none that can be loaded.
    """
    if not _can_load_head_of(model):
        raise ModuleError(
            f"mtp without a module drafts with the head that a model ships, and skipsearch can "
            f"load none of {model.spec.id}, a {model.spec.family} model driven by "
            f"{model.spec.engine}: name a head that `skipsearch train mtp` made"
        )
    if model not in _modules:
        try:
            _modules[model] = load_shipped_head(model.model, model.spec.family)
        except ModelError as error:
            raise ModuleError(str(error)) from None
    return ShippedHead(model, _modules[model])
