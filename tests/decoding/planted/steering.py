"""Bugs of processed logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from decoding.processed_checks import check_steering, check_steering_ends
from skipsearch.decoding.processed import ProcessedAcceptance

from .register import caught_by


@caught_by(check_steering)
def processors_asked_about_rejected_tokens() -> Iterator[None]:
    """All rows of a verify pass are processed at once, after draft tokens that may be rejected."""
    real = ProcessedAcceptance.accept

    def accept(
        self: ProcessedAcceptance,
        drafted: Tensor,
        q: Tensor | None,
        logits: Tensor,
        generator: torch.Generator,
        ends: Callable[[int], object],
    ) -> tuple[int, int]:
        length = self._length
        for token, row in zip(drafted.tolist(), logits, strict=False):
            self._process_logits(row)
            self._ids[0, self._length] = token
            self._length += 1
        self._length = length
        return real(self, drafted, q, logits, generator, ends)

    with patch.object(ProcessedAcceptance, "accept", accept):
        yield


@caught_by(check_steering)
def drafts_judged_by_unprocessed_logits() -> Iterator[None]:
    real = ProcessedAcceptance._judge_token

    def judged(
        self: ProcessedAcceptance,
        proposed: int,
        token: Tensor,
        q: Tensor | None,
        logits: Tensor,
        generator: torch.Generator,
    ) -> tuple[int, bool]:
        chosen, stands = real(self, proposed, token, q, logits, generator)
        return (proposed, True) if int(logits.argmax()) == proposed else (chosen, stands)

    with patch.object(ProcessedAcceptance, "_judge_token", judged):
        yield


@caught_by(check_steering_ends)
def processors_called_after_the_end() -> Iterator[None]:
    """A round continues to the end of its draft, though one of its tokens was the last."""
    real = ProcessedAcceptance._append_token

    def emit(self: ProcessedAcceptance, token: int, ends: Callable[[int], object]) -> None:
        real(self, token, ends)
        self.ended = False

    with patch.object(ProcessedAcceptance, "_append_token", emit):
        yield
