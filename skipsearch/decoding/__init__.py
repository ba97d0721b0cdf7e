"""Draft, verify, commit: the lossless decoder."""

from skipsearch.decoding.attachment import attach, detach
from skipsearch.decoding.batch import Batch, Row
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.request import Request
from skipsearch.decoding.session import Session

__all__ = ["Batch", "Chunk", "Decoder", "Generation", "Request", "Row", "Session", "attach", "detach", "generate"]
