"""Run any decoder-only model as an embedding, a list of layers and a head (`ModelAdapter`).

    model = load_adapter("org/name")                  # a Hub id, a folder, an alias, or "demo"
    model.spec.n_layers, model.spec.dtype             # facts of the model
    h = model.block(3, h, cache, plan, mlp=False)     # its fourth layer, without the MLP

- adapter, kv_cache: the port, the KV cache and the plans of passes
- loading/: from a model's name to an adapter
- families/: the table of families, and the adapter over transformers' own modules
- fused/: Llama-shaped models with their weights merged for speed
- generic/: models without a row in the table, run by their own forward
- check, reference, stored_checks: whether an adapter computes what the model's own forward does
- weight_overlay: a model with other weights in some sub-layers
- chat/: chat templates and token ids
"""

from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.loading.loader import adapt, load_adapter, load_tokenizer

__all__ = ["ModelAdapter", "ModelSpec", "adapt", "load_adapter", "load_tokenizer"]
