"""The one thread that decodes: requests wait in a queue, and those that run take turns, a round of each, or run in one batch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from skipsearch.decoding import Chunk, Decoder, Request, Row
from skipsearch.decoding.prefix import Prefix
from skipsearch.errors import SkipSearchError
from skipsearch.serve.faults import Fault
from skipsearch.serve.limits import Limits
from skipsearch.serve.logprobs import Scorer, TokenScore
from skipsearch.serve.prefixes import Prefixes

log = logging.getLogger("skipsearch.serve")


@dataclass(frozen=True)
class Piece:
    """What one round added to an answer. chunk None: its time is over, and it ends as it stands.

    scores: of the chunk's tokens; of the prompt's before them in the first piece, where those were asked for too.
    """

    chunk: Chunk | None
    scores: tuple[TokenScore, ...] = ()


@dataclass(eq=False)
class Job:
    """One answer that is wanted. prompt: its token ids. key: whose prefixes it may use. plain: decode without drafting.

    top: likeliest tokens to name at each place of the answer, None for no log-probabilities; echo: of the prompt's places too.
    deliver: called by the worker with each piece, and with a Fault or None where there will be no more.
    """

    request: Request
    prompt: list[int]
    key: str
    deliver: Callable[[Piece | Fault | None], None]
    plain: bool = False
    top: int | None = None
    echo: bool = False
    gone: threading.Event = field(default_factory=threading.Event)   # its client went away


@dataclass(eq=False)
class _Running:
    job: Job
    stream: Iterator[Chunk] | Row   # a row of the batch, which has been given its round when its turn comes
    prefix: Prefix
    ends: float
    scorer: Scorer | None
    told: bool = False


class Desk:
    """Takes jobs, decodes them, delivers pieces. Interleaved requests share nothing but time; those of one batch share their passes too, so
    that each waits for the others of its round, and those of one key what their prompts begin with."""

    def __init__(self, decoder: Decoder, limits: Limits):
        self.decoder, self.limits = decoder, limits
        self.plain = decoder if not decoder.recipe.drafters else Decoder(decoder.model)
        self._batches = {each: each.batch(limits.running) for each in (decoder, self.plain)} if limits.together else {}
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._prefixes = Prefixes(limits.prefixes)
        self._closing = False
        self._changed = threading.Condition()
        self._took = 1.0   # seconds of a request, lately
        self._thread = threading.Thread(target=self._work, name="skipsearch-decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take nothing more, finish what was taken, and return when that is done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def counts(self) -> tuple[int, int]:
        """(requests running, requests waiting)"""
        return len(self._running), len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """All of them or none. Raises: Fault 429 where the queue has no room, 503 where the server is about to end."""
        with self._changed:
            if self._closing:
                raise Fault(503, "the server is about to end and takes no more requests", code="shutting_down")
            if len(self._waiting) + len(jobs) > self.limits.waiting:
                seconds = max(1, round(self._took * len(self._waiting) / self.limits.running))
                raise Fault(429, f"{len(self._waiting)} requests are waiting already, and at most {self.limits.waiting} may: try again in "
                            f"{seconds} s", code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
            self._waiting.extend(jobs)
            self._changed.notify()

    def forget(self, job: Job) -> None:
        """Its client is gone: it leaves the queue now, or the model within a round."""
        job.gone.set()
        with self._changed, suppress(ValueError):
            self._waiting.remove(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._running:
                    if self._closing:
                        return
                    self._changed.wait()
                begun = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.limits.running - len(self._running)))]
            for job in begun:
                self._begin(job)
            for batch in self._batches.values():
                batch.step()
            for running in list(self._running):
                if not self._advance(running):
                    self._running.remove(running)

    def _begin(self, job: Job) -> None:
        decoder = self.plain if job.plain else self.decoder
        try:
            prefix = self._prefixes.take(job.key, job.prompt)
            stream = self._stream(decoder, job, prefix)
            scorer = None
            if job.top is not None:
                most = len(job.prompt) + job.request.max_new_tokens
                scorer = Scorer(decoder.model, job.top, min(most, decoder.model.spec.context or most))
        except Exception as error:
            job.deliver(_fault(error))
            return
        self._running.append(_Running(job, stream, prefix, monotonic() + self.limits.seconds, scorer))

    def _stream(self, decoder: Decoder, job: Job, prefix: Prefix) -> Iterator[Chunk] | Row:
        if decoder in self._batches:
            return self._batches[decoder].join(job.request, trace=True, prefix=prefix, owner=job.key)
        return decoder.stream(job.request, trace=True, prefix=prefix)

    def _end(self, running: _Running) -> None:
        if isinstance(running.stream, Row):
            for batch in self._batches.values():
                batch.drop(running.stream)
        else:
            running.stream.close()  # type: ignore[attr-defined]

    def _advance(self, running: _Running) -> bool:
        """One round; whether there will be another."""
        job = running.job
        last: Piece | Fault | None = None
        try:
            if not job.gone.is_set():
                if monotonic() <= running.ends:
                    chunk = running.stream.latest() if isinstance(running.stream, Row) else next(running.stream)
                    job.deliver(Piece(chunk, self._scores(running, chunk)))
                    if chunk.finish_reason is None:
                        return True
                else:
                    last = Piece(None)
        except Exception as error:
            last = _fault(error)
        self._end(running)
        self._prefixes.give_back(job.key, running.prefix)
        self._took = 0.8 * self._took + 0.2 * max(0.0, monotonic() - (running.ends - self.limits.seconds))
        if last is not None:
            job.deliver(last)
        job.deliver(None)
        return False

    def _scores(self, running: _Running, chunk: Chunk) -> tuple[TokenScore, ...]:
        if running.scorer is None:
            return ()
        before: list[TokenScore] = []
        if not running.told:
            running.told = True
            before = running.scorer.extend(running.job.prompt)
        return (*(before if running.job.echo else ()), *running.scorer.extend(chunk.tokens))


def _fault(error: Exception) -> Fault:
    """What a client is told of an error. Of one that is ours the kind and the place are written down, and not what it says, which may quote
    the request."""
    if isinstance(error, SkipSearchError):
        return Fault(400, str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "nowhere"
    log.error("a request ended in %s at %s", type(error).__name__, where)
    return Fault(500, "the server failed at this request, which is its own fault: try another, and report it", code="internal")
