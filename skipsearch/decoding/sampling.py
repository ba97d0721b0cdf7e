"""How a token is chosen from logits, for draft and full model alike: the request's temperature, top-k and top-p, in that order.

The warping itself is transformers' own; it applies to p and q alike, and each is normalised again after it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import isnan
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from skipsearch.engine import Scored
from skipsearch.errors import DecodeError
from skipsearch.fields import HOTTEST, MOST_TOP_K


@dataclass(frozen=True)
class Sampling:
    """What a request asks for. temperature 0 is greedy; top_k 0 and top_p 1 are off. Raises: DecodeError."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature <= HOTTEST:
            raise DecodeError(f"temperature is {self.temperature!r}; it is a number that lies in 0..{HOTTEST:g}, and 0 is greedy decoding")
        if 0 < self.temperature < 1e-6:
            raise DecodeError(f"temperature is {self.temperature}; under 0.000001 logits overflow, and 0 is greedy decoding")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise DecodeError(f"top_p is {self.top_p!r}; it is a number that lies in (0, 1], and 1 turns it off")
        if not is_whole(self.top_k) or not 0 <= self.top_k <= MOST_TOP_K:
            raise DecodeError(f"top_k is {self.top_k!r}; it is a whole number of tokens up to {MOST_TOP_K:,}, and 0 turns it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> list[Any]:
        """transformers' own, in its order; none for greedy decoding. A plain list: transformers' inspects their signatures at every call,
        which costs more than warping."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        if self.greedy:
            return []
        return [TemperatureLogitsWarper(float(self.temperature)), *([TopKLogitsWarper(int(self.top_k))] if self.top_k else []),
                *([TopPLogitsWarper(self.top_p)] if self.top_p < 1 else [])]


def is_number(value: Any) -> bool:
    """Whether it measures something: 0.5 and 1 do, True, NaN and "1" do not."""
    return isinstance(value, Real) and not isinstance(value, bool) and not isnan(value)


def is_whole(value: Any) -> bool:
    """Whether it counts something: 3 and 3.0 do, True, 2.5, infinity and "3" do not."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value % 1 == 0)


class GreedyPicker:
    """The most likely tokens; q of the first is one-hot, so no distribution is handed on."""

    def __init__(self, choices: int = 1):
        self.choices, self.key = choices, ("greedy", choices)

    def ranked(self, choices: int) -> GreedyPicker:
        return GreedyPicker(choices)

    def score(self, logits: Tensor, confidence: bool) -> Scored:
        choice = logits.argmax(dim=-1, keepdim=True) if self.choices == 1 else logits.topk(min(self.choices, logits.shape[-1])).indices
        return Scored(choice, (logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1)).exp() if confidence else None)

    def draw(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        return scored.weights, None


class SamplingPicker:
    """Draws from the warped distribution with its own generator, so that a seed makes a request repeatable."""

    def __init__(self, sampling: Sampling, generator: torch.Generator):
        self.key, self.choices = sampling, 1
        self.generator, self.warpers = generator, sampling.warpers()

    def probs(self, logits: Tensor) -> Tensor:
        """[N, V] -> [N, V]: what tokens are drawn from, at least in fp32."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        for warp in self.warpers:
            logits = warp(None, logits)
        return logits.softmax(dim=-1)

    def score(self, logits: Tensor, confidence: bool) -> Scored:
        probs = self.probs(logits).nan_to_num_(nan=1 / logits.shape[-1])   # a thinned model may overflow where the full one does not
        return Scored(probs, probs.amax(dim=-1) if confidence else None)

    def ranked(self, choices: int) -> SamplingPicker:
        same = copy(self)
        same.choices = choices
        return same

    def draw(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        if self.choices == 1:
            return torch.multinomial(scored.weights, 1, generator=self.generator), scored.weights
        # The order of q(x) / e(x), e exponential, is that of draws without replacement (Kool et al. 2019): also where fewer are possible.
        keys = scored.weights / torch.empty_like(scored.weights).exponential_(generator=self.generator)
        return keys.topk(min(self.choices, keys.shape[-1])).indices, scored.weights
