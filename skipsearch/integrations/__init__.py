"""Drafting for calls of transformers' `generate`.

hf_generate     `generate`: a drop-in for `model.generate`
hf_attach       `attach`: replaces `model.generate` itself
hf_settings     the settings of a call: supported, ignored or refused by name
hf_prompts      the prompts of a call
hf_processors   logits processors and stopping criteria of a call
decoder_cache   decoders that are reused between calls
"""

from skipsearch.integrations.hf_attach import attach, detach
from skipsearch.integrations.hf_generate import generate

__all__ = ["attach", "detach", "generate"]
