"""`Batch`: requests that are decoded together, each with its own acceptance, end and seed.

Each request runs the loop of `loop.py` on a row of one shared cache. A request that needs a pass
waits. If all requests wait, the passes of one kind run as one, padded to the longest. Draft passes
run before verify passes, so that one verify pass serves all requests. A batch therefore has no
decoding rules of its own.

A waiting request is a suspended greenlet. One thread runs all requests, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from skipsearch.decoding.batch_cache import BatchCache, RowLease
from skipsearch.decoding.loop import Chunk, DecodeLoop, Generation
from skipsearch.decoding.prefix_cache import CacheSource, PrefixCache
from skipsearch.decoding.request import Request
from skipsearch.decoding.tracing import Trace
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import PassRequest, is_batch_invariant, no_grad, run_batched
from skipsearch.errors import DecodeError


class RunningRequest:
    """A request of a batch: a greenlet that runs `work`."""

    def __init__(self, work: Callable[[], Any]):
        self.chunk: Chunk | None = None  # tokens of the latest round; None: an error ended it
        self.error: Exception | None = None  # the error that ended the request
        self.result: Any = None  # the return value of `work()`
        self.ended = False
        self._work = work
        self._greenlet = greenlet(self._run_work)

    def switch(self, pass_result: Any = None) -> Any:
        """Resume the request until it waits again.

        pass_result: the result of the pass for which the request waited, or an error to raise in
        the request. Returns the pass for which the request waits now; None if it waits for the next
        round, or has ended.
        """
        self._greenlet.parent = getcurrent()
        message = (
            self._greenlet.throw(pass_result)
            if isinstance(pass_result, Exception)
            else self._greenlet.switch(pass_result)
        )
        return message if isinstance(message, PassRequest) else None

    def chunk_or_raise(self) -> Chunk:
        """Return the tokens of the latest round, or raise the error that ended the request."""
        if self.error is not None:
            raise self.error
        assert self.chunk is not None
        return self.chunk

    def close(self) -> None:
        """End the request at once."""
        if self._greenlet and not self.ended:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)
        self.ended = True

    def _run_work(self, _: Any) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.ended = True


def yield_to_driver(request: PassRequest | None) -> Any:
    """Suspend the running request; return the value with which the batch resumes it.

    request: the pass for which the running request waits; None: it waits for the next round.
    """
    driver = getcurrent().parent
    assert driver is not None
    return driver.switch(request)


class Batch:
    """A batch of at most `max_requests` requests that one thread decodes together.

    `run_round` decodes a round of each request. Between rounds, requests may join and leave.

    plain_from_batch: if at least this number of requests are in the batch, no request drafts,
    because plain decoding is then faster; None: requests always draft. max_slots: the slots of the
    shared cache (see `BatchCache`).

    A request gets the same tokens as alone, with two exceptions. A sampled request may get a
    different sample from the same distribution, because `plain_from_batch` changes in which rounds
    it drafts. And in fp32 and below, a near-tie may be decided differently, because a pass over
    several requests rounds differently from a pass over one. The second exception does not apply to
    `exact`: its passes run one request at a time, or together if the engine is batch-invariant
    (native).

    Passes also run one request at a time if the model has state other than a KV cache with slots
    (recurrent layers), or if a drafter observes hidden states. The engine `graph` does not capture
    passes over several requests; it runs them as the engine `lean` does. The times of a request
    include the time in which it waits for others.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        max_requests: int,
        plain_from_batch: int | None = None,
        max_slots: int | None = None,
    ):
        if max_requests < 1:
            raise DecodeError(f"max_requests is {max_requests!r}; a batch has at least one")
        self.loop, self.max_requests, self.plain_from_batch = loop, max_requests, plain_from_batch
        self.running: list[RunningRequest] = []
        self._drafting_paused = False
        model, exact = loop.model, loop.exact
        shares_passes = (
            not model.spec.is_recurrent  # a state that is not in slots
            and model.spec.ragged_batches
            and (not exact or is_batch_invariant(model))
        )
        self._batch_cache = (
            BatchCache(
                model, max_requests, lambda *args: yield_to_driver(PassRequest(*args)), max_slots
            )
            if shares_passes
            else None
        )

    @property
    def n_free(self) -> int:
        """The number of requests that may join."""
        return self.max_requests - len(self.running)

    def join(
        self,
        request: Request,
        *,
        trace: bool = False,
        prefix_cache: PrefixCache | None = None,
        tenant: str | None = None,
        prompt_rows: int | None = None,
    ) -> RunningRequest:
        """Add a request, which `run_round` decodes from now on.

        trace, prefix_cache, prompt_rows: as in `Decoder.stream`. K/V are copied from the prefix
        cache, and back to it.
        tenant: if the prompts of two requests of one tenant share a prefix, its K/V is computed
        once; None: share nothing.

        Raises: DecodeError if a value of the request is not allowed, or if the batch is full.
        """
        prepared = request.prepare(self.loop.model)

        def work() -> None:
            with closing(
                self.loop.stream(
                    prepared,
                    self.make_cache_source(prefix_cache, tenant),
                    self.make_trace(trace),
                    prompt_rows,
                )
            ) as stream:  # type: ignore[type-var]
                for chunk in stream:
                    running.chunk = chunk
                    if chunk.finish_reason is None:
                        yield_to_driver(None)

        running = self.start_work(work)
        return running

    def start_work(self, work: Callable[[], Any]) -> RunningRequest:
        """Add a request that runs a function, `work`. `run_round` starts and resumes it.

        `work` must decode with a cache from `make_cache_source`. Its passes run with those of other
        requests. Raises: DecodeError if the batch is full.
        """
        if not self.n_free:
            raise DecodeError(
                f"the batch has {self.max_requests} rows and all are taken: step until one has "
                "ended"
            )
        running = RunningRequest(work)
        self.running.append(running)
        return running

    def make_cache_source(
        self, prefix_cache: PrefixCache | None = None, tenant: str | None = None
    ) -> CacheSource | None:
        """Return the cache source of a request of this batch; None: the loop provides the cache.

        prefix_cache, tenant: as in `join`.
        """
        return (
            prefix_cache
            if self._batch_cache is None
            else RowLease(self._batch_cache, prefix_cache, tenant)
        )

    @no_grad
    def run_round(self) -> list[RunningRequest]:
        """Decode a round of every request, and return these requests.

        Requests that have ended leave the batch.
        """
        if self._batch_cache is not None:
            self._batch_cache.compact_rows()
        self._drafting_paused = (
            self.plain_from_batch is not None and len(self.running) >= self.plain_from_batch
        )
        requests = self.running
        for request in requests:
            request.chunk = None
        results: list[tuple[RunningRequest, Any]] = [(request, None) for request in requests]
        waiting: list[tuple[RunningRequest, PassRequest]] = []
        while results:
            for request, result in results:
                pass_request = request.switch(result)
                if pass_request is not None:
                    waiting.append((request, pass_request))
            results = _run_next_group(waiting)
        self.running = [request for request in requests if not request.ended]
        return requests

    @no_grad
    def drop(self, request: RunningRequest) -> None:
        """End a request and remove it from the batch."""
        request.close()
        if request in self.running:
            self.running.remove(request)

    def close(self) -> None:
        for request in list(self.running):
            self.drop(request)

    def make_trace(self, traced: bool = False) -> Trace | None:
        """Return a trace that can pause a request's drafters; None if the request needs no trace.

        traced: also record proposals.
        """
        return _BatchTrace(self, traced) if traced or self.plain_from_batch is not None else None

    @property
    def drafting_paused(self) -> bool:
        return self._drafting_paused


def run_batch(batch: Batch, requests: Sequence[Request]) -> list[Generation]:
    """Decode all requests and return the answers in the order of the requests.

    Raises: the error of the first request that fails.
    """
    numbered = iter(enumerate(requests))
    chunks: list[list[Chunk]] = [[] for _ in requests]
    numbers: dict[RunningRequest, int] = {}
    with closing(batch):
        while True:
            for _, (number, request) in zip(range(batch.n_free), numbered, strict=False):
                numbers[batch.join(request, tenant="caller")] = number
            if not batch.running:
                return [Generation.from_chunks(chunks_of_one) for chunks_of_one in chunks]
            for running in batch.run_round():
                if running.error is not None:
                    raise running.error
                if running.chunk is not None:
                    chunks[numbers[running]].append(running.chunk)


def _run_next_group(
    waiting: list[tuple[RunningRequest, PassRequest]],
) -> list[tuple[RunningRequest, Any]]:
    """Run the largest group of waiting passes of one kind as one pass, and return their results.

    Draft passes run before passes of the full model. The passes are removed from `waiting`.
    """
    drafting = [pair for pair in waiting if pair[1].mask is not None]
    kinds = [pass_request.group_key for _, pass_request in drafting or waiting]
    if not kinds:
        return []
    kind = max(kinds, key=kinds.count)
    group = [pair for pair in waiting if pair[1].group_key == kind]
    waiting[:] = [pair for pair in waiting if pair[1].group_key != kind]
    try:
        results: Sequence[Any] = run_batched([pass_request for _, pass_request in group])
    except Exception as error:
        results = [_copy_error(error) for _ in group]  # `switch` raises it in each request
    return [(request, result) for (request, _), result in zip(group, results, strict=True)]


def _copy_error(error: Exception) -> Exception:
    """Return an error of its own for one request: raising it adds to its traceback."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.__cause__ = error
    return copied


class _BatchTrace(Trace):
    """A trace that pauses a request's drafters while the batch is large.

    traced: also record proposals.
    """

    def __init__(self, batch: Batch, traced: bool):
        super().__init__()
        self._batch, self._traced = batch, traced

    def wrap_session(self, drafter_index: int, session: DraftSession) -> DraftSession:
        return _PausableSession(
            self._batch, super().wrap_session(drafter_index, session) if self._traced else session
        )


class _PausableSession(DraftSession):
    def __init__(self, batch: Batch, session: DraftSession):
        self._batch, self._session = batch, session

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        return None if self._batch.drafting_paused else self._session.draft(ctx, max_tokens)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self._session.verified(ctx, accepted_nodes)
