"""The architectures of GGUF files that are read, one row each: which family of transformers a file
is, which settings only that family has, and where the file has its tensors.

Names, orders and values are those of llama.cpp: gguf-py/gguf/constants.py and conversion/.
"""

from skipsearch.models.loading.gguf_architectures.dense import DENSE, OLMO3
from skipsearch.models.loading.gguf_architectures.experts import EXPERTS, MIXTRAL
from skipsearch.models.loading.gguf_architectures.latent import DEEPSEEK_V3, LATENT_ROWS
from skipsearch.models.loading.gguf_architectures.layer_norms import LAYER_NORMS
from skipsearch.models.loading.gguf_architectures.recurrent import FALCON_MAMBA, RECURRENT
from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import SIGMOID

# The name of an architecture in files -> its row.
ARCHITECTURES: dict[str, Architecture] = {
    **DENSE,
    **LAYER_NORMS,
    **EXPERTS,
    **LATENT_ROWS,
    **RECURRENT,
}
# The name of an architecture -> a key, a number, and the row of files in which it is at least that.
VARIANTS: dict[str, tuple[str, int, Architecture]] = {
    "llama": ("expert_count", 1, MIXTRAL),
    "olmo2": ("attention.sliding_window", 1, OLMO3),
    "mamba": ("ssm.dt_b_c_rms", 1, FALCON_MAMBA),
    "deepseek2": ("expert_gating_func", SIGMOID, DEEPSEEK_V3),
}

__all__ = ["ARCHITECTURES", "VARIANTS", "Architecture", "Settings", "Source"]
