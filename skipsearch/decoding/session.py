"""`Session`: successive requests that reuse the K/V of a shared prefix, such as turns of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

from torch import Tensor

from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.decoding.request import Request, RequestOptions


class Session:
    """A series of requests that share a prefix cache, made by `Decoder.new_session`.

    Only tokens after the shared prefix need a pass. The passes over a prompt with a reused prefix
    differ from those over a new prompt. In fp32 and below, a near-tie may therefore be decided
    differently. With `exact`, and in fp64, the tokens are equal. A session runs one request at a
    time.

    stream: `Decoder.stream` of the decoder that runs the requests.
    """

    def __init__(self, stream: Callable[..., Iterator[Chunk]]):
        self._stream, self._prefix_cache = stream, PrefixCache()

    @property
    def cached_ids(self) -> list[int]:
        """The token ids of the cached text.

        A prompt that begins with some of them needs no pass for these.
        """
        return list(self._prefix_cache.tokens)

    @property
    def nbytes(self) -> int:
        """The size of the cached K/V in bytes."""
        return self._prefix_cache.nbytes

    def count_shared(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens of a prompt that need no pass."""
        return self._prefix_cache.count_shared(prompt)

    def stream(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int | None = None,
        *,
        trace: bool = False,
        **settings: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """Stream an answer, as `Decoder.stream` does.

        Raises: DecodeError, also if another request of this session is running."""
        return self._stream(
            input_ids, max_new_tokens, trace=trace, prefix_cache=self._prefix_cache, **settings
        )

    def generate(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int | None = None,
        **settings: Unpack[RequestOptions],
    ) -> Generation:
        """Generate an answer, as `Decoder.generate` does."""
        return Generation.from_chunks(self.stream(input_ids, max_new_tokens, **settings))
