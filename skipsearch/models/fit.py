"""Whether a config asks for the model that its weight files hold, found out before anything of its size is made."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch

from skipsearch.errors import ModelError
from skipsearch.models.families import Family
from skipsearch.models.files import Stored
from skipsearch.models.telling import in_short, quietly

SLACK = 10_000_000  # values: tables that are computed and not stored, and small differences, which loading names one by one
TWO_MODELS = "config.json and weights belong to two models, download both again"


def refuse_misfit(name: str, config: Any, family: Family, stored: Sequence[Stored], quantized: bool) -> None:
    """Raises: ModelError for layers that are not stored, and for a model far larger than its files, which would fill the memory.

    quantized: the files hold packed weights, of one bit each or more.
    """
    numbers = [int(n) for tensor in stored for n in re.findall(r"(?<=\.)\d{1,9}(?=\.)", f".{tensor.name}.")]
    there = 1 + max(numbers, default=-1)
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        asked = getattr(part, "num_hidden_layers", None)
        if isinstance(asked, int) and not 0 < asked <= there:
            raise ModelError(f"{name}: config.json asks for {asked} layers and the weights have {there}: {TWO_MODELS}")
    values = sum(tensor.values for tensor in stored)
    room = sum(8 * tensor.values * (tensor.bytes_per_value or 4) for tensor in stored) if quantized else 2 * values
    asked = _size(name, config, family)
    if asked > room + SLACK:
        raise ModelError(f"{name}: config.json asks for {asked:,} weights and the files hold {values:,}: {TWO_MODELS}")


def _size(name: str, config: Any, family: Family) -> int:
    """Values of the model's weights and tables. It is built without memory, which also shows whether it can be built at all."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # the size in question is that of plain weights
    try:
        with quietly(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=family.attention,
                                                     trust_remote_code=False)
        return sum(table.numel() for table in (*model.parameters(), *model.buffers()))
    except Exception as error:  # each family fails in its own way on numbers that do not go together
        raise ModelError(f"{name}: its config.json cannot be used ({in_short(error)}); take the original model's") from None
