"""What stands between logits and tokens at a client's wish: OpenAI's penalties and biases, and
min_p.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch
from torch import Tensor


class Penalties:
    """A processor of one request. prompt_tokens: how many tokens it has; they are not penalised.

    presence: taken off the logit of each token that the answer holds; frequency: for each time that
    it holds it; bias: added, by token. Source: OpenAI, "Frequency and presence penalties"."""

    def __init__(
        self,
        prompt_tokens: int,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
    ):
        self.prompt_tokens, self.presence, self.frequency = prompt_tokens, presence, frequency
        self.bias = dict(bias or {})

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]; scores: [1, V] -> [1, V]"""
        counts = torch.bincount(ids[0, self.prompt_tokens :], minlength=scores.shape[1]).to(scores)
        scores = scores - self.frequency * counts - self.presence * (counts > 0)
        if self.bias:
            tokens = torch.tensor(list(self.bias), device=scores.device)
            scores[0, tokens] += torch.tensor(
                list(self.bias.values()), device=scores.device, dtype=scores.dtype
            )
        return scores


class MinP:
    """A processor of one request: tokens less likely than min_p times the likeliest one, at this
    temperature, are ruled out before top_k and top_p look. Source: Nguyen et al. 2024, "Turning up
    the heat: min-p sampling"."""

    def __init__(self, min_p: float, temperature: float):
        self.logit_margin = temperature * log(
            min_p
        )  # of logits that temperature has not divided yet

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]; scores: [1, V] -> [1, V]"""
        return scores.masked_fill(
            scores < scores.amax(dim=-1, keepdim=True) + self.logit_margin, -torch.inf
        )
