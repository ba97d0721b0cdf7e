"""OpenAI's penalties and biases on logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Penalties:
    """A processor of one request. prompt: how many tokens it has; they are not penalised.

    presence: taken off the logit of each token that the answer holds; frequency: for each time that it holds it; bias: added, by token.
    Source: OpenAI, "Frequency and presence penalties".
    """

    def __init__(self, prompt: int, presence: float = 0.0, frequency: float = 0.0, bias: Mapping[int, float] | None = None):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency
        self.bias = dict(bias or {})

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]; scores: [1, V] -> [1, V]"""
        counts = torch.bincount(ids[0, self.prompt:], minlength=scores.shape[1]).to(scores)
        scores = scores - self.frequency * counts - self.presence * (counts > 0)
        if self.bias:
            tokens = torch.tensor(list(self.bias), device=scores.device)
            scores[0, tokens] += torch.tensor(list(self.bias.values()), device=scores.device, dtype=scores.dtype)
        return scores
