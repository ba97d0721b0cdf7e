"""What rows of several architectures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.row import Order, Part, Settings, Source
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

MAX_EXPERTS = 1 << 16
SIGMOID = 2  # of llama.cpp's functions that score experts


def order_by_halves(heads_key: str) -> Order:
    """Return the order of rows of which neighbours rotate together in files, and halves here."""

    def order(config: Any, length: int) -> Tensor:
        heads = getattr(config, heads_key)
        return torch.arange(length).view(heads, -1, 2).transpose(1, 2).flatten()

    return order


BY_HALVES: Mapping[str, Sequence[Source]] = {
    f"self_attn.{part}_proj.{kind}": [
        Source((f"attn_{part}.{kind}",), rows=order_by_halves(heads_key))
    ]
    for part, heads_key in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}


def group_by_key_head(length: int, widths: Sequence[int], n_key_heads: int) -> Tensor:
    """Return the order of rows that files have part by part, and models by key head.

    widths: the number of rows of each part, `length` in all.
    """
    parts = torch.arange(length).split(list(widths))
    return torch.cat([part.view(n_key_heads, -1) for part in parts], dim=1).flatten()


def log_of_negative(parts: Sequence[Tensor]) -> Tensor:
    return (-parts[0]).log()


def find_decay(module: str) -> dict[str, Sequence[Source]]:
    """Return the sources of what the state of a recurrent module decays by."""
    return {
        f"{module}.A_log": [Source(("ssm_a",), join=log_of_negative)],
        f"{module}.dt_bias": [Source(("ssm_dt.bias",))],
    }


def _find_part(index: int) -> Part:
    """Return where queries, keys or values are among the rows of all three."""

    def find(config: Any) -> tuple[int, int]:
        keys = config.num_key_value_heads * config.head_dim
        widths = [config.num_attention_heads * config.head_dim, keys, keys]
        return sum(widths[:index]), sum(widths)

    return find


# Of files that have queries, keys and values in one matrix, or in three.
JOINED_QKV: Mapping[str, Sequence[Source]] = {
    f"self_attn.{name}_proj.{kind}": [
        Source((f"attn_{name}.{kind}",)),
        Source((f"attn_qkv.{kind}",), part=_find_part(index)),
    ]
    for index, name in enumerate("qkv")
    for kind in ("weight", "bias")
}
# The bias of scores, under the names that it has in families.
SCORE_BIAS: Mapping[str, Sequence[Source]] = {
    f"mlp.{name}": [Source(("exp_probs_b.bias",))]
    for name in (
        "gate.e_score_correction_bias",
        "gate.moe_statics.e_score_correction_bias",
        "e_score_correction_bias",
        "expert_bias",
    )
}


def name_of(file: GGUFFile) -> str:
    return str(file.metadata["general.architecture"])


def list_numbers(file: GGUFFile, key: str, n_layers: int) -> list[Any]:
    """Return the numbers of a key, one for each layer of the model. Raises: GGUFError."""
    name = name_of(file)
    numbers = file.metadata.get(key)
    n_blocks = n_layers + file.get(f"{name}.nextn_predict_layers", int, 0)  # and draft heads
    if not isinstance(numbers, list) or len(numbers) != n_blocks:
        raise GGUFError(
            f"{file.name}: {key} has to be a list of {n_blocks} numbers, one for each "
            "layer; download the file again"
        )
    return numbers[:n_layers]


def cut_to_layers(file: GGUFFile, values: Any, n_layers: int) -> Any:
    """Return a list without the values of draft heads, if it has as many more than layers."""
    n_heads = file.get(f"{name_of(file)}.nextn_predict_layers", int, 0)
    has_heads = isinstance(values, list) and len(values) == n_layers + n_heads
    return values[:n_layers] if has_heads else values


def list_attending(file: GGUFFile, settings: Settings) -> list[bool]:
    """Return which layers attend, by their numbers of heads for keys. Raises: GGUFError."""
    numbers = list_numbers(
        file, f"{name_of(file)}.attention.head_count_kv", settings["num_hidden_layers"]
    )
    return [bool(number) for number in numbers]


def list_sliding(file: GGUFFile, n_layers: int) -> list[bool]:
    """Return which layers see a window of the text alone. Raises: GGUFError."""
    key = f"{name_of(file)}.attention.sliding_window_pattern"
    slides = cut_to_layers(file, file.metadata.get(key), n_layers)
    if not isinstance(slides, list) or len(slides) != n_layers or len({*map(bool, slides)}) < 2:
        raise GGUFError(
            f"{file.name}: {key} has to say of each of {n_layers} layers whether it sees a window "
            "of the text alone, and some do and some do not; download the file again"
        )
    return [bool(slide) for slide in slides]


def name_sliding(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def add_attention_bias(file: GGUFFile, settings: Settings) -> None:
    settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def require_value(file: GGUFFile, name: str, value: Any) -> None:
    """Raise GGUFError if a setting of a file is another one than all of its family have."""
    key = f"{name_of(file)}.{name}"
    if (own := file.metadata.get(key, "missing" if value else value)) != value:
        raise GGUFError(
            f"{file.name}: {key} is {str(own)[:40]}, and files are read only if it is {value}: "
            "take the model's folder instead"
        )


def add_experts(
    file: GGUFFile, settings: Settings, normalizes: bool, in_groups: bool = False
) -> None:
    """Add how many experts there are, and how a router weighs them, as llama.cpp does it.

    in_groups: the router may take groups first, which `add_groups` adds.
    """
    architecture = name_of(file)
    if not in_groups and file.get(f"{architecture}.expert_group_count", int, 1) > 1:
        require_value(file, "expert_group_count", 1)
    n_experts = file.require_int(f"{architecture}.expert_count", 1, MAX_EXPERTS)
    settings |= {
        "num_experts": n_experts,
        "num_experts_per_tok": file.require_int(f"{architecture}.expert_used_count", 1, n_experts),
        "norm_topk_prob": normalizes,
    }


def read_clip(file: GGUFFile) -> Settings:
    """Return the bound of queries, keys and values as a setting; {} if a file has none."""
    key = f"{name_of(file)}.attention.clamp_kqv"
    has_bound = bool(file.get(key, float, 0.0))
    return {"clip_qkv": file.require_float(key, None, 1e-9, 1e9)} if has_bound else {}


def add_nothing(file: GGUFFile, settings: Settings) -> None:
    """The common settings are all."""


def require_sigmoid(file: GGUFFile) -> None:
    """Raise GGUFError if a router scores experts by anything else than a sigmoid."""
    key = f"{name_of(file)}.expert_gating_func"
    if (scores := file.get(key, int, 0)) not in (0, SIGMOID):  # 0: no file of a converter has it
        raise GGUFError(
            f"{file.name}: {key} is {scores}, and files are read only if it is {SIGMOID}: take "
            "the model's folder instead"
        )


def add_groups(file: GGUFFile, settings: Settings) -> None:
    """Add the groups of experts, of which a router takes the best before it takes experts."""
    name, n_experts = name_of(file), settings["num_experts"]
    n_groups = file.get(f"{name}.expert_group_count", int, 0) or 1
    if not 1 <= n_groups <= n_experts or n_experts % n_groups:
        raise GGUFError(
            f"{file.name}: {name}.expert_group_count is {n_groups}, which does not divide its "
            f"{n_experts} experts; download the file again"
        )
    used = f"{name}.expert_group_used_count"
    settings["n_group"] = n_groups
    settings["topk_group"] = file.require_int(used, 1, n_groups) if n_groups > 1 else 1


def add_sigmoid_experts(file: GGUFFile, settings: Settings, shared: bool = True) -> None:
    """Add experts that a sigmoid scores, with a bias and in groups, and the shared ones if any."""
    require_sigmoid(file)
    add_grouped_experts(file, settings, shared)


def add_grouped_experts(file: GGUFFile, settings: Settings, shared: bool = True) -> None:
    """Add experts in groups, whatever scores them, and the shared ones if any."""
    name = name_of(file)
    normalizes = file.metadata.get(f"{name}.expert_weights_norm") is True
    add_experts(file, settings, normalizes, in_groups=True)
    add_groups(file, settings)
    if shared:
        key = f"{name}.expert_shared_count"
        settings["n_shared_experts"] = file.require_int(key, 1, MAX_EXPERTS)
    settings |= {
        "moe_intermediate_size": file.require_int(f"{name}.expert_feed_forward_length"),
        "first_k_dense_replace": file.get(f"{name}.leading_dense_block_count", int, 0),
        "routed_scaling_factor": file.require_float(f"{name}.expert_weights_scale", 1.0, 1e-9, 1e9),
    }
