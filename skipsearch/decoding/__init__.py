"""Draft, verify, commit: the lossless decoder."""

from skipsearch.decoding.attachment import attach, detach
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.request import Request
from skipsearch.decoding.session import Session

__all__ = ["Chunk", "Decoder", "Generation", "Request", "Session", "attach", "detach", "generate"]
