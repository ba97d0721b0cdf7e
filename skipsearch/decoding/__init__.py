"""Draft, verify, commit: the lossless decoder.

A round, with a pending token "the" that is known and not yet in the KV cache:

    draft     the first drafter that proposes something gives [cat, sat, up]
    verify    one pass of the full model over [the, cat, sat, up]; its four rows say [cat, sat, on, …]
    commit    "cat" and "sat" agree and stand, "up" does not: the round yields [cat, sat, on], and "on" is pending next

The K/V of "up" stays behind in the cache. The next pass writes over it before anything reads it.

loop             the round above              acceptance, trees   which drafted tokens stand: all of losslessness is here
decoder          what people call             request, session    what is asked for; requests that follow one another
batch, rooms     requests side by side        stopping            where a generation ends
guard            a drafter that does not pay rests
dropin, attachment, settings, inputs, processing, steering        transformers' `generate`
"""

from skipsearch.decoding.attachment import attach, detach
from skipsearch.decoding.batch import Batch, Row
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.request import Request
from skipsearch.decoding.session import Session

__all__ = ["Batch", "Chunk", "Decoder", "Generation", "Request", "Row", "Session", "attach", "detach", "generate"]
