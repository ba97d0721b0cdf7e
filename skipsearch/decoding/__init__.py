"""Draft, verify, commit: the lossless decoder.

A round, with the pending token "the", whose K/V are not in the cache yet:

    draft     the first drafter that proposes anything proposes [cat, sat, up]
    verify    one pass of the full model over [the, cat, sat, up] chooses [cat, sat, on, …]
    accept    "cat" and "sat" are accepted, "up" is rejected
    commit    the round yields [cat, sat, on]; "on" is the next pending token

The K/V of "up" stay in the cache until the next pass overwrites them, before they are read.

Modules:

    decoder                       `Decoder`, the class that users call
    as_measured                   the decoder of a profile, its model loaded as it was measured
    loop                          the round above
    acceptance, trees, processed  which draft tokens are accepted: chains, trees, and requests
                                  with logits processors; these rules make decoding lossless
    acceptor                      the rule of one request, and what a constraint changes in it
    request, stopping             the options of a generation, and its stop conditions
    session, prefix_cache         successive requests that share a prefix
    batch, batch_cache            requests that are decoded together
    guard                         pauses drafters that do not pay
    tracing, recording            the proposals of each round, and a whole answer with its times
    conversation                  the turns of a chat
"""

from skipsearch.decoding.acceptor import FORCED_KIND, make_masks, mask_logits
from skipsearch.decoding.as_measured import load_decoder
from skipsearch.decoding.batch import Batch, RunningRequest
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.request import Request
from skipsearch.decoding.session import Session

__all__ = [
    "FORCED_KIND",
    "Batch",
    "Chunk",
    "Decoder",
    "Generation",
    "Request",
    "RunningRequest",
    "Session",
    "load_decoder",
    "make_masks",
    "mask_logits",
]
