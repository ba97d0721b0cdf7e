"""Bugs of processed logits."""

from __future__ import annotations

from decoding.processed_checks import check_steering, check_steering_ends
from skipsearch.decoding.processed import ProcessedAcceptance

from .register import planted


@planted(check_steering, ProcessedAcceptance, "accept")
def processors_asked_about_rejected_tokens(real, self, drafted, q, logits, generator, ends):
    """All rows of a verify pass are processed at once, after draft tokens that may be rejected."""
    length = self._length
    for token, row in zip(drafted.tolist(), logits, strict=False):
        self._process_logits(row)
        self._ids[0, self._length] = token
        self._length += 1
    self._length = length
    return real(self, drafted, q, logits, generator, ends)


@planted(check_steering, ProcessedAcceptance, "_judge_token")
def drafts_judged_by_unprocessed_logits(real, self, proposed, token, q, logits, generator):
    chosen, stands = real(self, proposed, token, q, logits, generator)
    return (proposed, True) if int(logits.argmax()) == proposed else (chosen, stands)


@planted(check_steering_ends, ProcessedAcceptance, "_append_token")
def processors_called_after_the_end(real, self, token, ends):
    """A round continues to the end of its draft, though one of its tokens was the last."""
    real(self, token, ends)
    self.ended = False
