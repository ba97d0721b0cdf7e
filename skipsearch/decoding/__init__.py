"""Draft, verify, commit: the lossless decoder.

A round, with the pending token "the", whose K/V is not in the cache yet:

    draft     the first drafter that proposes something proposes [cat, sat, up]
    verify    one pass of the full model over [the, cat, sat, up] chooses [cat, sat, on, …]
    accept    "cat" and "sat" are accepted, "up" is rejected
    commit    the round yields [cat, sat, on]; "on" is the next pending token

The K/V of "up" stays in the cache until the next pass overwrites it, before anything reads it.

Modules:

    decoder                       `Decoder`, the class that users call
    loop                          the round above
    acceptance, trees, processed  which draft tokens are accepted: all of losslessness is here
    request, stopping             the options of a generation, and when it ends
    session, prefix_cache         successive requests that share a prefix
    batch, batch_cache            requests that are decoded together
    guard                         pauses drafters that do not pay
    tracing                       what was proposed in each round
    conversation                  the turns of a chat
"""

from skipsearch.decoding.batch import Batch, RunningRequest
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.request import Request
from skipsearch.decoding.session import Session

__all__ = ["Batch", "Chunk", "Decoder", "Generation", "Request", "RunningRequest", "Session"]
