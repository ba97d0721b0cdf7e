"""How much a server takes on."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CONTEXT = (
    131_072  # tokens of a prompt and its answer, for a model whose config names no limit
)


@dataclass(frozen=True)
class Limits:
    """max_num_seqs: requests that are decoded side by side, a round of each in turn. max_queue:
    requests that may wait behind them.

    max_body_bytes: bytes of a request. request_timeout_s: of decoding one request, after which its
    answer ends as at its limit of tokens. body_timeout_s: seconds that the body of a request may
    take to arrive. prefix_cache_size: texts whose K/V is kept for later requests of the same key.
    batch_passes: run the passes of running requests as one instead of in turn. prefix_bytes: of the
    K/V of these texts. context: most tokens of a prompt and its answer; None: the model's own
    limit, or DEFAULT_CONTEXT where it has none. batch_slots: tokens whose K/V the requests of a
    batch have room for together; a request that outgrows its part continues alone.

    connections: open at the same time; fewer where the process may open few files. head_s: seconds
    that the head of a request may take. idle_s: seconds that a connection stays open between two
    requests. unread_s: seconds in which a client has to read a part of its answer."""

    max_num_seqs: int = 4
    max_queue: int = 64
    max_body_bytes: int = 2**21
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    prefix_cache_size: int = 16
    batch_passes: bool = False
    prefix_bytes: int = 2 * 10**9
    context: int | None = None
    batch_slots: int = 32_768
    connections: int = 512
    head_s: float = 10.0
    idle_s: float = 30.0
    unread_s: float = 60.0
