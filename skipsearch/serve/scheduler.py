"""The scheduler: the thread that decodes.

Requests wait in a queue. Running requests get a round each in turn, or run their passes in one
batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from skipsearch.decoding import Chunk, Decoder, Request, RunningRequest
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.serve.api_errors import APIError, to_api_error
from skipsearch.serve.limits import Limits
from skipsearch.serve.logprobs import LogprobScorer, TokenScore
from skipsearch.serve.prefix_disk import PrefixDisk
from skipsearch.serve.prefix_pool import PrefixPool


@dataclass(frozen=True)
class RoundOutput:
    """The output of one round of an answer.

    chunk: its tokens and text; None if the answer ended at its time limit before the round.
    scores: log-probabilities of the chunk's tokens. In the first round those of the prompt come
        before them if the request sets `echo`.
    """

    chunk: Chunk | None
    scores: tuple[TokenScore, ...] = ()


@dataclass(eq=False)
class Job:
    """One answer to generate.

    prompt_ids: token ids of the prompt.
    tenant: the owner of the prefixes that it may use.
    plain: decode without drafting.
    n_top: most likely tokens to list at each position of the answer; None: no log-probabilities.
    echo: list them at the positions of the prompt too.
    deliver: called by the scheduler thread with each round's output. The last call has an APIError
        or None.
    cancelled: set if the client has disconnected.
    """

    request: Request
    prompt_ids: list[int]
    tenant: str
    deliver: Callable[[RoundOutput | APIError | None], None]
    plain: bool = False
    n_top: int | None = None
    echo: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Active:
    """A job that runs.

    stream: yields its chunks. In a batch, the request whose round the batch has run already.
    deadline: time (`monotonic`) at which the answer ends.
    prompt_scored: whether the log-probabilities of the prompt were computed.
    """

    job: Job
    stream: Iterator[Chunk] | RunningRequest
    prefix: PrefixCache
    deadline: float
    scorer: LogprobScorer | None
    prompt_scored: bool = False


class Scheduler:
    """A scheduler that decodes jobs in its own thread and delivers the output of each round.

    Requests that run in turn share the time of the thread and nothing else. Requests of a batch
    share passes, so each waits for the others in every round. Requests with the same key share the
    K/V of common prefixes.
    """

    def __init__(self, decoder: Decoder, limits: Limits):
        self.decoder, self.limits = decoder, limits
        self.plain_decoder = Decoder(decoder.model, draft_forced=False)
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
        disk = (
            None
            if limits.prefix_folder is None
            else PrefixDisk(limits.prefix_folder, limits.prefix_disk_bytes, decoder.model)
        )
        self._prefix_cache = PrefixPool(limits.prefix_cache_size, limits.prefix_bytes, disk)
        self._closing = False
        self._condition = threading.Condition()
        self._mean_seconds = 1.0  # running mean of the seconds that a request takes
        self._thread = threading.Thread(
            target=self._decode_forever, name="skipsearch-decoding", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more jobs, finish those that were accepted, and return when that is done."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()
            self._prefix_cache.close()

    @property
    def queue_sizes(self) -> tuple[int, int]:
        """Return (number of running requests, number of waiting requests)."""
        return len(self._running), len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """Queue all of these jobs, or none.

        Raises: APIError 429 if the queue is full, 503 if the server is shutting down.
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
        """Cancel a job whose client has disconnected: it leaves the queue now, or stops within a
        round.
        """
        job.cancelled.set()
        with self._condition, suppress(ValueError):
            self._waiting.remove(job)

    def _decode_forever(self) -> None:
        """Run the loop of the thread: start waiting jobs, then run a round of each job that runs.

        Returns after `close`, when no job is left. Sleeps while there is no job.
        """
        while True:
            with self._condition:
                while not self._waiting and not self._running:
                    if self._closing:
                        return
                    self._condition.wait()
                starting = [
                    self._waiting.popleft()
                    for _ in range(
                        min(len(self._waiting), self.limits.max_num_seqs - len(self._running))
                    )
                ]
            for job in starting:
                self._start_job(job)
            for batch in self._batches.values():
                batch.run_round()
            for running in list(self._running):
                if not self._run_round(running):
                    self._running.remove(running)

    def _start_job(self, job: Job) -> None:
        """Begin to decode a job: acquire its prefix cache and open its stream.

        If that fails, the job gets the error and does not run.
        """
        decoder = self.plain_decoder if job.plain else self.decoder
        prefix, scorer = self._prefix_cache.acquire(job.tenant, job.prompt_ids), None
        try:
            # The decoder checks the time within a round too.
            job.request = replace(job.request, max_seconds=self.limits.request_timeout_s)
            if job.n_top is not None:
                max_tokens = len(job.prompt_ids) + job.request.max_new_tokens
                scorer = LogprobScorer(
                    decoder.model,
                    job.n_top,
                    min(max_tokens, decoder.model.spec.context_length or max_tokens),
                    job.request.new_matcher(decoder.model),
                )
            # Last, because a request of a batch runs until it is dropped.
            stream = self._open_stream(decoder, job, prefix)
        except Exception as error:
            self._prefix_cache.release(job.tenant, prefix)
            job.deliver(to_api_error(error))
            return
        self._running.append(
            _Active(job, stream, prefix, monotonic() + self.limits.request_timeout_s, scorer)
        )

    def _open_stream(
        self, decoder: Decoder, job: Job, prefix: PrefixCache
    ) -> Iterator[Chunk] | RunningRequest:
        """Return the stream of a job's chunks, or its request in a batch."""
        prompt_rows = self.limits.prompt_rows
        if decoder in self._batches:
            return self._batches[decoder].join(
                job.request,
                trace=True,
                prefix_cache=prefix,
                tenant=job.tenant,
                prompt_rows=prompt_rows,
            )
        return decoder.stream(job.request, trace=True, prefix_cache=prefix, prompt_rows=prompt_rows)

    def _close_stream(self, active: _Active) -> None:
        """Close the stream of a job, or drop its request from the batch, to free its cache."""
        if isinstance(active.stream, RunningRequest):
            for batch in self._batches.values():
                batch.drop(active.stream)
        else:
            active.stream.close()  # type: ignore[attr-defined]

    def _run_round(self, active: _Active) -> bool:
        """Deliver the output of one round. Returns whether there will be another.

        If not, it closes the stream and releases the prefix cache.
        """
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
                    if chunk.tokens or chunk.finish_reason:  # else a part of the prompt was read
                        job.deliver(RoundOutput(chunk, self._score_chunk(active, chunk)))
                    if chunk.finish_reason is None:
                        return True
                else:
                    last = RoundOutput(None)
        except Exception as error:
            last = to_api_error(error)
        try:
            self._close_stream(active)
        except Exception as error:  # the other requests continue
            last = last or to_api_error(error)
        self._prefix_cache.release(job.tenant, active.prefix)
        self._mean_seconds = 0.8 * self._mean_seconds + 0.2 * max(
            0.0, monotonic() - (active.deadline - self.limits.request_timeout_s)
        )
        if last is not None:
            job.deliver(last)
        job.deliver(None)
        return False

    def _score_chunk(self, active: _Active, chunk: Chunk) -> tuple[TokenScore, ...]:
        """Return the log-probabilities of a chunk, with those of the prompt before the first chunk
        if wanted.
        """
        if active.scorer is None:
            return ()
        prompt_scores: list[TokenScore] = []
        if not active.prompt_scored:
            active.prompt_scored = True
            prompt_scores = active.scorer.extend(active.job.prompt_ids)
        return (
            *(prompt_scores if active.job.echo else ()),
            *active.scorer.extend(chunk.tokens, is_answer=True),
        )
