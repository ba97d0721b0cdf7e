"""The configuration of a DeciLM checkpoint: Llama's, and `block_configs`.

This file lies beside the weights, because transformers has no class for the model_type `nemotron-nas`. Engines load it with
trust_remote_code; it needs transformers alone.
"""

from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    """block_configs: for each layer `attention` and `ffn`, read as attributes: config.block_configs[3].attention.no_op."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, dict[str, Any]]] | None = None, **settings: Any):
        super().__init__(**settings)
        self.block_configs = [SimpleNamespace(**{part: SimpleNamespace(**values) for part, values in block.items()})
                              for block in block_configs or ()]

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        data["block_configs"] = [{part: vars(values) for part, values in vars(block).items()} for block in self.block_configs]
        return data
