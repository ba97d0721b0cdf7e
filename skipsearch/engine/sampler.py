"""Choose a token from logits, for both draft and full model.

Temperature, top-k and top-p are applied in this order, as in transformers, to the logits of the
draft and of the full model. The softmax of the results is q and p.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import isnan
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from skipsearch.core.schema_types import MAX_TEMPERATURE, MAX_TOP_K
from skipsearch.engine import draws
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import DraftScorer, DraftScores, DrawSettings


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. Raises: DecodeError for a value out of range."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]; 1: off
    top_k: int = 0  # tokens; 0: off

    def __post_init__(self) -> None:
        if not is_real(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise DecodeError(
                f"temperature is {self.temperature!r}; it is a number that lies in "
                f"0..{MAX_TEMPERATURE:g}, and 0 is greedy decoding"
            )
        if 0 < self.temperature < 1e-6:
            raise DecodeError(
                f"temperature is {self.temperature}; under 0.000001 logits overflow, and 0 is "
                "greedy decoding"
            )
        if not is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise DecodeError(
                f"top_p is {self.top_p!r}; it is a number that lies in (0, 1], and 1 turns it off"
            )
        if not is_integral(self.top_k) or not 0 <= self.top_k <= MAX_TOP_K:
            raise DecodeError(
                f"top_k is {self.top_k!r}; it is a whole number of tokens up to {MAX_TOP_K:,}, and "
                "0 turns it off"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def build_warpers(self) -> list[Any]:
        """Return the warpers in transformers' order; [] for greedy decoding.

        The result is a plain list, because transformers' list class inspects signatures at every
        call, which takes longer than warping.
        """
        if self.is_greedy:
            return []
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper

        return [
            TemperatureLogitsWarper(float(self.temperature)),
            *([TopKLogitsWarper(int(self.top_k))] if self.top_k else []),
            *([TopPWarper(self.top_p)] if self.top_p < 1 else []),
        ]


def is_real(value: Any) -> bool:
    """Return whether a value is a real number. True for 0.5 and 1; False for True, NaN and "1"."""
    return isinstance(value, Real) and not isinstance(value, bool) and not isnan(value)


def is_integral(value: Any) -> bool:
    """Return whether a value is a whole number. True for 3 and 3.0; False for True, 2.5 and "3"."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value % 1 == 0)


class TopPWarper:
    """Keeps the most likely tokens, the fewest that together have a probability of at least top_p.

    This is transformers' `TopPLogitsWarper`, which sorts all tokens; on a CPU that takes
    milliseconds a row. All tokens whose probability is below (1 - top_p) / V have less than
    1 - top_p together, so none of them is kept, and only the others are sorted here. Of tokens that
    tie for the last places, the first ones are kept.
    """

    def __init__(self, top_p: float):
        self.top_p = top_p

    def __call__(self, input_ids: Any, logits: Tensor) -> Tensor:
        """Return logits [N, V] in which all other tokens have -inf."""
        if logits.device.type != "cpu":
            from transformers import TopPLogitsWarper

            warped: Tensor = TopPLogitsWarper(self.top_p)(input_ids, logits)
            return warped
        warped = torch.full_like(logits, float("-inf"))
        # Half of the bound, so that rounding leaves out no token that is kept.
        least = (1 - self.top_p) / (2 * logits.shape[-1])
        for row, probs in enumerate(logits.softmax(dim=-1)):
            candidates = (probs >= least).nonzero()[:, 0]
            sorted_probs, order = probs[candidates].double().sort(descending=True, stable=True)
            nucleus = candidates[order[sorted_probs.cumsum(dim=0) - sorted_probs < self.top_p]]
            warped[row, nucleus] = logits[row, nucleus]
        return warped


GREEDY = SamplingParams()


def make_sampler(
    sampling: SamplingParams, generator: torch.Generator, engine_draws: bool = True
) -> GreedySampler | TemperatureSampler:
    """Return the sampler of a request. generator: draws the tokens, unless decoding is greedy.

    engine_draws: as for `TemperatureSampler`.
    """
    if sampling.is_greedy:
        return GreedySampler()
    return TemperatureSampler(sampling, generator, engine_draws)


class TokenSampler(DraftScorer, Protocol):
    """A sampler that chooses tokens greedily, or draws them from a warped distribution."""

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        """Return (tokens [B, n_choices], the distributions [B, V] that they are drawn from).

        If the sampler is greedy, the distributions are None.
        """

    def top(self, n_choices: int) -> TokenSampler:
        """Return a sampler whose `draw` returns tokens [B, n_choices].

        Column 0 is the choice. Each later column is the choice among the tokens that earlier
        columns leave. If no token with a probability above 0 is left, a token of probability 0 is
        returned.
        """


class GreedySampler:
    """A sampler that returns the most likely tokens.

    Its q is one-hot, so it returns no distribution.
    """

    is_greedy = True

    def __init__(self, n_choices: int = 1):
        self.n_choices, self.key = n_choices, ("greedy", n_choices)
        self.draw_settings = None

    def top(self, n_choices: int) -> GreedySampler:
        return GreedySampler(n_choices)

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        choice = (
            logits.argmax(dim=-1, keepdim=True)
            if self.n_choices == 1
            else logits.topk(min(self.n_choices, logits.shape[-1])).indices
        )
        return DraftScores(
            choice=choice,
            confidence=(logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1)).exp()
            if with_confidence
            else None,
        )

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        assert scores.choice is not None
        return scores.choice, None


class TemperatureSampler:
    """A sampler that draws from the warped distribution with a generator of its own.

    engine_draws: whether an engine may draw the tokens of a draft itself. It draws from the same
    distribution up to rounding, so about one token in a million is another one.
    """

    is_greedy = False

    def __init__(
        self, sampling: SamplingParams, generator: torch.Generator, engine_draws: bool = True
    ):
        self.key, self.n_choices, self.engine_draws = sampling, 1, engine_draws
        self.generator, self.warpers = generator, sampling.build_warpers()

    @property
    def draw_settings(self) -> DrawSettings | None:
        """How an engine draws one token; None if it may not, or for several distinct tokens."""
        if not self.engine_draws or self.n_choices > 1:
            return None
        sampling = self.key
        return DrawSettings(sampling.temperature, sampling.top_p, sampling.top_k, self.generator)

    def warp_to_probs(self, logits: Tensor) -> Tensor:
        """Return the distributions that tokens are drawn from, [N, V] -> [N, V]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        for warp in self.warpers:
            logits = warp(None, logits)
        return logits.softmax(dim=-1)

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        # The logits of a draft may overflow even if those of the full model do not.
        probs = self.warp_to_probs(logits).nan_to_num_(nan=1 / logits.shape[-1])
        return DraftScores(probs=probs, confidence=probs.amax(dim=-1) if with_confidence else None)

    def top(self, n_choices: int) -> TemperatureSampler:
        sampler = copy(self)
        sampler.n_choices = n_choices
        return sampler

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        probs = scores.probs
        assert probs is not None
        n_choices = min(self.n_choices, probs.shape[-1])
        return draws.draw_distinct_tokens(probs, n_choices, self.generator), probs
