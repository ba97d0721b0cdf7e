"""Processors for the options that OpenAI's requests have: penalties, biases and min_p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]


def repetition_penalty(penalty: float) -> Processor:
    """Return the processor of one request that makes tokens of the text so far less likely.

    Source: Keskar et al. 2019, "CTRL".
    """
    from transformers import RepetitionPenaltyLogitsProcessor

    processor: Processor = RepetitionPenaltyLogitsProcessor(float(penalty))
    return processor


class Penalties:
    """The processor of one request for presence and frequency penalties and for biases.

    prompt_tokens: number of prompt tokens, which are not penalised.
    presence: subtracted from the logit of each token that the answer contains.
    frequency: subtracted once for each of its occurrences in the answer.
    bias: added to logits, by token.

    Source: OpenAI, "Frequency and presence penalties".
    """

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
    """The processor of one request for min_p.

    It rules out tokens whose probability at this temperature is below min_p times the highest one.
    It runs before top_k and top_p.

    Source: Nguyen et al. 2024, "Turning up the heat: min-p sampling".
    """

    def __init__(self, min_p: float, temperature: float):
        # The logits are not divided by the temperature yet, so the margin is multiplied by it.
        self.logit_margin = temperature * log(min_p)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]; scores: [1, V] -> [1, V]"""
        return scores.masked_fill(
            scores < scores.amax(dim=-1, keepdim=True) + self.logit_margin, -torch.inf
        )
