"""Checks of the exact distribution of a request's texts.

The real loop runs once for each outcome of its random choices. Nothing is sampled, so the
distribution is known as numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from helpers.tiny import FullModel
from torch import Tensor

from skipsearch.decoding import Decoder
from skipsearch.engine import DraftScores, draws
from skipsearch.engine.sampler import TemperatureSampler

from .sampling_checks import Warp, exact_distribution

Text = tuple[int, ...]
# a choice of a smaller probability is none: rounding leaves as much where p and q are equal
NOTHING = 1e-12


class Dealer:
    """The random choices of one run.

    They follow `script` and, after its end, take the first outcome. open: scripts of other
    outcomes.
    """

    def __init__(self, script: list[int]):
        self.script, self.at, self.chance = script, 0, 1.0
        self.open: list[list[int]] = []

    def deal(self, shares: Sequence[float]) -> int:
        """Choose an outcome, and multiply the probability of the run by its own."""
        total = sum(shares)
        if self.at == len(self.script):
            first, *others = (i for i, share in enumerate(shares) if share > NOTHING * total)
            self.open += [[*self.script, other] for other in others]
            self.script = [*self.script, first]
        choice = self.script[self.at]
        self.at += 1
        self.chance *= shares[choice] / total
        return choice

    def draw_tokens(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        rows = weights.reshape(-1, weights.shape[-1]).tolist()
        return torch.tensor([self.deal(row) for row in rows], device=weights.device).view(
            *weights.shape[:-1], 1
        )

    def rand(self, *_: Any, **__: Any) -> Uniform:
        return Uniform(self)

    def draw(self, picker: TemperatureSampler, scored: DraftScores) -> tuple[Tensor, Tensor]:
        """Draw tokens of each row without replacement, as many as the picker requests."""
        assert scored.probs is not None
        found = []
        for row in scored.probs.tolist():
            left, drawn = list(row), list[int]()
            for _ in range(min(picker.n_choices, len(left))):
                any_left = [
                    float(i not in drawn) for i in range(len(left))
                ]  # if none is left, a token of probability 0
                drawn.append(self.deal(left) if sum(left) else any_left.index(1.0))
                left[drawn[-1]] = 0.0
            found.append(drawn)
        return torch.tensor(found, device=scored.probs.device), scored.probs

    def planted(self) -> ExitStack:
        """Use this dealer for all random choices of decoding within the context.

        Engines that draw tokens themselves leave them to single steps.
        """
        stack = ExitStack()
        stack.enter_context(patch.object(draws, "draw_tokens", self.draw_tokens))
        stack.enter_context(patch.object(torch, "rand", self.rand))
        stack.enter_context(patch.object(TemperatureSampler, "draw_settings", None))
        stack.enter_context(
            patch.object(
                TemperatureSampler, "draw", lambda picker, scored: self.draw(picker, scored)
            )
        )
        return stack


@dataclass(frozen=True)
class Uniform:
    """A number in [0, 1) that supports only the comparison `u · q < p`. factor: q."""

    dealer: Dealer
    factor: Any = 1.0

    def __mul__(self, factor: Any) -> Uniform:
        return Uniform(self.dealer, factor)

    def __lt__(self, p: Tensor) -> Tensor:
        q = torch.as_tensor(self.factor, dtype=p.dtype).expand(p.shape)
        shares = [
            min(1.0, a / b) if b else float(a > 0)
            for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True)
        ]
        return torch.tensor([not self.deal_out(share) for share in shares], device=p.device).view(
            p.shape
        )

    def deal_out(self, share: float) -> int:
        return self.dealer.deal((share, 1 - share))


@dataclass(frozen=True)
class Law:
    """A distribution of texts.

    texts: their probabilities. drafted, accepted: mean numbers of tokens. ways: the number of
    outcomes of all choices.
    """

    texts: dict[Text, float]
    drafted: float
    accepted: float
    ways: int


def law(decoder: Decoder, prompt: Sequence[int], length: int, warp: Warp) -> Law:
    """Return the distribution of the texts of a decoder after a prompt."""
    texts, open_, ways = defaultdict[Text, float](float), [list[int]()], 0
    drafted = accepted = 0.0
    while open_:
        dealer = Dealer(open_.pop())
        with dealer.planted():
            found = decoder.generate(
                prompt, length, temperature=warp.temperature, top_p=warp.top_p, top_k=warp.top_k
            )
        open_ += dealer.open
        texts[tuple(found.tokens)] += dealer.chance
        drafted, accepted = (
            drafted + dealer.chance * found.stats.drafted,
            accepted + dealer.chance * found.stats.accepted,
        )
        ways += 1
    return Law(dict(texts), drafted, accepted, ways)


def check_law(
    decoder: Decoder, full: FullModel, prompt: Sequence[int], length: int, warp: Warp
) -> Law:
    """Check that every text has the full model's probability.

    Some draft tokens must be accepted and some rejected.
    """
    found = law(decoder, prompt, length, warp)
    wanted = exact_distribution(full.next_logits, tuple(prompt), length, warp)
    assert found.texts.keys() == wanted.keys()
    assert abs(sum(found.texts.values()) - 1) < 1e-9
    for text, share in wanted.items():
        assert abs(found.texts[text] - share) < 1e-6, (
            text,
            found.texts[text],
            share,
        )  # norms of Hugging Face round to float32
    assert 0 < found.accepted < found.drafted
    return found
