"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipsearch.models.adapter import ModelSpec

# Tokens of a prompt and its answer, for a model whose config names no limit.
DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    max_num_seqs: requests that are decoded at the same time, a round of each in turn.
    max_queue: requests that may wait in the queue.
    max_body_bytes: bytes of a request body.
    request_timeout_s: seconds of decoding after which an answer ends, as if at its token limit.
    body_timeout_s: seconds in which the body of a request has to arrive.
    prefix_cache_size: idle prefixes whose K/V is kept for later requests with the same key.
    batch_passes: run the passes of all running requests as one batch instead of in turn.
    prefix_bytes: bytes of K/V of the idle prefixes.
    prefix_folder: where the K/V of long prefixes are stored for the next start; None: nowhere.
    prefix_disk_bytes: bytes of the files in that folder.
    context: most tokens of a prompt and its answer; None: the model's limit, or DEFAULT_CONTEXT if
        it has none.
    batch_slots: slots of the batch cache, all requests together. A request that outgrows its part
        continues in a cache of its own.
    prompt_rows: tokens of a prompt that a round reads, so that others need not wait for all of it.
    connections: open connections; fewer if the process may not open so many files.
    head_s: seconds in which the head of a request has to arrive.
    idle_s: seconds that a connection stays open between two requests.
    unread_s: seconds in which a client has to read a part of its response.
    """

    max_num_seqs: int = 4
    max_queue: int = 64
    max_body_bytes: int = 2**21
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    prefix_cache_size: int = 16
    batch_passes: bool = False
    prefix_bytes: int = 2 * 10**9
    prefix_folder: Path | None = None
    prefix_disk_bytes: int = 2 * 10**9
    context: int | None = None
    batch_slots: int = 32_768
    prompt_rows: int = 256
    connections: int = 512
    head_s: float = 10.0
    idle_s: float = 30.0
    unread_s: float = 60.0

    def context_of(self, spec: ModelSpec) -> int:
        """Return the most tokens of a prompt and its answer."""
        longest = spec.context_length or self.context or DEFAULT_CONTEXT
        return min(self.context or longest, longest)
