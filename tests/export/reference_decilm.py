"""What a DeciLM checkpoint computes, written from the format's description alone: config.json and weights in, logits out.

Nothing of skipsearch or of transformers' models is used, so that a checkpoint both would misread the same way is still found out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class DeciLM:
    """Computes in fp64. Raises: AssertionError if the weights are not exactly those that the config announces."""

    def __init__(self, folder: Path):
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {name: weight.double() for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}
        assert self.config["architectures"] == ["DeciLMForCausalLM"]
        assert self.config["model_type"] == "nemotron-nas"
        assert len(self.config["block_configs"]) == self.config["num_hidden_layers"]
        assert {name: tuple(weight.shape) for name, weight in self.weights.items()} == self._announced()

    def _announced(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        for i, block in enumerate(c["block_configs"]):
            attention, ffn = block["attention"], block["ffn"]
            assert not attention["replace_with_linear"]
            assert not ffn["replace_with_linear"]
            if attention["no_op"]:
                assert attention["n_heads_in_group"] is None
            else:
                kv = heads // attention["n_heads_in_group"] * (hidden // heads)
                sizes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
                shapes |= {f"model.layers.{i}.self_attn.{part}_proj.weight": size for part, size in sizes.items()}
                shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
            if ffn["no_op"]:
                assert ffn["ffn_mult"] is None
            else:
                width = math.ceil(int(2 * ffn["ffn_mult"] * hidden / 3) / 256) * 256
                sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
                shapes |= {f"model.layers.{i}.mlp.{part}_proj.weight": size for part, size in sizes.items()}
                shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
        return shapes

    def logits(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, V]."""
        h = self.weights["model.embed_tokens.weight"][tokens]
        for i, block in enumerate(self.config["block_configs"]):
            if not block["attention"]["no_op"]:
                h = h + self._attention(i, self._norm(h, f"model.layers.{i}.input_layernorm"), block["attention"]["n_heads_in_group"])
            if not block["ffn"]["no_op"]:
                h = h + self._mlp(i, self._norm(h, f"model.layers.{i}.post_attention_layernorm"))
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return self._norm(h, "model.norm") @ self.weights[f"{head}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        assert self.config["hidden_act"] == "silu"
        gate, up, down = (self.weights[f"model.layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def _attention(self, i: int, x: Tensor, group: int) -> Tensor:
        size = self.config["hidden_size"] // self.config["num_attention_heads"]

        def heads(part: str) -> Tensor:  # [heads, T, size]
            return (x @ self.weights[f"model.layers.{i}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)

        angles = torch.arange(len(x))[:, None] * self._frequencies(size)  # [T, size / 2]
        q, k = (_rotated(heads(part), angles) for part in ("q", "k"))
        k, v = (part.repeat_interleave(group, dim=0) for part in (k, heads("v")))
        scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.weights[f"model.layers.{i}.self_attn.o_proj.weight"].T

    def _frequencies(self, size: int) -> Tensor:
        """By the keys of transformers 4, which is what engines look for; Llama 3 stretches the slow ones."""
        base = self.config["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        scaling = self.config["rope_scaling"]
        if scaling is None:
            return base
        assert scaling["rope_type"] == "llama3"
        turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return base * (smooth + (1 - smooth) / scaling["factor"])


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """[heads, T, size]: the first half of a head's values against the second."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
