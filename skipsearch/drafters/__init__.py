"""Drafters by name. To add one: a file in this folder and a line here."""

from __future__ import annotations

from skipsearch.drafters.base import DecodeContext, Draft, Drafter

DRAFTERS: dict[str, str] = {
    "skip": "skipsearch.drafters.skip:SkipDrafter",
}

__all__ = ["DRAFTERS", "DecodeContext", "Draft", "Drafter"]
