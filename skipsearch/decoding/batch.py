"""`Batch`: requests that are decoded side by side, each with its own acceptance, end and seed.

Each request runs the loop of `loop.py` for itself, on a row of one cache. Where it needs a pass of a model it waits, and when all of them
wait the passes of one kind run as one, padded to the longest: drafts first, so that those who draft little wait for those who draft much
and one verify pass serves all. So every rule of decoding stands in one place, and a batch knows none of them.

A waiting request is a suspended greenlet: nothing of it runs at the same time as anything else, and one thread drives them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from skipsearch.cache import KVCache, Planner
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.prefix import Lender, Prefix, Room
from skipsearch.decoding.request import Request
from skipsearch.decoding.watching import Watch
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import RowCache, SharedCache, Wanted, inference, together
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter

if TYPE_CHECKING:
    from skipsearch.decoding.decoder import Decoder


class Row:
    """One request of a batch. chunk: what the latest step added to it; None where something ended it: error.

    ended: whether there will be no more. result: of its work, once that is done.
    """

    def __init__(self, work: Callable[[], Any]):
        self.chunk: Chunk | None = None
        self.error: Exception | None = None
        self.result: Any = None
        self.ended = False
        self.cache: RowCache | None = None
        self._work = work
        self._greenlet = greenlet(self._run)

    def resume(self, answer: Any = None) -> Any:
        """On until it waits for a pass, which is returned, or for the next step: None. answer: what the pass that it waited for gave."""
        self._greenlet.parent = getcurrent()
        said = self._greenlet.throw(answer) if isinstance(answer, Exception) else self._greenlet.switch(answer)
        return said if isinstance(said, Wanted) else None

    def close(self) -> None:
        """Ends it where it is."""
        if self._greenlet and not self.ended:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)
        self.ended = True

    def _run(self, _: Any) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.ended = True


def wait_for(wanted: Wanted | None) -> Any:
    """Called within a row: hands over to whoever drives it, and returns its answer. None waits for the next step."""
    driver = getcurrent().parent
    assert driver is not None
    return driver.switch(wanted)


class Batch:
    """At most `rows` requests of a decoder side by side: `step` decodes a round of each, and between rounds requests may join and leave.

    plain_from: requests from which on nobody drafts, since plain decoding is faster then; None: they always draft. A sampled request that
    drafts in other rounds than alone gets another sample of the same distribution; apart from that a request's tokens are those that it
    gets alone. A pass over several rows rounds otherwise than one over a single row, so in fp32 and below a near-tie may fall otherwise;
    not with `exact`, whose passes run row by row, as do those of models that keep more of a text than K/V by slot. The engines compiled and
    graph run passes over several rows as lean does. Passes whose hidden states a drafter watches run row by row too.
    One thread drives a batch. A row's times count what it waited for others.
    """

    def __init__(self, decoder: Decoder, rows: int, plain_from: int | None = None):
        if rows < 1:
            raise DecodeError(f"rows is {rows!r}; a batch has at least one")
        self.decoder, self.most, self.plain_from = decoder, rows, plain_from
        self.rows: list[Row] = []
        self._crowded = False
        self._room: _Rooms | None = None if decoder.loop.exact else _Rooms(decoder.model, rows)
        if self._room is not None and not self._room.shares:
            self._room = None

    @property
    def free(self) -> int:
        """Requests that may join."""
        return self.most - len(self.rows)

    def join(self, request: Request, *, trace: bool = False, prefix: Prefix | None = None) -> Row:
        """A request that `step` decodes from now on. trace, prefix: as in `Decoder.stream`; what it leaves in the prefix is a copy.

        Raises: DecodeError for one that makes no sense, or where there is no room.
        """
        ready = request.ready(self.decoder.model)

        def work() -> None:
            with closing(self.decoder.loop.stream(ready, self.lender(prefix), self._watch(trace))) as stream:  # type: ignore[type-var]
                for chunk in stream:
                    row.chunk = chunk
                    if chunk.finish_reason is None:
                        wait_for(None)

        row = self.start(work)
        return row

    def start(self, work: Callable[[], Any]) -> Row:
        """Any work that decodes by way of `lender`. Raises: DecodeError where there is no room."""
        if not self.free:
            raise DecodeError(f"the batch has {self.most} rows and all are taken: step until one has ended")
        row = Row(work)
        self.rows.append(row)
        return row

    def lender(self, prefix: Prefix | None = None) -> Lender | None:
        """What a request that runs in this batch gets its cache from; None: one of its own."""
        return prefix if self._room is None else _Lent(self._room, prefix)

    @inference
    def step(self) -> list[Row]:
        """A round of every request. Returns all of them; those that have ended are no longer part of the batch."""
        if self._room is not None:
            self._room.close_ranks()
        self._crowded = self.plain_from is not None and len(self.rows) >= self.plain_from
        for row in self.rows:
            row.chunk = None
        answers: list[tuple[Row, Any]] = [(row, None) for row in self.rows]
        waiting: list[tuple[Row, Wanted]] = []
        while answers:
            for row, answer in answers:
                wanted = row.resume(answer)
                if wanted is not None:
                    waiting.append((row, wanted))
            answers = _next_pass(waiting)
        rows, self.rows = self.rows, [row for row in self.rows if not row.ended]
        return rows

    @inference
    def drop(self, row: Row) -> None:
        """A request that nobody waits for any more."""
        row.close()
        if row in self.rows:
            self.rows.remove(row)

    def close(self) -> None:
        for row in list(self.rows):
            self.drop(row)

    def _watch(self, traced: bool) -> Watch | None:
        return _Company(self, traced) if traced or self.plain_from is not None else None

    @property
    def crowded(self) -> bool:
        return self._crowded


def generate_batch(batch: Batch, requests: Sequence[Request]) -> list[Generation]:
    """All of them, in their order. Raises: what the first of them that fails raises."""
    asked = iter(enumerate(requests))
    chunks: list[list[Chunk]] = [[] for _ in requests]
    numbers: dict[Row, int] = {}
    with closing(batch):
        while True:
            for _, (number, request) in zip(range(batch.free), asked, strict=False):
                numbers[batch.join(request)] = number
            if not batch.rows:
                return [Generation.of(found) for found in chunks]
            for row in batch.step():
                if row.error is not None:
                    raise row.error
                if row.chunk is not None:
                    chunks[numbers[row]].append(row.chunk)


def _next_pass(waiting: list[tuple[Row, Wanted]]) -> list[tuple[Row, Any]]:
    """Runs the passes of one kind, of those that wait, and returns what each gave; drafts before passes of the full model."""
    drafting = [pair for pair in waiting if pair[1].mask is not None]
    kinds = [wanted.kind for _, wanted in drafting or waiting]
    if not kinds:
        return []
    kind = max(kinds, key=kinds.count)
    chosen = [pair for pair in waiting if pair[1].kind == kind]
    waiting[:] = [pair for pair in waiting if pair[1].kind != kind]
    try:
        answers: Sequence[Any] = together([wanted for _, wanted in chosen])
    except Exception as error:
        answers = [error] * len(chosen)   # raised where each of them waits
    return [(row, answer) for (row, _), answer in zip(chosen, answers, strict=True)]


class _Rooms:
    """The shared cache of a batch and who has which row of it. shares: whether this model's requests can share one at all."""

    def __init__(self, model: ModelAdapter, rows: int):
        self.model, self.rows = model, rows
        self.shares = type(model.new_cache(1, 1)) is KVCache and model.spec.together
        self._shared: SharedCache | None = None
        self._planner: Planner | None = None
        self._taken: dict[int, RowCache] = {}

    def take(self, slots: int) -> tuple[RowCache, Planner]:
        """A row that nobody has, empty. Raises: DecodeError where there is none."""
        capacity = max(256, 1 << (slots - 1).bit_length())
        if self._shared is None or self._planner is None or self._shared.spare < capacity:
            self.model.new_cache(1, capacity + 1)   # which lets the engine know how long texts may become
            self._planner = Planner(capacity, self.model.spec.device)
            if self._shared is None:
                self._shared = SharedCache(self.model.spec.n_layers, self.rows, capacity)
            self._shared.grow(capacity)
        row = next((i for i in range(self.rows) if i not in self._taken), None)
        if row is None:
            raise DecodeError(f"the batch has {self.rows} rows and all are taken")
        cache = self._taken[row] = RowCache(self._shared, row, lambda *wanted: wait_for(Wanted(*wanted)))
        return cache, self._planner

    def free(self, cache: RowCache) -> None:
        del self._taken[cache.first]

    def close_ranks(self) -> None:
        """Rows that are in use stand next to each other, so that a pass over them runs over no empty ones. Between rounds only."""
        for place in range(len(self._taken)):
            if place not in self._taken and self._shared is not None:
                cache = self._taken.pop(max(self._taken))
                self._shared.move(cache, place)
                self._taken[place] = cache


class _Lent:
    """Lends a row of a batch. prefix: what an earlier request left, copied into the row, and where this one leaves a copy."""

    def __init__(self, rooms: _Rooms, prefix: Prefix | None):
        self._rooms, self._prefix = rooms, prefix
        self._cache: RowCache | None = None

    def lend(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Room:
        self._cache, planner = self._rooms.take(slots)
        if self._prefix is not None:
            try:
                cache, _ = self._prefix.lend(prompt, slots, model)
            except BaseException:
                self._rooms.free(self._cache)
                raise
            self._cache.take_over(cache, cache.length)
            self._cache.length = cache.length
        return self._cache, planner

    def give_back(self, history: Sequence[int]) -> None:
        assert self._cache is not None
        if self._prefix is not None:
            self._prefix.keep(self._cache)
            self._prefix.give_back(history)
        self._rooms.free(self._cache)


class _Company(Watch):
    """Of a request in a batch: its drafters have nothing to say while the batch is crowded. traced: what they propose is told."""

    def __init__(self, batch: Batch, traced: bool):
        super().__init__()
        self._batch, self._traced = batch, traced

    def over(self, drafter: int, session: DraftSession) -> DraftSession:
        return _Quiet(self._batch, super().over(drafter, session) if self._traced else session)


class _Quiet:
    def __init__(self, batch: Batch, session: DraftSession):
        self._batch, self._session = batch, session

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        return None if self._batch.crowded else self._session.draft(ctx, most)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self._session.verified(ctx, path)

    def __getattr__(self, name: str) -> Any:   # whatever else a session is told
        return getattr(self._session, name)
