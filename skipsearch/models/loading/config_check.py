"""Check that a config describes the model in its weight files, before memory is allocated."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch

from skipsearch.errors import ModelError
from skipsearch.models.families.table import Family
from skipsearch.models.loading.weight_files import StoredTensor
from skipsearch.models.third_party import first_line_of, silence_transformers

# Values that the files may lack: computed tables, which are not stored, and small differences,
# which loading reports in detail.
SLACK_VALUES = 10_000_000
# Tables that are computed now, and that old files store.
COMPUTED_TENSOR = re.compile(
    r"(inv_freq|(cos|sin)_cached|(attn|attention)\.(bias|masked_bias|causal_mask))$"
)
MISMATCH_HINT = "config.json and weights belong to two models, download both again"


def check_config_matches_weights(
    name: str, config: Any, family: Family, stored: Sequence[StoredTensor], quantized: bool
) -> None:
    """Raise ModelError if layers are not stored, if the model is far larger than its files, so that
    it would fill the memory, or if its weights are stored as whole numbers.

    quantized: the files hold packed weights, each of at least one bit.
    """
    numbers = [
        int(n) for tensor in stored for n in re.findall(r"(?<=\.)\d{1,9}(?=\.)", f".{tensor.name}.")
    ]
    n_stored_layers = 1 + max(numbers, default=-1)
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        n_layers = getattr(part, "num_hidden_layers", None)
        if isinstance(n_layers, int) and not 0 < n_layers <= n_stored_layers:
            raise ModelError(
                f"{name}: config.json asks for {n_layers} layers and the weights have "
                f"{n_stored_layers}: {MISMATCH_HINT}"
            )
    n_stored = sum(tensor.n_values for tensor in stored)
    max_values = (
        sum(8 * tensor.n_values * (tensor.bytes_per_value or 4) for tensor in stored)
        if quantized
        else 2 * n_stored
    )
    tables = _list_tables(name, config, family)
    n_values = sum(table.numel() for table in tables.values())
    if n_values > max_values + SLACK_VALUES:
        raise ModelError(
            f"{name}: config.json asks for {n_values:,} weights and the files hold {n_stored:,}: "
            f"{MISMATCH_HINT}"
        )
    if not quantized:
        _reject_whole_numbers(name, stored, tables)


def _reject_whole_numbers(
    name: str, stored: Sequence[StoredTensor], tables: dict[str, torch.Tensor]
) -> None:
    """Raise ModelError if a weight is stored in a format that is no float's.

    transformers renames weights while it loads them, so the last part of a name counts.
    """
    whole = {
        key.rpartition(".")[2] for key, table in tables.items() if not table.is_floating_point()
    }
    for tensor in stored:
        is_table = tensor.name.rpartition(".")[2] in whole or COMPUTED_TENSOR.search(tensor.name)
        if not tensor.is_float and not is_table:
            raise ModelError(
                f"{name}: {tensor.name} is stored as {tensor.number_format}, and weights are "
                "floats unless config.json names a quantization: take the original model's files"
            )


def _list_tables(name: str, config: Any, family: Family) -> dict[str, torch.Tensor]:
    """Return the model's weights and tables by name, without memory.

    The model is built on the meta device, which also tests whether it can be built."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # count plain weights
    try:
        with silence_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=family.attn_implementation,
                trust_remote_code=False,
            )
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    except Exception as error:  # any error of a family's own code for inconsistent numbers
        raise ModelError(
            f"{name}: its config.json cannot be used ({first_line_of(error)}); take the original "
            "model's"
        ) from None
