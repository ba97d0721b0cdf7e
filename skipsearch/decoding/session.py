"""`Session`: requests that follow one another, such as the turns of a chat, and reuse what their prompts share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.prefix import Prefix
from skipsearch.decoding.request import Request, Settings

if TYPE_CHECKING:
    from skipsearch.decoding.decoder import Decoder


class Session:
    """Made by `Decoder.session`. The time to the first token of a request depends on what of its prompt is new.

    Reusing changes the order in which the prompt is computed, so in fp32 and below a near-tie may fall otherwise than in a fresh decode, as
    between any two ways to compute a prompt; with `exact`, and in fp64, the tokens are the same. One request at a time.
    """

    def __init__(self, decoder: Decoder):
        self.decoder, self._prefix = decoder, Prefix()

    @property
    def tokens(self) -> list[int]:
        """What the next request may begin with for free."""
        return list(self._prefix.tokens)

    @property
    def bytes(self) -> int:
        """Of the K/V that it holds on to."""
        return self._prefix.bytes

    def shared(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that would need no pass."""
        return self._prefix.shared(prompt)

    def stream(self, input_ids: Sequence[int] | Tensor | Request, max_new_tokens: int = 128, *, trace: bool = False,
               **settings: Unpack[Settings]) -> Iterator[Chunk]:
        """As `Decoder.stream`. Raises: DecodeError, also while another request of this session runs."""
        return self.decoder.stream(input_ids, max_new_tokens, trace=trace, prefix=self._prefix, **settings)

    def generate(self, input_ids: Sequence[int] | Tensor | Request, max_new_tokens: int = 128, **settings: Unpack[Settings]) -> Generation:
        """As `Decoder.generate`."""
        return Generation.of(self.stream(input_ids, max_new_tokens, **settings))
