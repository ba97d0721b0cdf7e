"""Drafting behind the calls of other libraries: transformers' `generate`."""

from skipsearch.integrations.hf_attach import attach, detach
from skipsearch.integrations.hf_generate import generate

__all__ = ["attach", "detach", "generate"]
