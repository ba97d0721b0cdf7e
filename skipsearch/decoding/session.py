"""`Session`: successive requests, such as the turns of a chat, that reuse the K/V of the prefix
that their prompts share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

from torch import Tensor

from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.decoding.request import Request, RequestOptions


class Session:
    """A series of requests that share a prefix cache; `Decoder.new_session` makes it.

    Only tokens after the shared prefix need a pass. Reuse changes the order in which a prompt is
    computed, so in fp32 and below a near-tie may be decided differently than in a fresh decode.
    With `exact`, and in fp64, the tokens are the same. A session runs one request at a time.

    stream: `Decoder.stream` of the decoder that runs the requests."""

    def __init__(self, stream: Callable[..., Iterator[Chunk]]):
        self._stream, self._prefix_cache = stream, PrefixCache()

    @property
    def cached_ids(self) -> list[int]:
        """Token ids of the cached text: a prompt that begins with them needs no pass for them."""
        return list(self._prefix_cache.tokens)

    @property
    def nbytes(self) -> int:
        """Size of the cached K/V in bytes."""
        return self._prefix_cache.nbytes

    def count_shared(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need no pass."""
        return self._prefix_cache.count_shared(prompt)

    def stream(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int = 128,
        *,
        trace: bool = False,
        **settings: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """Stream an answer, as `Decoder.stream` does.

        Raises: DecodeError, also while another request of this session runs.
        """
        return self._stream(
            input_ids, max_new_tokens, trace=trace, prefix_cache=self._prefix_cache, **settings
        )

    def generate(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int = 128,
        **settings: Unpack[RequestOptions],
    ) -> Generation:
        """Generate an answer, as `Decoder.generate` does."""
        return Generation.from_chunks(self.stream(input_ids, max_new_tokens, **settings))
