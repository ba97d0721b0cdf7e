"""Mistakes: processed logits."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding.steering import Steering

from ..steering_checks import check_steering
from .register import caught_by


@caught_by(check_steering)
def processors_asked_about_rejected_tokens() -> Iterator[None]:
    """All rows of a verify pass are processed at once, behind drafts that may fall."""
    real = Steering.accept

    def accept(self: Steering, drafted: Tensor, q: Tensor | None, logits: Tensor, generator: torch.Generator) -> tuple[int, int]:
        length = self._length
        for token, row in zip(drafted.tolist(), logits, strict=False):
            self._processed(row)
            self._ids[0, self._length] = token
            self._length += 1
        self._length = length
        return real(self, drafted, q, logits, generator)

    with patch.object(Steering, "accept", accept):
        yield


@caught_by(check_steering)
def drafts_judged_by_unprocessed_logits() -> Iterator[None]:
    real = Steering._judged

    def judged(self: Steering, proposed: int, token: Tensor, q: Tensor | None, logits: Tensor,
               generator: torch.Generator) -> tuple[int, bool]:
        chosen, stands = real(self, proposed, token, q, logits, generator)
        return (proposed, True) if int(logits.argmax()) == proposed else (chosen, stands)

    with patch.object(Steering, "_judged", judged):
        yield
