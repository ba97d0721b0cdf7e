"""Models: any decoder-only model as an embedding, a list of layers and a head, behind one port, `ModelAdapter` (`spec.py`).

    model = load_adapter("org/name")                  # a Hub id, a folder, an alias, or "demo"
    model.spec.n_layers, model.spec.dtype             # what it is
    h = model.block(3, h, cache, plan, mlp=False)     # its fourth layer, without the MLP

loader, hub, files, config, fit    from a name to a model, with a sentence for each way that can fail
families, layout, hf               the table of families, and the adapter over their unmodified modules
structure, own, sight              a model that the table does not know, read from itself
lean, linear, norms, rope          weights fused for speed, for Llama-shaped families
recurrent, anchors                 layers that keep a state
check, checked                     whether what drives a model computes what its own forward does
"""

from skipsearch.models.loader import adapt, load_adapter, load_tokenizer
from skipsearch.models.spec import ModelAdapter, ModelSpec

__all__ = ["ModelAdapter", "ModelSpec", "adapt", "load_adapter", "load_tokenizer"]
