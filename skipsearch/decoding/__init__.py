"""Draft, verify, commit: the lossless decoder."""

from skipsearch.decoding.decoder import Chunk, Generation
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.front import Decoder

__all__ = ["Chunk", "Decoder", "Generation", "generate"]
