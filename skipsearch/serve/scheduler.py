"""The one thread that decodes: requests wait in a queue, and those that run take turns, a round of
each, or run in one batch.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from skipsearch.decoding import Chunk, Decoder, Request, RunningRequest
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.errors import SkipSearchError
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.limits import Limits
from skipsearch.serve.logprobs import LogprobScorer, TokenScore
from skipsearch.serve.prefix_pool import PrefixPool

log = logging.getLogger("skipsearch.serve")


@dataclass(frozen=True)
class RoundOutput:
    """What one round added to an answer. chunk None: its time is over, and it ends as it stands.

    scores: of the chunk's tokens; of the prompt's before them in the first piece, where those were
    asked for too."""

    chunk: Chunk | None
    scores: tuple[TokenScore, ...] = ()


@dataclass(eq=False)
class Job:
    """One answer that is wanted. prompt_ids: its token ids. tenant: whose prefixes it may use.
    plain: decode without drafting.

    n_top: likeliest tokens to name at each place of the answer, None for no log-probabilities;
    echo: of the prompt's places too. deliver: called by the worker with each piece, and with a
    Fault or None where there will be no more."""

    request: Request
    prompt_ids: list[int]
    tenant: str
    deliver: Callable[[RoundOutput | APIError | None], None]
    plain: bool = False
    n_top: int | None = None
    echo: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)  # its client went away


@dataclass(eq=False)
class _Active:
    job: Job
    stream: (
        Iterator[Chunk] | RunningRequest
    )  # a row of the batch, which has been given its round when its turn comes
    prefix: PrefixCache
    deadline: float
    scorer: LogprobScorer | None
    prompt_scored: bool = False


class Scheduler:
    """Takes jobs, decodes them, delivers pieces. Interleaved requests share nothing but time; those
    of one batch share their passes too, so that each waits for the others of its round, and those
    of one key what their prompts begin with."""

    def __init__(self, decoder: Decoder, limits: Limits):
        self.decoder, self.limits = decoder, limits
        self.plain_decoder = decoder if not decoder.recipe.drafters else Decoder(decoder.model)
        self._batches = (
            {
                each: each.new_batch(limits.max_num_seqs, limits.batch_slots)
                for each in (decoder, self.plain_decoder)
            }
            if limits.batch_passes
            else {}
        )
        self._waiting: deque[Job] = deque()
        self._running: list[_Active] = []
        self._prefix_cache = PrefixPool(limits.prefix_cache_size, limits.prefix_bytes)
        self._closing = False
        self._condition = threading.Condition()
        self._mean_seconds = 1.0  # seconds of a request, lately
        self._thread = threading.Thread(
            target=self._decode_forever, name="skipsearch-decoding", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take nothing more, finish what was taken, and return when that is done."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queue_sizes(self) -> tuple[int, int]:
        """(requests running, requests waiting)"""
        return len(self._running), len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """All of them or none. Raises: Fault 429 where the queue has no room, 503 where the server
        is about to end.
        """
        with self._condition:
            if self._closing:
                raise APIError(
                    503,
                    "the server is about to end and takes no more requests",
                    code="shutting_down",
                )
            if len(self._waiting) + len(jobs) > self.limits.max_queue:
                seconds = max(
                    1, round(self._mean_seconds * len(self._waiting) / self.limits.max_num_seqs)
                )
                raise APIError(
                    429,
                    f"{len(self._waiting)} requests are waiting already, and at most "
                    f"{self.limits.max_queue} may: try again in "
                    f"{seconds} s",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(seconds)},
                )
            self._waiting.extend(jobs)
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """Its client is gone: it leaves the queue now, or the model within a round."""
        job.cancelled.set()
        with self._condition, suppress(ValueError):
            self._waiting.remove(job)

    def _decode_forever(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._running:
                    if self._closing:
                        return
                    self._condition.wait()
                begun = [
                    self._waiting.popleft()
                    for _ in range(
                        min(len(self._waiting), self.limits.max_num_seqs - len(self._running))
                    )
                ]
            for job in begun:
                self._start_job(job)
            for batch in self._batches.values():
                batch.run_round()
            for running in list(self._running):
                if not self._run_round(running):
                    self._running.remove(running)

    def _start_job(self, job: Job) -> None:
        decoder = self.plain_decoder if job.plain else self.decoder
        prefix, scorer = self._prefix_cache.acquire(job.tenant, job.prompt_ids), None
        try:
            job.request = replace(
                job.request, max_seconds=self.limits.request_timeout_s
            )  # asked for within a round as well
            if job.n_top is not None:
                most = len(job.prompt_ids) + job.request.max_new_tokens
                scorer = LogprobScorer(
                    decoder.model, job.n_top, min(most, decoder.model.spec.context_length or most)
                )
            stream = self._open_stream(
                decoder, job, prefix
            )  # last, because a row of a batch runs until it is dropped
        except Exception as error:
            self._prefix_cache.release(job.tenant, prefix)
            job.deliver(_to_api_error(error))
            return
        self._running.append(
            _Active(job, stream, prefix, monotonic() + self.limits.request_timeout_s, scorer)
        )

    def _open_stream(
        self, decoder: Decoder, job: Job, prefix: PrefixCache
    ) -> Iterator[Chunk] | RunningRequest:
        if decoder in self._batches:
            return self._batches[decoder].join(
                job.request, trace=True, prefix_cache=prefix, tenant=job.tenant
            )
        return decoder.stream(job.request, trace=True, prefix_cache=prefix)

    def _close_stream(self, active: _Active) -> None:
        if isinstance(active.stream, RunningRequest):
            for batch in self._batches.values():
                batch.drop(active.stream)
        else:
            active.stream.close()  # type: ignore[attr-defined]

    def _run_round(self, active: _Active) -> bool:
        """One round; whether there will be another."""
        job = active.job
        last: RoundOutput | APIError | None = None
        try:
            if not job.cancelled.is_set():
                if monotonic() <= active.deadline:
                    chunk = (
                        active.stream.chunk_or_raise()
                        if isinstance(active.stream, RunningRequest)
                        else next(active.stream)
                    )
                    job.deliver(RoundOutput(chunk, self._score_chunk(active, chunk)))
                    if chunk.finish_reason is None:
                        return True
                else:
                    last = RoundOutput(None)
        except Exception as error:
            last = _to_api_error(error)
        try:
            self._close_stream(active)
        except Exception as error:  # the other requests go on
            last = last or _to_api_error(error)
        self._prefix_cache.release(job.tenant, active.prefix)
        self._mean_seconds = 0.8 * self._mean_seconds + 0.2 * max(
            0.0, monotonic() - (active.deadline - self.limits.request_timeout_s)
        )
        if last is not None:
            job.deliver(last)
        job.deliver(None)
        return False

    def _score_chunk(self, active: _Active, chunk: Chunk) -> tuple[TokenScore, ...]:
        if active.scorer is None:
            return ()
        before: list[TokenScore] = []
        if not active.prompt_scored:
            active.prompt_scored = True
            before = active.scorer.extend(active.job.prompt_ids)
        return (*(before if active.job.echo else ()), *active.scorer.extend(chunk.tokens))


def _to_api_error(error: Exception) -> APIError:
    """What a client is told of an error. Of one that is ours the kind and the place are written
    down, and not what it says, which may quote the request."""
    if isinstance(error, SkipSearchError):
        return APIError(400, str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = (
        f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "nowhere"
    )
    log.error("a request ended in %s at %s", type(error).__name__, where)
    return APIError(
        500,
        "the server failed at this request, which is its own fault: try another, and report it",
        code="internal",
    )
