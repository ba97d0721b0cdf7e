"""Tiny checkpoints that ship a draft head, as the families store theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models.every_class import LAYERED, build
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

IN_MTP = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
AFTER_LAST_LAYER = ("deepseek_v3", "glm4_moe")
FITTED_PROMPTS = ((5, 17, 40, 3), (9, 2), (33, 34), (1, 60, 7, 22), (12,))
FAMILIES = (*IN_MTP, *AFTER_LAST_LAYER)


def save_checkpoint_with_head(family: str, folder: Path, **more: Any) -> Any:
    """Save a model whose last layer is the layer of its draft head.

    more: further settings of its config. Returns transformers' model, with the head's layer as its
    last layer, and in its attribute `head_tensors` the head's other tensors: enorm, hnorm, eh_proj
    and norm.
    """
    types = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    settings = types if family in IN_MTP else {"first_k_dense_replace": 1}
    settings |= {"num_hidden_layers": 3, **more}
    with patch.dict(LAYERED, {family: {**LAYERED.get(family, {}), **settings}}):
        model: Any = build(family)
    config, n = model.config, model.config.num_hidden_layers - 1
    own = make_head_tensors(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    moved = {name: t for name, t in tensors.items() if name.startswith(f"model.layers.{n}.")}
    stored = {name: tensor for name, tensor in tensors.items() if name not in moved}
    if family in IN_MTP:
        names = {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "norm": "mtp.norm",
        }
        stored |= {
            name.replace(f"model.layers.{n}.", "mtp.layers.0."): t for name, t in moved.items()
        }
    else:
        prefix = f"model.layers.{n}."
        names = {key: prefix + key for key in ("enorm", "hnorm", "eh_proj")}
        names["norm"] = prefix + "shared_head.norm"
        stored |= moved
    stored |= {f"{names[key]}.weight": tensor for key, tensor in own.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((folder / "config.json").read_text())
    data |= {"num_hidden_layers": n, "eos_token_id": None}  # no text ends early
    (folder / "generation_config.json").unlink()
    for key in ("layer_types", "mlp_layer_types"):
        if data.get(key) is not None:
            data[key] = data[key][:n]
    (folder / "config.json").write_text(json.dumps(data))
    assert config.num_hidden_layers == n + 1
    model.head_tensors = own
    return model


@torch.no_grad()
def make_head_tensors(model: Any) -> dict[str, Tensor]:
    """Return tensors of a head that is often right about the text that the model writes.

    The head's layer is made to add little to its input. Its projection is fitted by least squares
    to the output matrix's rows of the right tokens.
    """
    layer, width = model.model.layers[-1], model.config.hidden_size
    for name, parameter in layer.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.mul_(0.05)
    generator = torch.Generator().manual_seed(0)
    own = {
        key: 1 + 0.1 * torch.randn(width, generator=generator, dtype=model.dtype)
        for key in ("enorm", "hnorm", "norm")
    }
    inputs, outputs = list[Tensor](), list[Tensor]()
    for prompt in FITTED_PROMPTS:
        text = write_text(model, [token % model.config.vocab_size for token in prompt], 24)
        states = run_without_head_layer(model, text)[:, :-2]
        embedded = model.model.embed_tokens(torch.tensor([text[1:-1]]))
        both = [normalize(model, own["enorm"], embedded), normalize(model, own["hnorm"], states)]
        inputs.append(torch.cat(both, dim=-1)[0])
        outputs.append(model.lm_head.weight[text[2:]])
    fitted = torch.linalg.lstsq(torch.cat(inputs), torch.cat(outputs)).solution
    return own | {"eh_proj": fitted.T.contiguous()}


def normalize(model: Any, weight: Tensor, x: Tensor) -> Tensor:
    """Apply a norm of the model's kind with this weight."""
    norm = type(model.model.norm)(len(weight), eps=model.config.rms_norm_eps).to(weight)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    normed: Tensor = norm(x)
    return normed


@torch.no_grad()
def run_without_head_layer(model: Any, text: list[int]) -> Tensor:
    """Return the model's normed last hidden states [1, T, H], without the head's layer."""
    decoder, layers = model.model, model.model.layers
    decoder.layers, model.config.num_hidden_layers = layers[:-1], len(layers) - 1
    try:
        states: Tensor = decoder(torch.tensor([text]), use_cache=False).last_hidden_state
    finally:
        decoder.layers, model.config.num_hidden_layers = layers, len(layers)
    return states


def write_text(model: Any, text: list[int], n_tokens: int) -> list[int]:
    """Return a text with the tokens that the model, without the head's layer, adds greedily."""
    for _ in range(n_tokens):
        text = [*text, int(model.lm_head(run_without_head_layer(model, text))[0, -1].argmax())]
    return text


@torch.no_grad()
def draft_by_definition(model: Any, text: list[int], n_tokens: int) -> list[int]:
    """Return the tokens that the head drafts after a text, greedily.

    Every step runs the whole text again, without a cache, with the model's own modules.
    model: as `save_checkpoint_with_head` returns it.
    """
    decoder, own = model.model, model.head_tensors
    states, tokens = run_without_head_layer(model, text)[:, :-1], list(text)
    while True:
        rows = states.shape[1]
        embedded = decoder.embed_tokens(torch.tensor([tokens[1 : rows + 1]]))
        both = [normalize(model, own["enorm"], embedded), normalize(model, own["hnorm"], states)]
        x = torch.cat(both, dim=-1) @ own["eh_proj"].T
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        y = decoder.layers[-1](
            x,
            attention_mask=mask,
            position_embeddings=decoder.rotary_emb(x, position_ids=positions),
            position_ids=positions,
        )
        y = normalize(model, own["norm"], y[0] if isinstance(y, tuple) else y)
        if rows == len(tokens) - 1:
            tokens.append(int(model.lm_head(y)[0, -1].argmax()))
            if len(tokens) == len(text) + n_tokens:
                return tokens[len(text) :]
        states = torch.cat([states, y[:, -1:]], dim=1)
