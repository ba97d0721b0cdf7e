"""Decoders whose drafter is a test's own: one that takes notes, or an exit policy that no profile could name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipsearch.decoding import Decoder
from skipsearch.drafters import Drafter
from skipsearch.models import ModelAdapter


def drafting_with(model: ModelAdapter, drafter: Any, draft_length: int) -> Decoder:
    """A decoder with one drafter, made already."""
    decoder = Decoder(model)
    decoder.loop.drafters = [(draft_length, drafter)]
    return decoder


def wrapped(decoder: Decoder, around: Callable[[Drafter], Any]) -> Decoder:
    """The same decoder with something around each of its drafters."""
    decoder.loop.drafters = [(length, around(drafter)) for length, drafter in decoder.loop.drafters]
    return decoder
