"""Draft, verify, commit: the lossless decoder."""

from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.loop import Chunk, Generation

__all__ = ["Chunk", "Decoder", "Generation", "generate"]
